"""What surrounds an iteration of reinforcement learning: clock, metrics, evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rlinf.distributed.process_group import any_rank
from rlinf.memory import memory_metrics
from rlinf.training.collapse import ends_by_collapse
from rlinf.training.session import Session


def iterate(session: Session, iteration: Callable[[int], dict[str, float]]) -> None:
    """Iterate from ``state.step`` to ``trainer.max_steps``, or until an evaluation reaches the target or shows a collapse.

    Args:
        session: The run.
        iteration: Takes the number of the iteration and returns its metrics.
    """
    state, config = session.state, session.config.trainer
    ends = _ends_by_evaluation(session, last=state.step == config.max_steps)
    tells_success = session.evaluator.env.tells_success(session.config.env)
    tells_success |= any(one.get("tells_success", True) for one in state.evaluations.values())
    session.stop_if_asked()
    while state.step < config.max_steps and not ends:
        start, cpu_start = time.monotonic(), time.process_time()
        step = state.step
        with session.profile_window.step("rl", step):
            metrics = iteration(step)
        state.train_wall_s += time.monotonic() - start
        state.step += 1
        metrics |= {
            "time/total_s": state.train_wall_s,
            "time/cpu_s": time.process_time() - cpu_start,
            **memory_metrics(),
        }
        last = state.step == config.max_steps
        shown = {"return": metrics["rollout/return_mean"]} if "rollout/return_mean" in metrics else {}
        session.progress.update(
            "rl", state.step, config.max_steps,
            success_rate=metrics.get("rollout/success_rate") if tells_success else None,
            env_steps_per_s=metrics["throughput/env_steps_per_s"], **shown,
        )  # fmt: skip
        session.warn_of_clipping(*(metrics.get(f"rollout/actions_{name}") for name in ("clipped_fraction", "max_abs")))
        session.log(step, metrics)
        ends = _ends_by_evaluation(session, last)
        session.checkpoint_if_due(last or ends)


def _ends_by_evaluation(session: Session, last: bool) -> bool:
    """Return whether the evaluation after the present step, made now or before a resume, reaches the target or shows a collapse."""
    config, evaluations = session.config.trainer, session.state.evaluations
    tag, target = session.evaluate_if_due("step", config.eval_every, last), config.target_success_rate
    if tag is None:
        return False
    if target is not None and any_rank(tag in evaluations and evaluations[tag]["success_rate"] >= target):
        return True
    return ends_by_collapse(session)


class Clock:
    """Seconds of the parts of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Count the time since the last lap, what a GPU computes included, as time of this part."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Return the seconds of all laps."""
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each part as metrics."""
        return {f"time/{name}_s": value for name, value in self.seconds.items()}
