"""How far the frozen policy comes without any learning: alone, with noise, and with constant corrections as large as the head's."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from rlinf.distributed.deadlines import go_on, waiting
from rlinf.distributed.process_group import any_rank, rank, world_size
from rlinf.evaluation.evaluator import EvaluationPlan, RankGroup, episode_list, evaluate_policy
from rlinf.evaluation.result import Success
from rlinf.files import write_text
from rlinf.models.embodiment.base import ActionModel
from rlinf.number_formats import format_interval
from rlinf.offpolicy.control_policies import ShiftedPolicy, best_offset, evaluate_noise, plane_offsets
from rlinf.options import to_mapping
from rlinf.report.offpolicy import warmup_success
from rlinf.run_folder import CONTROLS_FILE
from rlinf.tracking.tracker import read_metrics
from rlinf.training.action_trainer import Parts
from rlinf.training.stop_signal import StopRequested

logger = logging.getLogger("rlinf")

NUM_SELECTION_EPISODES = 32
"""Training episodes on which each constant correction is tried."""

FROZEN = "the frozen policy"
"""Name of the first control."""

SHARES = (0.25, 0.5, 1.0)
"""Sizes of the constant corrections, in shares of the scale of the head."""


@waiting("evaluate")
def evaluate_controls(parts: Parts, base: ActionModel, scale: float) -> None:
    """Evaluate the frozen policy ``base``, noise of up to ``scale`` and half of it, and the best constant correction (a collective call).

    ``controls.json`` has the results. The constant is chosen on training episodes. A resumed run that has the file does not repeat
    this. A signal ends it without a file.
    """
    path = parts.loop.folder / CONTROLS_FILE
    if any_rank(rank() == 0 and path.exists()):
        return
    env = parts.evaluator.env
    try:
        with parts.evaluator.autocast():
            found = _controls(parts, base, scale)
    except StopRequested:
        return
    finally:
        env.offload()
    if rank() == 0:
        write_text(path, json.dumps([{"name": name, **success.as_dict()} for name, success in found], indent=1))
        for name, success in found:
            parts.loop.progress.note(f"control, nothing learnt: {name}: {_words(success)}")
        (_, frozen), *others = found
        _warn_if_easy(frozen.success_rate, *max(others, key=lambda each: each[1].success_rate))


def _controls(parts: Parts, base: ActionModel, scale: float) -> list[tuple[str, Success]]:
    """Return the name and the success of each control."""
    env, settings = parts.evaluator.env, parts.config.evaluation
    held_out = episode_list(env, settings.split, settings.num_episodes)
    training = env.episode_specs("train")[:NUM_SELECTION_EPISODES]
    ranks = RankGroup(rank(), world_size(), parts.loop.stop_signal.together)
    options: dict[str, Any] = {"on_result": lambda _: go_on(), "plan": EvaluationPlan(ranks=ranks)}
    found = [(FROZEN, evaluate_policy(base, env, held_out, **options).total)]
    for bound in (scale / 2, scale):
        result = evaluate_noise(base, env, held_out, bound, parts.config.seed, **options)
        found.append((f"uniform noise of up to {bound:g}", result.total))
    offsets = constant_offsets(env.action_dim, [scale * share for share in SHARES])
    chosen, _ = best_offset(base, env, training, offsets, **options)
    moved = ShiftedPolicy(base, env.action_low, env.action_high, chosen)
    words = ", ".join(f"{number:+.2f}" for number in chosen)
    name = f"the constant correction ({words}), the best of {len(offsets)} on {len(training)} training episodes"
    return [*found, (name, evaluate_policy(moved, env, held_out, **options).total)]


def note_warmup(parts: Parts, begins_as_base: bool) -> None:
    """Say what the warm-up has shown: the success of the frozen policy and noise.

    ``begins_as_base``: the evaluation before RL shows the frozen policy, because its new head changed nothing yet.
    """
    if rank() > 0:
        return
    success = warmup_success(read_metrics(parts.loop.folder), to_mapping(parts.config.algorithm))
    if success is not None:
        parts.loop.progress.note(
            f"warm-up, nothing learnt: the frozen policy and noise: {_words(success)}, training episodes"
        )
        frozen = _success_of_frozen(parts, begins_as_base)
        if frozen is not None:
            _warn_if_easy(frozen, "noise in the warm-up", success)


def _success_of_frozen(parts: Parts, begins_as_base: bool) -> float | None:
    """Return the success rate of the frozen policy; None: it was not evaluated alone."""
    path = parts.loop.folder / CONTROLS_FILE
    for control in json.loads(path.read_text(encoding="utf-8")) if path.exists() else []:
        if control["name"] == FROZEN:
            return Success.from_dict(control).success_rate
    before = parts.loop.state.evaluations.get("before_rl") if begins_as_base else None
    return None if before is None else before["success_rate"]


def constant_offsets(action_dim: int, lengths: Sequence[float]) -> list[tuple[float, ...]]:
    """Return vectors ``[D]``: eight directions in the plane of the first two numbers, and both of each other number."""
    offsets, first = (plane_offsets(action_dim, lengths), 2) if action_dim > 1 else ([], 0)
    signed = [sign * length for length in lengths for sign in (1, -1)]
    return offsets + [
        tuple(number if index == axis else 0.0 for index in range(action_dim))
        for axis in range(first, action_dim)
        for number in signed
    ]


def is_easy(before: float, control: float) -> bool:
    """Return whether a control closes half of the gap between the frozen policy's success rate and 1."""
    return control - before >= (1 - before) / 2


def _warn_if_easy(frozen: float, name: str, success: Success) -> None:
    if is_easy(frozen, success.success_rate):
        logger.warning(
            "%s reaches %s where the frozen policy reaches %.1f %%: most of this gap needs no learning. What a head adds is its "
            "success above that (docs/offpolicy.md)",
            name, success, 100 * frozen,
        )  # fmt: skip


def _words(success: Success) -> str:
    return f"{success}" if not success.is_told else f"{success} (95 % {format_interval(*success.interval, ' - ')})"
