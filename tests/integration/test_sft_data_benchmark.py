"""The benchmark of reading datasets: both readers give the same rows, and the last line holds the ratio."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from rlinf.cli import main

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "tests" / "fixtures" / "lerobot" / "images"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("sft_data", ROOT / "benchmarks" / "sft_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_readers_give_the_same_rows(benchmark):
    dataset = benchmark.open_dataset(DATASET, {key: key for key in benchmark.describe(DATASET).image_shapes}, None)
    dataset.chunk_len = 3
    plain = benchmark.PlainDataset(DATASET, 3)
    assert len(plain) == len(dataset)
    for row in range(len(plain)):
        observation, actions = dataset.rows(torch.tensor([row]).numpy())
        item = plain[row]
        assert torch.equal(item["action"], actions[0])
        assert all((item[key].numpy() == images[0]).all() for key, images in observation.images.items())


def test_the_last_line_holds_the_ratio(benchmark, capsys):
    threads = torch.get_num_threads()
    words = [
        "--dataset", str(DATASET), "--batch-size", "4", "--batches", "2", "--rounds", "1", "--workers", "0", "--warmup",
        "1",
    ]  # fmt: skip
    try:
        found = benchmark.main(words)
    finally:
        torch.set_num_threads(threads)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["ratio"] == found["samples_per_s"]["ours"] / found["samples_per_s"]["peer"] > 0
    assert set(found["data_wait_fraction"]) == set(found["samples_per_s"])


def test_waiting_is_told_apart_from_the_training_step(benchmark, monkeypatch):
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    def batches():
        while True:
            advance(0.03)
            yield None

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(benchmark.time, "sleep", advance)
    settings = argparse.Namespace(batches=5, batch_size=8, step_ms=10, warmup=2)
    assert benchmark.measure(batches(), settings) == pytest.approx((8 / 0.04, 0.75))


def test_training_steps_are_timed_with_their_wait(benchmark, monkeypatch):
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    class Batches:
        def next(self):
            advance(0.03)
            return None, None

    class Worker:
        def sft_update(self, observation, actions, num_rows, step, seed):
            advance(0.5 if step < 2 else 0.01)  # the first steps are not counted

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    settings = argparse.Namespace(batches=5, warmup=2, batch_size=8)
    assert benchmark.time_steps(Worker(), Batches(), settings) == pytest.approx((0.04, 0.75))


def test_real_steps_in_memory_are_compared_with_real_steps_from_disk(benchmark, tmp_path, capsys):
    collect = ["env=tabletop", "env.tasks=[reach]", "env.max_episode_steps=4", "collect.num_episodes=3",
               "collect.num_envs=3", "collect.only_success=false", f"dataset={tmp_path / 'data'}"]  # fmt: skip
    threads, train = torch.get_num_threads(), ["model=openvla_tiny", "env=tabletop"]
    try:
        assert main(["collect", *collect, "tracking.progress=false", "cluster.num_threads=1"]) == 0
        words = [
            "--dataset", str(tmp_path / "data"), "--batch-size", "4", "--batches", "2", "--rounds", "1", "--warmup",
            "1",
        ]  # fmt: skip
        found = benchmark.main([*words, "--train", *train])
    finally:
        torch.set_num_threads(threads)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["useful_fraction"] == found["step_s"]["memory"] / found["step_s"]["disk"] > 0
