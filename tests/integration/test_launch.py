"""The commands of the guides at tiny size: two ranks on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlinf.cli import main
from rlinf.tracking.tracker import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import make_arithmetic_data

TINY = (
    "policy.parallelism.dp_shard_size=2 policy.device=cpu train.param_dtype=float32 policy.model_max_length=96".split()
)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory):
    """A tiny model, and conversations that do not alternate: only their text can be trained on."""
    folder = tmp_path_factory.mktemp("arithmetic")
    make_arithmetic_data.make(folder, 64, 4, hidden_size=32, num_layers=1)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert rows
    twice = [{"conversation": [row["messages"][0], *row["messages"]]} for row in rows]
    (folder / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in twice))
    return folder


@pytest.fixture
def launch(arithmetic, monkeypatch):
    """``launch(run, *words)`` runs the command with secrets in its environment and returns its exit status."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret")
    places = [f"policy.model_name_or_path={arithmetic}/model", f"train.output_dir={arithmetic}/out"]

    def launched(run: str, *words: str) -> int:
        return main(["launch", "--config", *words, *TINY, *places, f"train.timestamp={run}"])

    return launched


def test_two_ranks_fine_tune_a_tiny_model_by_the_command_of_the_guide(arithmetic, launch, capfd):
    status = launch(
        "good", "configs/mistral/mistral-7b-fsdp4-sft.toml", "./tools/dataset/dummy_sft.py",
        f"train.train_policy.dataset.name={arithmetic}/twice.jsonl", "train.epoch=2", "train.optm_lr=1e-2",
        "train.optm_warmup_steps=0", "logging.experiment_name=tiny",
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert status == 0, err[-4000:]
    run = arithmetic / "out" / "good"
    losses = [line["sft/loss"] for line in read_metrics(run) if "sft/loss" in line]
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    assert (run / "safetensors" / "final" / "model.safetensors.index.json").is_file()
    assert list((run / "wandb").glob("offline-run-*"))
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"a-secret" in text for text in texts) and "a-secret" not in out + err


def test_a_bad_row_of_a_rank_is_named_once(arithmetic, launch, capfd):
    status = launch(
        "bad", "mistral-7b-fsdp4-sft", "./tools/dataset/dummy_sft.py",
        f"train.train_policy.dataset.name={arithmetic}/test.jsonl", "train.train_batch_per_replica=4",
    )  # fmt: skip
    err = capfd.readouterr().err
    assert status == 2, err
    assert err.count("cannot be used") == 1 and "Row 0 of" in err and "Traceback" not in err
