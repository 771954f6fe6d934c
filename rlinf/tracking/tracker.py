"""Write metrics to `metrics.jsonl` and, if configured, to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError, MissingDependencyError, closest
from rlinf.files import Json, naming, write_text
from rlinf.options import option
from rlinf.run_folder import DAMAGED_FILE, METRICS_FILE, TENSORBOARD_FOLDER
from rlinf.tracking.metrics import check_names

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


PHASES = ("sft", "rl")

logger = logging.getLogger("rlinf")


def _require(module: str, package: str) -> Any:
    """Import an optional package; if this fails, raise MissingDependencyError with instructions."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"tracking.{package}=true needs the package '{package}', which cannot be imported ({error}). "
            f"Install it with `pip install {package}` or set tracking.{package}=false."
        ) from error


def read_metrics(folder: str | os.PathLike) -> list[Json]:
    """Return the lines of ``metrics.jsonl`` in a run folder; a missing file is treated as empty, and damaged lines are dropped.

    Each line is a dict with ``step``, ``phase`` (``"sft"`` or ``"rl"``), ``time_s`` and metrics; NaN and infinity are stored as None.
    """
    lines, damaged = _split_lines(Path(folder) / METRICS_FILE)
    if damaged:
        logger.warning("%s: %d damaged lines are ignored", Path(folder) / METRICS_FILE, len(damaged))
    return lines


def _split_lines(path: Path) -> tuple[list[Json], list[bytes]]:
    """Return a metrics file's parsed lines and damaged lines."""
    # Text after the last newline is an incomplete line left by a run that was killed. It is dropped, but not reported as damaged.
    lines, damaged = [], []
    for text in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            line = json.loads(text)
            if line["phase"] not in PHASES or not isinstance(line["step"], int) or not 0 <= line["time_s"] < math.inf:
                raise ValueError("not a line of metrics")
            lines.append(line)
        except (ValueError, TypeError, KeyError):
            if text:
                damaged.append(text)
    return lines, damaged


class Tracker:
    """Writes a run's metrics on rank 0.

    Args:
        run_config: Resolved configuration, logged to Weights & Biases.
        run_id: ID of the run to resume; None for a new run.
        resume_step: First step that will be logged again; existing lines from this step on are dropped. If None, no lines are dropped.
        resume_phase: Phase of ``resume_step``; a resume in ``"rl"`` does not drop lines of ``"sft"``.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        config: TrackingConfig,
        run_config: Json,
        run_id: str | None = None,
        resume_step: int | None = None,
        resume_phase: str = "rl",
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_id = run_id or secrets.token_hex(4)
        lines, damaged = _split_lines(self.folder / METRICS_FILE) if run_id is not None else ([], [])
        if damaged:
            with naming(self.folder / DAMAGED_FILE), open(self.folder / DAMAGED_FILE, "ab") as file:
                file.write(b"".join(line + b"\n" for line in damaged))
            where = self.folder / METRICS_FILE
            logger.warning("%d damaged lines of %s are moved to %s", len(damaged), where, DAMAGED_FILE)
        # Drop lines written after the resumed checkpoint, because each step must appear only once.
        if resume_step is not None:
            point = (PHASES.index(resume_phase), resume_step)
            lines = [line for line in lines if (PHASES.index(line["phase"]), line["step"]) < point]
        write_text(self.folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
        self._start = time.monotonic() - (lines[-1]["time_s"] if lines else 0.0)
        self._file = open(self.folder / METRICS_FILE, "a", encoding="utf-8")
        self._tensorboard = self._wandb = None
        if config.tensorboard:
            writer = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self._tensorboard = writer(str(self.folder / TENSORBOARD_FOLDER), purge_step=resume_step)
        if config.wandb and os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = self._open_wandb(config, run_config)

    def _open_wandb(self, config: TrackingConfig, run_config: Json) -> Any:
        wandb = _require("wandb", "wandb")
        online = bool(os.environ.get("WANDB_API_KEY")) and os.environ.get("WANDB_MODE", "online") == "online"
        try:
            run = wandb.init(
                project=config.wandb_project, dir=str(self.folder), id=self.run_id,
                name=config.wandb_name or self.folder.name, config=run_config,
                mode="online" if online else "offline", resume="allow" if online else None,
                settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        except wandb.errors.Error as error:
            logger.warning(
                "Weights & Biases does not accept metrics (%s); the run continues without it, and metrics are in %s. For the next "
                "run, use a valid WANDB_API_KEY, WANDB_MODE=offline or WANDB_MODE=disabled",
                " ".join(str(error).split()), self.folder / METRICS_FILE,
            )  # fmt: skip
            return None
        # Use a separate axis for steps, because a resumed run may log lower steps than before, which wandb's own counter rejects.
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        if online:
            print(f"wandb: {run.url}", flush=True)
        return run

    def log(self, step: int, metrics: dict[str, float], phase: str | None = None) -> None:
        """Write one line.

        Args:
            step: RL iteration or SFT optimiser step.
            metrics: Values by name (from ``METRICS``, or ``<name>/<task>``); an unknown name raises ConfigError.
            phase: ``"sft"`` or ``"rl"``. If None, ``"sft"`` is used if any metric name starts with ``sft/``.
        """
        check_names(metrics)
        if phase is None:
            phase = "sft" if any(name.startswith("sft/") for name in metrics) else "rl"
        numbers = {name: float(value) for name, value in metrics.items()}
        line: Json = {"step": int(step), "phase": phase, "time_s": round(time.monotonic() - self._start, 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with naming(self.folder / METRICS_FILE):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        # Steps start at 0 in both phases, so sinks with steps on the x axis need separate metric names.
        if phase == "sft":
            numbers = {name if name.startswith("sft/") else f"sft/{name}": value for name, value in numbers.items()}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**numbers, "global_step": step})

    def state_dict(self) -> Json:
        """Return the ``run_id``, which is needed to resume the run."""
        return {"run_id": self.run_id}

    def close(self) -> None:
        """Flush and close all sinks. Idempotent."""
        if self._file.closed:
            return
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
