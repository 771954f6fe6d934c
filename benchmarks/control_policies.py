"""Baselines without learning for a learned residual: the same policy with a constant offset or noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import EvaluationResult
from rlinf.models.sampling import draw_uniforms
from rlinf.types import ActionPrediction, EpisodeSpec

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel


class ShiftedPolicy:
    """Adds ``offset``, and uniform noise when sampling, to a policy's greedy actions; for ``evaluate_policy``.

    Args:
        base: The policy.
        action_low, action_high: Bounds of the env's actions, ``[D]``, to which executed actions are clipped.
        offset: ``[D]``, in units of half the action range. None means zeros.
        noise: Maximum noise per action value, in the same units.
    """

    def __init__(
        self,
        base: ActionModel,
        action_low: np.ndarray,
        action_high: np.ndarray,
        offset: Sequence[float] | None = None,
        noise: float = 0.0,
    ) -> None:
        self.base, self.noise = base, noise
        self._low, self._high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (action_low, action_high))
        self._offset = torch.zeros_like(self._low) if offset is None else torch.tensor(offset, dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    @property
    def num_uniforms(self) -> int:
        """One uniform random number per action value."""
        return self.base.action_chunks_len * len(self._low)

    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Any
    ) -> ActionPrediction:
        """Compute actions, adding noise if ``do_sample``; ``temperature`` has no effect."""
        prediction = self.base.predict_action_batch(do_sample=False, **inputs)
        actions = prediction.actions
        low, high, shift = (each.to(actions.device) for each in (self._low, self._high, self._offset))
        if do_sample:
            uniforms = draw_uniforms(len(actions), self.num_uniforms) if uniforms is None else uniforms
            shift = shift + self.noise * (2.0 * uniforms.to(actions.device).view_as(actions) - 1.0)
        greedy = torch.minimum(torch.maximum(actions, low), high)  # as a residual actor reads it
        moved = greedy + 0.5 * (high - low) * shift
        return prediction._replace(actions=torch.minimum(torch.maximum(moved, low), high))


def evaluate_noise(
    base: ActionModel, env: VectorEnv, specs: Sequence[EpisodeSpec], noise: float, seed: int = 0, **options: Any
) -> EvaluationResult:
    """Evaluate a policy with uniform noise of at most ``noise`` added to its greedy actions. ``options`` are for ``evaluate_policy``."""
    shaken = ShiftedPolicy(base, env.action_low, env.action_high, noise=noise)
    return evaluate_policy(shaken, env, specs, greedy=False, seed=seed, **options)


def plane_offsets(action_dim: int, lengths: Sequence[float], num_directions: int = 8) -> list[tuple[float, ...]]:
    """Return vectors ``[D]`` of the given lengths, in evenly spaced directions in the plane of the first two action values."""
    angles = [2 * np.pi * index / num_directions for index in range(num_directions)]
    rest = (0.0,) * (action_dim - 2)
    return [(float(length * np.cos(a)), float(length * np.sin(a)), *rest) for length in lengths for a in angles]


def best_offset(
    base: ActionModel, env: VectorEnv, specs: Sequence[EpisodeSpec], offsets: Sequence[Sequence[float]], **options: Any
) -> tuple[Sequence[float], list[EvaluationResult]]:
    """Evaluate a policy with a grid of constant offsets; return the best offset (the first if tied) and all results.

    Where the env reports no success, it is the one with the highest return. Take ``specs`` of the training split, and evaluate the winner on held-out episodes: the best of many on the same episodes flatters.
    ``options`` go to ``evaluate_policy``.
    """
    results = [
        evaluate_policy(ShiftedPolicy(base, env.action_low, env.action_high, offset), env, specs, **options)
        for offset in offsets
    ]
    totals = [result.total for result in results]
    is_reported = any(total.is_reported for total in totals)
    scores = [float(total.successes) if is_reported else total.returns[0] for total in totals]
    return offsets[scores.index(max(scores))], results
