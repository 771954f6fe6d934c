"""Creates questions about synthetic images and a tiny, untrained vision-language model for trying recipes on a laptop.

    python scripts/make_shapes_vqa.py shapes
    rlinf launch --config shapes_sft
    rlinf launch --config shapes_grpo policy.model_name_or_path=<folder of the run>/safetensors/final

Each image contains a shape in a corner, and the question asks for its colour or its corner. Half of the training rows contain an
incorrect label: the next colour in the list, or the next corner clockwise. A model that clones them is correct about half of the time,
and a reward for correct replies teaches it which label to choose. test.jsonl has separate images, all with correct labels.

The folder contains `images`, `train.jsonl`, `test.jsonl` (columns question, answer, prompt, messages, images) and `model`, a LLaVA
model that transformers can load.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, LlavaForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_arithmetic_data import make_tokenizer, write_rows

from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor

IMAGE_SIZE, PATCH_SIZE = 32, 16
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50), "white": (240, 240, 240),
           "purple": (150, 60, 190)}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
CORNERS = ("top left", "top right", "bottom right", "bottom left")
QUESTIONS = {"colour": "What colour is it?", "corner": "In which corner is it?"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def draw(colour: str, shape: str, corner: str, generator: random.Random) -> Image.Image:
    """Return an image of one shape at a random position in one corner, on a dark background."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), tuple(generator.randint(0, 30) for _ in range(3)))
    size, half = generator.randint(9, 13), IMAGE_SIZE // 2
    left, top = (
        generator.randint(0, half - size) + (half - 1 if name in corner else 0) for name in ("right", "bottom")
    )
    right, bottom, third = left + size, top + size, size // 3
    pen, fill = ImageDraw.Draw(image), COLOURS[colour]
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)
    else:
        pen.rectangle((left + third, top, right - third, bottom), fill=fill)
        pen.rectangle((left, top + third, right, bottom - third), fill=fill)
    return image


def confused(answer: str, names: tuple[str, ...]) -> str:
    """Return the name that follows ``answer`` in ``names``, wrapping around at the end."""
    return names[(names.index(answer) + 1) % len(names)]


def make_rows(folder: Path, split: str, count: int, wrong_fraction: float, seed: int) -> list[dict]:
    """Write images to ``folder/images``, and return one row per image."""
    generator = random.Random(f"{seed} {split}")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour, shape, corner = (generator.choice(names) for names in (tuple(COLOURS), SHAPES, CORNERS))
        kind = generator.choice(list(QUESTIONS))
        name = f"images/{split}_{number:05d}.png"
        draw(colour, shape, corner, generator).save(folder / name)
        answer, names = (colour, tuple(COLOURS)) if kind == "colour" else (corner, CORNERS)
        shown = confused(answer, names) if generator.random() < wrong_fraction else answer
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTIONS[kind]}]}]
        reply = {"role": "assistant", "content": [{"type": "text", "text": shown}]}
        rows.append(
            {
                "question": QUESTIONS[kind],
                "answer": answer,
                "prompt": prompt,
                "messages": [*prompt, reply],
                "images": [name],
            }
        )
    return rows


def make_model(folder: Path, seed: int, hidden_size: int, num_layers: int) -> int:
    """Write a randomly initialised LLaVA and its processor; return the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*COLOURS, *CORNERS, *QUESTIONS.values()]
    tokenizer = make_tokenizer(words, CHAT_TEMPLATE, extra_special_tokens=("<image>",))
    tokenizer.save_pretrained(folder)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = {"image_processor_type": "CLIPImageProcessor", "size": square, "crop_size": square}
    facts = {"patch_size": PATCH_SIZE, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(
        json.dumps({**facts, "image_processor": image_processor}), encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": num_layers,
             "num_attention_heads": hidden_size // 32}  # fmt: skip
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **sizes, "num_key_value_heads": hidden_size // 32, "vocab_size": len(tokenizer),
                     "max_position_embeddings": 128, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
                     "eos_token_id": tokenizer.eos_token_id},
        vision_config={"model_type": "clip_vision_model", **sizes, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE,
                       "projection_dim": hidden_size},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # with transformers' default initialisation, images would have little effect
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    load_vlm_processor(folder, config).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make(
    folder: str | Path,
    num_train: int = 4000,
    num_test: int = 300,
    wrong_fraction: float = 0.5,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
) -> Path:
    """Write images, questions and the model to ``folder``, and return it."""
    folder = Path(folder)
    for split, count, share in (("train", num_train, wrong_fraction), ("test", num_test, 0.0)):
        write_rows(folder / f"{split}.jsonl", make_rows(folder, split, count, share, seed))
    num_parameters = make_model(folder / "model", seed, hidden_size, num_layers)
    print(
        f"{num_train} training rows, {num_test} test rows and a model with {num_parameters / 1e6:.1f} million parameters in {folder}"
    )
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=4000, help="number of rows in train.jsonl")
    parser.add_argument("--test", type=int, default=300, help="number of rows in test.jsonl")
    parser.add_argument(
        "--wrong-fraction",
        type=float,
        default=0.5,
        help="fraction of training rows labelled with the next colour or corner",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--num-layers", type=int, default=2)
    given = parser.parse_args()
    make(given.folder, given.train, given.test, given.wrong_fraction, given.seed, given.hidden_size, given.num_layers)
