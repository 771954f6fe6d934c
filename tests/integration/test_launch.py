"""The commands of the guides at tiny size: two ranks on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.tracking.tracker import read_metrics

ROOT = Path(__file__).parents[2]
TINY = (
    "policy.parallelism.dp_shard_size=2 policy.device=cpu train.param_dtype=float32 policy.model_max_length=96".split()
)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory):
    """A tiny model, and conversations that do not alternate: only their text can be trained on."""
    folder = tmp_path_factory.mktemp("arithmetic")
    sizes = ["--train", "64", "--test", "4", "--hidden-size", "32", "--num-layers", "1"]
    subprocess.run([sys.executable, ROOT / "scripts" / "make_arithmetic_data.py", folder, *sizes], check=True)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert rows
    twice = [{"conversation": [row["messages"][0], *row["messages"]]} for row in rows]
    (folder / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in twice))
    return folder


def launch(folder: Path, run: str, *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "HF_TOKEN": "a-secret",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
    }
    places = [f"policy.model_name_or_path={folder}/model", f"train.output_dir={folder}/out", f"train.timestamp={run}"]
    command = [sys.executable, "-m", "rlinf", "launch", "--config", *words, *TINY, *places]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_two_ranks_fine_tune_a_tiny_model_by_the_command_of_the_guide(arithmetic):
    done = launch(
        arithmetic, "good", "configs/mistral/mistral-7b-fsdp4-sft.toml", "./tools/dataset/dummy_sft.py",
        f"train.train_policy.dataset.name={arithmetic}/twice.jsonl", "train.epoch=2", "train.optm_lr=1e-2",
        "train.optm_warmup_steps=0", "logging.experiment_name=tiny",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    run = arithmetic / "out" / "good"
    losses = [line["sft/loss"] for line in read_metrics(run) if "sft/loss" in line]
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    assert (run / "safetensors" / "final" / "model.safetensors.index.json").is_file()
    assert list((run / "wandb").glob("offline-run-*"))
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"a-secret" in text for text in texts) and "a-secret" not in done.stdout + done.stderr


def test_a_bad_row_of_a_rank_is_named_once(arithmetic):
    done = launch(
        arithmetic, "bad", "mistral-7b-fsdp4-sft", "./tools/dataset/dummy_sft.py",
        f"train.train_policy.dataset.name={arithmetic}/test.jsonl", "train.train_batch_per_replica=4",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("cannot be used") == 1 and "Row 0 of" in done.stderr and "Traceback" not in done.stderr
