"""Runs, and what tests compare of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config


def run_config(folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run that writes into ``folder``."""
    config = build_config(compose_config(list(overrides)))
    config.output_dir = str(folder)
    return config


def metrics_of(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def untimed_metrics(folder: Path) -> list[dict]:
    """Return the lines without the metrics that differ between equal runs: times, throughput and memory."""
    left_out = ("time", "throughput", "memory")
    return [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in metrics_of(folder)]


def weights_of(folder: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of a run."""
    return load_file(folder / "checkpoints" / checkpoint / "model" / "model.safetensors")


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()
