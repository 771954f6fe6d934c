"""The parity gate: the rollout's log-probabilities against the trainer's, at every step.

It stops a run at the first step of a process, new or resumed: what one can change between two processes of a run (backend,
versions, hardware, settings) shows there. Later the gap is logged. In float32 the largest gap counts. In 16 bits a single one may
be rounding, and the mean of ``exp |gap|`` counts, which rounding keeps near 1.
"""

from __future__ import annotations

import torch

from rlinf.config.schema import RunConfig
from rlinf.errors import ParityError
from rlinf.types import RolloutBatch

MAX_GAP = 1e-3
"""In float32."""
MAX_EXP_MEAN = 1.05
"""In 16 bits."""


def accepted_gap(config: RunConfig) -> float | None:
    """Return ``trainer.parity_max_gap``, or what stands for it: ``MAX_GAP`` in float32, None where a part computes in 16 bits."""
    if config.trainer.parity_max_gap is not None:
        return config.trainer.parity_max_gap
    in_vllm = config.rollout.vllm.dtype if config.rollout.backend == "vllm" else "auto"
    return MAX_GAP if "16" not in f"{config.model.precision} {in_vllm}" else None


def check_parity(batch: RolloutBatch, step: int, max_gap: float | None, first_step: int = 0) -> dict[str, float]:
    """Compare ``rollout_logprobs`` with ``old_logprobs`` of executed actions.

    The two are computed by different code on the same weights, so in float32 they agree to about 1e-5. A larger gap
    means that rollout and trainer saw different weights, images, prompts, masks or temperatures, and that every
    importance ratio of the update would be wrong.

    Args:
        batch: Time-major, with ``old_logprobs``.
        step: Of the run.
        max_gap: Largest accepted difference at ``first_step``; None: the mean of ``exp |gap|`` is at most ``MAX_EXP_MEAN``.
        first_step: Of this process.

    Returns:
        ``rollout/logprob_gap_mean``, ``rollout/logprob_gap_max``, ``rollout/logprob_gap_exp_mean`` (mean of
        ``exp |gap|``), ``rollout/importance_ratio_mean`` and ``rollout/importance_ratio_max`` (of whole actions).

    Raises:
        ParityError: At ``first_step``, naming the worst sample, or at any step when a log-probability is not finite.
    """
    mask = (batch.action_mask & batch.loss_mask.unsqueeze(-1)).unsqueeze(-1)
    num_chunks, num_envs, num_actions, _ = mask.shape
    difference = (batch.old_logprobs - batch.rollout_logprobs).reshape(num_chunks, num_envs, num_actions, -1)
    difference = torch.where(mask, difference, 0.0)
    gap = difference.abs().flatten(2)
    worst_of_call = gap.amax(-1)
    # A NaN must count as the worst gap, so it is not compared but searched for.
    worst = int(torch.nan_to_num(worst_of_call, nan=float("inf")).argmax())
    chunk, env = divmod(worst, num_envs)
    largest = float(worst_of_call[chunk, env])
    count = mask.expand_as(difference).sum().clamp_min(1)
    exp_mean = float(torch.where(mask, difference.abs().exp(), 0.0).sum() / count)
    too_far = exp_mean > MAX_EXP_MEAN if max_gap is None else largest > max_gap
    if not largest < float("inf") or (step == first_step and too_far):
        spec = batch.specs.get(int(batch.episode_ids[chunk, env]))
        way_on = f" If the precision explains it, type trainer.parity_max_gap={2 * largest:.2g}"
        accepted = f"a mean exp|difference| of {MAX_EXP_MEAN:g}" if max_gap is None else f"{max_gap:g}"
        raise ParityError(
            f"Rollout and trainer log-probabilities differ by {largest:.3g} at step {step} (mean exp|difference| {exp_mean:.3g}); at "
            f"most {accepted} is accepted. Worst sample: policy call {chunk} of env {env}, {spec}, "
            f"instruction '{batch.observation.instruction[worst]}', rollout "
            f"{[round(x, 4) for x in batch.rollout_logprobs[chunk, env].tolist()]}, trainer "
            f"{[round(x, 4) for x in batch.old_logprobs[chunk, env].tolist()]}. The two see different weights, inputs or "
            f"temperatures.{way_on if largest < float('inf') else ''}"
        )
    ratios = difference.sum(-1).exp()[mask.squeeze(-1)]
    if not len(ratios):
        ratios = torch.ones(1)
    return {
        "rollout/logprob_gap_mean": float(gap.sum() / count),
        "rollout/logprob_gap_max": largest,
        "rollout/logprob_gap_exp_mean": exp_mean,
        "rollout/importance_ratio_mean": float(ratios.mean()),
        "rollout/importance_ratio_max": float(ratios.amax()),
    }
