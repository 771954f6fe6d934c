"""The parity gate: at every step, compare the rollout's and the trainer's results for the same weights.

In float32, the gate limits the maximum gap and may stop the run at any step. In 16 bits, a single large gap may be due
to rounding, so the gate limits the mean of ``exp |gap|``, which remains near 1 under rounding. It then stops the run only
where rounding is smallest and faults are most visible: at a process's first step (backend, versions, hardware, settings)
and at the first step after a policy update (weight sync). Later it only warns, because a policy at the limits of its
number format may also exceed the threshold.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.algorithms.advantages import masked_mean
from rlinf.distributed.process_group import gather_objects, maximum, rank
from rlinf.errors import ParityError
from rlinf.models.config import MAX_EXP_GAP
from rlinf.types import RolloutBatch

logger = logging.getLogger("rlinf")

MAX_GAP = 1e-3
"""Maximum gap in float32: for log-probabilities in nats, for values relative to the maximum value (at least 1).

The log-density of a Gaussian with std ``s`` changes by up to ``|z| / s`` times its mean's rounding error, which is unbounded as
``s`` shrinks. The limit is therefore multiplied by the maximum density (at least 1); probabilities never exceed 1.
The measured gap is at most 1e-5 nat for each model family on the tabletop tasks.
"""
MAX_FIRST_KL = 1e-4
"""Maximum ``approx_kl`` of an iteration's first minibatch in float32, where it differs from 0 only due to rounding."""
EXCEEDED = "rollout/parity_exceeded"
"""Metric that is 1 if the gate warned instead of stopping, otherwise 0."""


class ParityGate:
    """Stops the run on a gap: at any step if ``always_stops``, otherwise at the first step and the one after the first update."""

    def __init__(self, max_gap: float | None, always_stops: bool) -> None:
        self.max_gap, self.always_stops = max_gap, always_stops
        self._stops = True
        self._num_updates = 0  # policy updates in this process
        self._warned = False

    def policy_was_updated(self) -> None:
        """Record that the policy has changed since the last ``check``."""
        self._num_updates += 1
        self._stops = self._stops or self._num_updates == 1

    def check(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Return the metrics of ``check_parity`` and ``rollout/parity_exceeded``; raise ParityError to stop the run."""
        # Cleared before the comparison, so that in 16 bits only one step can stop the run.
        stops, self._stops = self._stops or self.always_stops, False
        metrics, fault = check_parity(batch, step, self.max_gap)
        if fault is not None and stops:
            hint = " They agreed until the weights were updated: check the weight sync first."
            raise ParityError(fault + (hint if self._num_updates else ""))
        if fault is not None and not self._warned:
            self._warned = True
            logger.warning("%s The run continues; its report shows the number of steps beyond the limit.", fault)
        return metrics | {EXCEEDED: float(fault is not None)}

    def check_first_update(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise ParityError if ``approx_kl`` exceeds rounding in the first minibatch, which is scored with the rollout's weights."""
        kl = metrics.get("approx_kl")
        if kl is None or not self.always_stops:
            return
        limit = max(MAX_FIRST_KL, self.max_gap**2)
        if not kl <= limit:
            raise ParityError(
                f"The first minibatch of step {step} was scored with the rollout's weights, but its approx_kl "
                f"is {kl:.3g}; at most {limit:.3g} is accepted. The model computes different values in training mode "
                "than in evaluation mode (dropout, batch statistics), or the update uses a different temperature or different "
                "inputs. `rlinf diagnose` reports which. If the precision explains it, set "
                f"trainer.parity_max_gap={(2 * kl) ** 0.5:.2g}"
            )


def check_parity(batch: RolloutBatch, step: int, max_gap: float | None) -> tuple[dict[str, float], str | None]:
    """Compare ``rollout_logprobs`` with ``old_logprobs`` of executed actions, and ``rollout_values`` with ``values``.

    The two are computed by different code from the same weights, so in float32 log-probabilities agree to about 1e-5. A larger
    gap means that rollout and trainer used different weights, images, prompts, masks or temperatures, so that every importance
    ratio in the update would be wrong. Values are compared because advantages combine the trainer's values with the rollout's
    values for truncated episodes.

    Args:
        batch: This rank's envs, time-major; ``rollout_values`` may be None.
        max_gap: Maximum accepted difference (see ``MAX_GAP``); None limits the mean of ``exp |gap|`` to ``MAX_EXP_GAP``.

    Returns:
        Metrics across all ranks (importance ratios of complete actions), and an error text for the worst sample across all ranks
        if the gap is too large, otherwise None. Raises ParityError if a value is not finite. This is a collective call: all
        ranks return or raise the same.
    """
    executed, difference = _differences(batch)
    mask = executed.unsqueeze(-1)
    gap, mask = difference.abs(), mask.expand_as(difference)
    gap_mean, exp_mean = masked_mean(gap, mask), masked_mean(gap.exp(), mask)
    pair = (batch.rollout_logprobs, batch.old_logprobs)
    # Use the smaller of the two peaks, so that an erroneously high density does not raise its own limit.
    peaks = [torch.where(mask, x.reshape(difference.shape), 0.0).max().exp() for x in pair]
    densities = maximum(*map(_number, peaks))
    limit = None if max_gap is None else max_gap * max(1.0, min(densities))
    largest, fault = _compare("log-probabilities", batch, step, gap.flatten(2).amax(-1), exp_mean, limit, pair)
    metrics = {
        "rollout/logprob_gap_mean": gap_mean,
        "rollout/logprob_gap_max": largest,
        "rollout/logprob_gap_exp_mean": exp_mean,
        **importance_ratios(batch),
    }
    if batch.rollout_values is not None:
        valid = batch.loss_mask
        (largest_value,) = maximum(_number(torch.where(valid, batch.values.abs(), 0.0).max()))
        gap = torch.where(valid, (batch.values - batch.rollout_values).abs() / max(1.0, largest_value), 0.0)
        exp_mean, pair = masked_mean(gap.exp(), valid), (batch.rollout_values, batch.values)
        largest, other = _compare("values", batch, step, gap, exp_mean, max_gap, pair)
        metrics["rollout/value_gap_max"], fault = largest, fault or other
    return metrics, fault


def importance_ratios(batch: RolloutBatch) -> dict[str, float]:
    """Return the mean and maximum probability ratio trainer / rollout of executed actions across all ranks (a collective call)."""
    executed, difference = _differences(batch)
    ratios = torch.where(executed, difference.sum(-1).exp(), 0.0)
    largest, num_executed = maximum(_number(ratios.max()), _number(executed.sum()))
    return {
        "rollout/importance_ratio_mean": masked_mean(ratios, executed) if num_executed else 1.0,
        "rollout/importance_ratio_max": largest if num_executed else 1.0,
    }


def _differences(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return the mask of compared actions, bool ``[T, B, C]``, and ``old_logprobs - rollout_logprobs`` ``[T, B, C, D]`` (0 outside)."""
    executed = batch.action_mask & batch.loss_mask.unsqueeze(-1)
    difference = (batch.old_logprobs - batch.rollout_logprobs).unflatten(-1, (executed.shape[-1], -1))
    return executed, torch.where(executed.unsqueeze(-1), difference, 0.0)


def _number(value: Tensor) -> float:
    """Return a scalar, replacing NaN by infinity, because NaN would be ignored by comparisons."""
    return float(torch.nan_to_num(value.double(), nan=float("inf"), posinf=float("inf")))


def _compare(
    what: str, batch: RolloutBatch, step: int, gap: Tensor, exp_mean: float, limit: float | None,
    pair: tuple[Tensor, Tensor],
) -> tuple[float, str | None]:  # fmt: skip
    """Return the maximum gap ``[T, B]`` across ranks, and an error text if it exceeds ``limit`` (None: if ``exp_mean`` is too large)."""
    worst = int(torch.nan_to_num(gap, nan=float("inf")).argmax())
    chunk, column = divmod(worst, gap.shape[1])
    # Comparisons with NaN are false, so NaN must be treated as the worst sample explicitly.
    local_gap = _number(gap[chunk, column])
    (largest,) = maximum(local_gap)
    is_finite = largest < float("inf")
    if is_finite and not (exp_mean > MAX_EXP_GAP if limit is None else largest > limit):
        return largest, None
    rollout, trainer = ([round(x, 4) for x in values[chunk, column].flatten().tolist()] for values in pair)
    sample = (
        f"policy call {chunk} of env {rank() * gap.shape[1] + column}, {batch.specs.get(int(batch.episode_ids[chunk, column]))}, "
        f"instruction '{batch.observation.instruction[worst]}', rollout {rollout}, trainer {trainer}"
    )
    _, worst_gap, sample = max(
        gather_objects((local_gap, float(gap[chunk, column]), sample)), key=lambda entry: entry[0]
    )
    accepted = f"a mean exp|difference| of {MAX_EXP_GAP:g}" if limit is None else f"{limit:g}"
    text = (
        f"Rollout and trainer {what} differ by {worst_gap:.3g} at step {step} (mean exp|difference| {exp_mean:.3g}); at "
        f"most {accepted} is accepted. Worst sample: {sample}. "
        "The two use different weights, inputs or temperatures."
    )
    if not is_finite:
        raise ParityError(text)
    return largest, f"{text} If the precision explains it, set trainer.parity_max_gap={2 * largest:.2g}"
