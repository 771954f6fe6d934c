"""Configuration of metric tracking."""

import os
import re
from dataclasses import dataclass

from rlinf.errors import ConfigError, closest
from rlinf.options import option

WANDB_MODES = ("online", "offline", "disabled", "dryrun")


@dataclass
class TrackingConfig:
    """Where metrics are logged; `metrics.jsonl` is always written."""

    tensorboard: bool = option(True, "Write TensorBoard event files.")
    wandb: bool = option(False, "Log to Weights & Biases, offline if WANDB_API_KEY is not set.")
    wandb_project: str = option("rlinf", "Project name in Weights & Biases.")
    wandb_name: str | None = option(None, "Run name in Weights & Biases; null: the folder's name.")
    progress: bool = option(True, "Show a live line with success, steps/s and remaining time.")


def check_wandb(key: str, name: str) -> None:
    """Raise ConfigError for a project (the value of ``key``) or a ``WANDB_MODE`` that Weights & Biases does not accept."""
    mode = os.environ.get("WANDB_MODE") or "online"
    if mode not in WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE is '{mode}'; expected one of {', '.join(WANDB_MODES)}. Run export WANDB_MODE={closest(mode, WANDB_MODES) or 'offline'}"
        )
    fit = re.sub(r"[/\\#?%:]", "-", name)[:128]
    if fit != name:
        required = "at most 128 characters without any of /\\#?%:"
        raise ConfigError(f"{key} is '{name}'; required by Weights & Biases: {required}. Set {key}={fit}")
