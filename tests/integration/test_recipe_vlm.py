"""Whole runs of a vision-language model by the commands: cloning, GRPO, evaluation on questions, reports."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rlinf.cli import main
from rlinf.evaluation.intervals import wilson_interval
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.questions_result import QuestionsResult
from rlinf.tracking.tracker import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import make_shapes_vqa

NUM_TEST = 6


def rlinf(folder: Path, *words: str) -> None:
    """Run a command in ``folder``."""
    with contextlib.chdir(folder):
        assert main(list(words)) == 0


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Images, questions and a tiny model, as the recipes expect them."""
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes_vqa.make(folder / "shapes", 24, NUM_TEST, hidden_size=32, num_layers=1)
    return folder


@pytest.fixture(scope="module")
def cloned(shapes) -> Path:
    words = ["train.timestamp=run", "train.train_batch_per_replica=8", "train.max_num_steps=3", "validation.freq=3"]
    rlinf(shapes, "launch", "--config", "shapes_sft", *words)
    return shapes / "outputs" / "shapes_sft" / "run"


def test_cloning_changes_the_vision_tower_and_answers_questions_about_pictures(shapes, cloned):
    lines = read_metrics(cloned)
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert any("eval/reward_mean/single_choice" in line for line in lines)
    before, after = weights(shapes / "shapes" / "model"), weights(cloned / "safetensors" / "final")
    assert before.keys() == after.keys()
    assert any("vision_tower" in name and not torch.equal(before[name], after[name]) for name in before)


def test_grpo_learns_from_the_export_and_its_report_shows_the_pictures(shapes, cloned):
    words = [
        f"policy.model_name_or_path={cloned}/safetensors/final", "train.timestamp=run", "train.train_batch_per_replica=8",
        "rollout.n_generation=4", "train.max_num_steps=2", "validation.freq=2",
    ]  # fmt: skip
    rlinf(shapes, "launch", "--config", "shapes_grpo", *words)
    run = shapes / "outputs" / "shapes_grpo" / "run"
    lines = read_metrics(run)
    assert [line["rollout/logprob_gap_exp_mean"] for line in lines if "rollout/logprob_gap_exp_mean" in line] == (
        pytest.approx([1, 1], abs=1e-3)
    ), "the trainer sees the images that generation saw"
    samples = [json.loads(line) for line in (run / "samples" / "step_2.jsonl").read_text().splitlines()]
    assert len(samples) == NUM_TEST
    assert all((run / "samples" / name).is_file() for each in samples for name in each["images"])
    assert all(each["prompt"].count("<image>") == 1 for each in samples), "one mark for each image"
    report = (run / "report.html").read_text()
    assert report.count("data:image/jpeg;base64,") == NUM_TEST


def transformers_answers(folder: Path, rows: list[dict]) -> list[str]:
    """Answer greedily with transformers alone, row by row."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = load_vlm_processor(folder / "model", model.config)
    answers = []
    for row in rows:
        text = processor.apply_chat_template(row["prompt"], add_generation_prompt=True)
        image = Image.open(folder / row["images"][0])
        inputs = processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
        settings = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [model.config.image_token_id]}
        tokens = model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(tokens, skip_special_tokens=True))
    return answers


def test_questions_with_pictures_are_counted_with_an_interval(shapes, monkeypatch, capsys):
    """The model is not trained, so that its answers depend on every pixel. One question is made to have the answer that it gives."""
    folder = shapes / "shapes"
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    expected = transformers_answers(folder, rows)
    rows[0]["answer"] = expected[0]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(shapes)
    words = [
        "checkpoint=shapes/model", "questions=shapes/questions.jsonl", "output_dir=result", "answer_type=single_choice",
    ]  # fmt: skip
    assert main(["evaluate", *words, "max_tokens=6", "category_column=question"]) == 0
    result = QuestionsResult.from_json(shapes / "result" / "result.json")
    assert [answer.completion for answer in result.results] == expected
    moved = [{**row, "images": rows[number - 1]["images"]} for number, row in enumerate(rows)]
    assert transformers_answers(folder, moved) != expected, "control: other images, other answers"
    right = sum(
        answer.strip().lower() == row["answer"].strip().lower() for answer, row in zip(expected, rows, strict=True)
    )
    assert right > 0 and result.total.successes == right and result.total.interval == wilson_interval(right, NUM_TEST)
    assert f"{right}/{NUM_TEST}" in capsys.readouterr().out
    assert set(result.per_category) == {row["question"] for row in rows}
