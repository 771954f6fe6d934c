"""The guides' commands with their dataset scripts, at tiny size in this process: word problems, images and videos."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlinf.cli import main
from rlinf.data.video import VideoWriter
from rlinf.llm.losses import NLLLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.launch_worker import find_script
from rlinf.recipes.load import load_recipe
from rlinf.recipes.samples import Sample, collate
from rlinf.tracking.tracker import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from chat_models import chat_tokenizer
from make_tiny_vlm import IMAGE_SIZE, make_tiny_vlm

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '</s>' if m['role'] == 'assistant' else '' }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY = ["policy.device=cpu", "policy.parallelism.dp_shard_size=1", "policy.model_gradient_checkpointing=false", "train.timestamp=run",
        "train.param_dtype=float32", "train.optm_warmup_steps=0", "logging.logger=[]", "cluster.num_threads=1"]  # fmt: skip
GRPO = ["train.train_batch_per_replica=16", "rollout.n_generation=8", "rollout.batch_size=2", "train.max_num_steps=2",
        "train.optm_lr=1e-3"]  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> list[dict]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def clone(recipe: list[str], folder: Path, processor, rows: list[dict], answers: list[str], steps: int = 60) -> None:
    """Teach a tiny model to answer the prompts of a recipe in any of a few ways, so that the rewards of its answers differ."""
    _, script, packer_class, *overrides = recipe
    packer = runpy.run_path(str(find_script(script)))[packer_class]()
    packer.setup(load_recipe(recipe[0], overrides)[0], processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    policy = HuggingFacePolicy(str(folder), learning_rate=1e-2, micro_batch_size=16, tokenizer=tokenizer)
    samples = []
    for prompt in map(packer.prompt, rows):
        for answer in answers:
            tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
            mask = [False] * len(prompt.input_ids) + [True] * len(tokens)
            samples.append(Sample(prompt.input_ids + tokens, mask, prompt.model_inputs))
    for _ in range(steps):
        loss = policy.train(collate(samples), NLLLossFn())["loss"]
    assert loss < 0.3, "the model has learned the answers"
    policy.model.save_pretrained(folder)


def launch(recipe: list[str]) -> Path:
    """Run the command, and return the folder of its run."""
    name, script, _, *overrides = recipe
    assert main(["launch", "--config", name, script, *overrides]) == 0
    return Path(next(word for word in overrides if word.startswith("train.output_dir=")).partition("=")[2]) / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_grpo(run: Path, model: Path, reward: str) -> None:
    """Two steps: answers, rewards that differ, advantages, an update, and answers of the second step by the new weights."""
    steps = [line for line in read_metrics(run) if "train/loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step[f"rollout/reward_mean/{reward}"] < 1 and step["rollout/zero_variance_group_fraction"] < 1
        assert step["rollout/logprob_gap_exp_mean"] == pytest.approx(1, abs=1e-3) and step["train/grad_norm"] > 0
    before, after = weights(model), weights(run / "safetensors" / "final")
    assert before.keys() == after.keys() and any((before[name] - after[name]).abs().max() > 1e-3 for name in before)


def test_phi_learns_word_problems(tiny_lm, tmp_path, capfd):
    tokenizer = chat_tokenizer("phi")
    folder = Path(tiny_lm("phi3", vocab_size=len(tokenizer), max_position_embeddings=128))
    tokenizer.save_pretrained(folder)
    recipe = ["configs/phi/phi4-14b-p-fsdp4-r-tp2-grpo.toml", "./tools/dataset/gsm8k_grpo.py", "Gsm8kPacker", *TINY, *GRPO,
              f"policy.model_name_or_path={folder}", "rollout.max_response_length=8", "policy.model_max_length=128",
              f"train.train_policy.dataset.name={tmp_path}/rows.jsonl", f"train.output_dir={tmp_path}/out"]  # fmt: skip
    rows = [{"question": f"What is {a} + {4 - a}?", "answer": f"{a} + {4 - a} = 4\n#### 4"} for a in range(4)]
    write_rows(tmp_path / "rows.jsonl", rows)
    clone(recipe, folder, tokenizer, rows, ["#### 4<|im_end|></s>", "#### 5<|im_end|></s>"])
    run = launch(recipe)
    check_grpo(run, folder, "gsm8k")
    AutoModelForCausalLM.from_pretrained(run / "safetensors" / "final")
    assert "on the CPU, the trained model itself generates" in capfd.readouterr().err


def tiny_vlm(family: str, folder: Path) -> tuple[Path, object]:
    make_tiny_vlm(family, folder)
    config = AutoConfig.from_pretrained(folder)
    processor = load_vlm_processor(folder, config)
    image = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}[family]
    processor.chat_template = TEMPLATE.replace("IMAGE", image)
    processor.save_pretrained(folder)
    return folder, processor


@pytest.fixture
def videos(tmp_path) -> list[str]:
    """Names of two clips of two seconds, in the folder of the dataset."""
    pytest.importorskip("av", reason="needs rlinf[lerobot]")
    names = ["clips/dark.mp4", "clips/bright.mp4"]
    for name, grey in zip(names, (20, 230), strict=True):
        writer = VideoWriter(tmp_path / "data" / name, 4, IMAGE_SIZE, IMAGE_SIZE)
        writer.append(np.full((8, IMAGE_SIZE, IMAGE_SIZE, 3), grey, np.uint8))
        writer.close()
    return names


def test_a_model_that_sees_videos_is_fine_tuned(tmp_path, videos):
    folder, _ = tiny_vlm("qwen2_5_vl", tmp_path / "model")
    recipe = ["configs/cosmos-reason1-7b-fsdp2-sft.toml", "./tools/dataset/cosmos_sft.py", "CosmosPacker", *TINY,
              f"policy.model_name_or_path={folder}", "policy.model_max_length=200", "train.train_batch_per_replica=4",
              f"train.train_policy.dataset.name={tmp_path}/data", f"train.output_dir={tmp_path}/out", "train.epoch=3",
              "train.train_policy.dataset.subset=", "train.train_policy.dataset.split=train", "train.optm_lr=1e-2",
              "train.train_policy.dataset.test_size=2", "validation.freq=2"]  # fmt: skip
    words = ("dark", "bright")
    write_rows(tmp_path / "data" / "train.jsonl", [
        {"video": videos[i % 2], "conversations": [{"role": "system", "content": "be brief"},
         {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": words[i % 2]}]} for i in range(10)
    ])  # fmt: skip
    run = launch(recipe)
    losses = [line["sft/loss"] for line in read_metrics(run) if "sft/loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]
    assert any("eval/loss" in line for line in read_metrics(run))
    AutoModelForImageTextToText.from_pretrained(run / "safetensors" / "final")
    load_vlm_processor(run / "safetensors" / "final", AutoConfig.from_pretrained(folder))


def test_a_model_that_sees_videos_learns_to_choose(tmp_path, videos):
    folder, processor = tiny_vlm("qwen2_5_vl", tmp_path / "model")
    recipe = ["configs/cosmos-reason1-7b-p-fsdp2-r-tp2-grpo.toml", "tools/dataset/cosmos_grpo.py", "CosmosChoicePacker", *TINY, *GRPO,
              f"policy.model_name_or_path={folder}", "policy.model_max_length=400", "rollout.max_response_length=60",
              f"train.train_policy.dataset.name={tmp_path}/data", f"train.output_dir={tmp_path}/out",
              "train.train_policy.dataset.subset=", "train.train_policy.dataset.split=train"]  # fmt: skip
    options = {"A": "dark", "B": "bright"}
    rows = write_rows(tmp_path / "data" / "train.jsonl", [
        {"video": video, "qa_pairs": {"question": "what is it?", "index2ans": options, "answer": answer}}
        for video, answer in zip(videos, options, strict=True)
    ])  # fmt: skip
    clone(
        recipe,
        folder,
        processor,
        rows,
        [f"<think>\nit\n</think>\n\n<answer>\n{letter}\n</answer></s>" for letter in options],
    )
    run = launch(recipe)
    check_grpo(run, folder, "single_choice")
    AutoModelForImageTextToText.from_pretrained(run / "safetensors" / "final")


def test_a_model_that_sees_images_is_fine_tuned(tmp_path):
    folder, _ = tiny_vlm("gemma3", tmp_path / "model")
    recipe = ["configs/gemma/gemma3-12b-vlm-fsdp4-sft.toml", "./tools/dataset/hf_vlm_sft.py", "ImageChatPacker", *TINY,
              f"policy.model_name_or_path={folder}", "policy.model_max_length=200", "train.train_batch_per_replica=4",
              f"train.train_policy.dataset.name={tmp_path}/rows.jsonl", f"train.output_dir={tmp_path}/out", "train.epoch=6",
              "train.train_policy.dataset.split=train", "train.optm_lr=1e-2", "validation.enable=false"]  # fmt: skip
    rows = []
    for number, word in enumerate(("dark", "bright", "dark", "bright")):
        pixels = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 20 + 210 * (word == "bright"), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        question = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": word}]},
        ]
        rows.append({"messages": messages, "images": [f"{number}.png"]})
    write_rows(tmp_path / "rows.jsonl", rows)
    run = launch(recipe)
    losses = [line["sft/loss"] for line in read_metrics(run) if "sft/loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]
