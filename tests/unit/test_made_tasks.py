"""The tasks that scripts make to try recipes: right answers are right, demonstrations are wrong as often as asked for."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.samples import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import make_arithmetic_data
import make_shapes_vqa


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    return make_arithmetic_data.make(tmp_path_factory.mktemp("sums"), 400, 50, 0.5, hidden_size=32, num_layers=1)


def test_half_of_the_demonstrations_of_sums_are_wrong_and_no_test_is(arithmetic):
    reward, shares = make_rewards("gsm8k"), {}
    for split in ("train", "test"):
        rows = rows_of(arithmetic / f"{split}.jsonl")
        for row in rows:
            first, second = (int(number) for number in row["question"][len("What is ") : -1].split(" + "))
            assert row["answer"] == f"#### {first + second}" and row["prompt"] == row["messages"][:1]
        right = [reward(row["messages"][1]["content"], Prompt([], reference=row["answer"]))[0] for row in rows]
        shares[split] = sum(right) / len(right)
    assert shares["test"] == 1 and 0.4 < shares["train"] < 0.6
    questions = [{row["question"] for row in rows_of(arithmetic / f"{split}.jsonl")} for split in ("train", "test")]
    assert len(questions[0]) == 400 and not questions[0] & questions[1]


def test_pictures_show_what_their_answers_say(tmp_path):
    folder = make_shapes_vqa.make(tmp_path, 60, 60, 0.5, hidden_size=32, num_layers=1)
    colours = {name: np.array(value) for name, value in make_shapes_vqa.COLOURS.items()}
    right = {}
    for split in ("train", "test"):
        rows = rows_of(folder / f"{split}.jsonl")
        for row in rows:
            pixels = np.asarray(Image.open(folder / row["images"][0])).astype(int)
            shape = pixels.max(-1) > 30  # the background is darker
            if row["question"] == make_shapes_vqa.QUESTIONS["corner"]:
                below = "bottom" if shape[16:].sum() > shape[:16].sum() else "top"
                seen = f"{below} {'left' if shape[:, :16].sum() > shape[:, 16:].sum() else 'right'}"
            else:
                colour = np.median(pixels[shape], axis=0)
                seen = min(colours, key=lambda name: abs(colours[name] - colour).sum())
            assert row["answer"] == seen
        right[split] = np.mean([row["messages"][1]["content"][0]["text"] == row["answer"] for row in rows])
    assert right["test"] == 1 and 0.3 < right["train"] < 0.7
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = load_vlm_processor(folder / "model", AutoConfig.from_pretrained(folder / "model"))
    text = processor.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(folder / rows[0]["images"][0])], return_tensors="pt")
    assert inputs["input_ids"].tolist()[0].count(model.config.image_token_id) == 4
    assert model(**inputs).logits.shape[-1] == len(processor.tokenizer)
