"""Configuration of metric tracking."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.options import option


@dataclass
class TrackingConfig:
    """Where metrics go; `metrics.jsonl` is always written."""

    tensorboard: bool = option(True, "Write TensorBoard event files.")
    wandb: bool = option(False, "Log to Weights & Biases; offline when WANDB_API_KEY is not set.")
    wandb_project: str = option("rlinf", "Weights & Biases project.")
    wandb_name: str | None = option(None, "Name of the run in Weights & Biases; null: the name of its folder.")
    progress: bool = option(True, "Show one live line with success, steps/s and time left.")


def check_project(key: str, name: str) -> None:
    """Raise ConfigError for a name of a project, the value of ``key``, that Weights & Biases would not take."""
    fit = re.sub(r"[/\\#?%:]", "-", name)[:128]
    if fit != name:
        taken = "at most 128 letters without any of /\\#?%:"
        raise ConfigError(f"{key} is '{name}'; required by Weights & Biases: {taken}. Set {key}={fit}")
