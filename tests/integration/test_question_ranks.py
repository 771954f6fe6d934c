"""`rlinf evaluate questions=` on several ranks: the result of one, or none."""

import base64
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from rlinf.cli import main
from rlinf.errors import EXIT_FAULT, RankError
from rlinf.recipes.packers import preview
from rlinf.recipes.questions_result import QuestionsResult

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import make_shapes_vqa

ROOT = Path(__file__).parents[2]
WORDS = [
    "checkpoint=shapes/model", "questions=shapes/test.jsonl", "answer_type=single_choice", "max_tokens=4", "batch_size=2",
    "temperature=1", "device=cpu", "cluster.num_threads=1",
]  # fmt: skip
TWO = ["cluster.num_processes=2"]
NUM_QUESTIONS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five questions about images: two calls of the model on the first of two ranks, and one on the second."""
    folder = tmp_path_factory.mktemp("questions")
    make_shapes_vqa.make(folder / "shapes", 4, NUM_QUESTIONS, hidden_size=32, num_layers=1)
    return folder


def content(output: Path) -> dict:
    result = json.loads((output / "result.json").read_text())
    assert result.pop("wall_s") > 0
    return result


def test_the_deadline_that_is_typed_holds_for_the_ranks(folder, monkeypatch):
    """As the errors of a deadline say to type it."""
    monkeypatch.chdir(folder)
    launched = []

    def launch(*arguments, deadlines):
        launched.append(deadlines)
        raise RankError("ranks are not what is tested")

    monkeypatch.setattr("rlinf.recipes.evaluate_questions.launch", launch)
    for words in ([], ["cluster.deadlines.start=1800"]):
        assert main(["evaluate", *WORDS, *TWO, *words, "output_dir=none"]) == EXIT_FAULT
    assert [deadlines["start"] for deadlines in launched] == [900, 1800]


def test_ranks_write_the_file_of_one(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    for name, more in {"one": [], "two": TWO, "control": ["seed=1"]}.items():
        assert main(["evaluate", *WORDS, *more, f"output_dir={name}"]) == 0
        assert capfd.readouterr().out.count("report: ") == 1, "one rank prints"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rlinf"]
    words = [*torchrun, "evaluate", *WORDS, "output_dir=torchrun"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("report: ") == 1, done.stderr[-3000:]
    expected = content(folder / "one")
    assert len(expected["results"]) == NUM_QUESTIONS and expected["questions"] == NUM_QUESTIONS
    rows = [json.loads(line) for line in (folder / "shapes" / "test.jsonl").read_text().splitlines()]
    assert [answer["expected"] for answer in expected["results"]] == [row["answer"] for row in rows]
    assert content(folder / "two") == content(folder / "torchrun") == expected
    assert content(folder / "control")["results"] != expected["results"], "control: other random numbers"
    manifests = [json.loads((folder / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0]["questions"] == manifests[1]["questions"]
    report = (folder / "two" / "report.html").read_text()
    for row, answer in zip(rows, expected["results"], strict=True):
        (name,) = answer["images"]
        assert (folder / "two" / name).read_bytes() == preview(Image.open(folder / "shapes" / row["images"][0]))
        assert base64.b64encode((folder / "two" / name).read_bytes()).decode() in report, "the image of each question"
    assert QuestionsResult.from_json(folder / "two" / "result.json").total.episodes == NUM_QUESTIONS


def test_an_error_of_one_rank_ends_all_and_writes_nothing(folder, monkeypatch, capfd):
    """The last question, which the second rank alone asks, has a file that is no image."""
    rows = [json.loads(line) for line in (folder / "shapes" / "test.jsonl").read_text().splitlines()]
    (folder / "shapes" / "no.png").write_text("no image")
    rows[-1]["images"] = ["no.png"]
    (folder / "shapes" / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    assert main(["evaluate", *WORDS, *TWO, "questions=shapes/bad.jsonl", "output_dir=bad"]) == 2
    assert f"Row {NUM_QUESTIONS - 1} of shapes/bad.jsonl" in capfd.readouterr().err
    assert not (folder / "bad" / "result.json").exists()


def test_a_rank_that_is_killed_ends_all_and_writes_nothing(folder, monkeypatch, capfd):
    killed = []

    def kill_a_rank() -> None:
        while len(ranks := multiprocessing.active_children()) < 2:
            time.sleep(0.01)
        os.kill(ranks[1].pid, signal.SIGKILL)
        killed.append(ranks[1].pid)

    monkeypatch.chdir(folder)
    thread = threading.Thread(target=kill_a_rank, daemon=True)
    thread.start()
    assert main(["evaluate", *WORDS, *TWO, "output_dir=killed"]) == EXIT_FAULT
    thread.join()
    assert killed and "was killed by SIGKILL" in capfd.readouterr().err
    assert not (folder / "killed" / "result.json").exists()
