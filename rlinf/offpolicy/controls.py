"""How far the frozen policy comes without any learning: what the warm-up of an actor has shown."""

from __future__ import annotations

import logging

from rlinf.distributed.process_group import rank
from rlinf.number_formats import format_interval
from rlinf.options import to_mapping
from rlinf.report.offpolicy import warmup_success
from rlinf.tracking.tracker import read_metrics
from rlinf.training.action_trainer import TrainerContext

logger = logging.getLogger("rlinf")


def note_warmup(parts: TrainerContext, starts_as_base: bool) -> None:
    """Say what the warm-up has shown: the success of the frozen policy and noise.

    ``starts_as_base``: the evaluation before RL shows the frozen policy, because its new actor changed nothing yet.
    """
    if rank() > 0:
        return
    success = warmup_success(read_metrics(parts.loop.folder), to_mapping(parts.config.algorithm))
    if success is None:
        return
    interval = f" (95 % {format_interval(*success.interval, ' - ')})" if success.is_reported else ""
    parts.loop.progress.note(
        f"warm-up, nothing learnt: the frozen policy and noise: {success}{interval}, training episodes"
    )
    before = parts.loop.state.evaluations.get("before_rl") if starts_as_base else None
    if before is not None and is_easy(before["success_rate"], success.success_rate):
        logger.warning(
            "noise in the warm-up reaches %s where the frozen policy reaches %.1f %%: most of this gap needs no learning. What an actor "
            "adds is its success above that (docs/offpolicy.md)",
            success, 100 * before["success_rate"],
        )  # fmt: skip


def is_easy(before: float, control: float) -> bool:
    """Return whether a control closes half of the gap between the frozen policy's success rate and 1."""
    return control - before >= (1 - before) / 2
