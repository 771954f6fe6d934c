"""Group relative policy optimisation (GRPO) with reward functions of the completion."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.distributed import deadlines
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import any_rank, barrier, rank, sum_over_ranks, world_size
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import GRPOLossFn
from rlinf.recipes.completions import Completer, Completion, CompletionValidation, completion_metrics
from rlinf.recipes.datasets import PackedRows, StreamedRows
from rlinf.recipes.samples import Prompt, collate
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation
from rlinf.seeding import derive_seed

logger = logging.getLogger("rlinf")

EPSILON = 1e-6
"""Constant added to a group's std before dividing by it."""
FLAT_STEPS = 3
"""Number of consecutive steps with equal rewards in every group after which the run warns."""
MAX_ADVANTAGE = 5.0
"""Clipping bound for scaled advantages; unscaled ones are in units of the reward and are not clipped."""


@dataclass(frozen=True)
class Groups:
    """Settings for grouping completions and for the updates on them.

    Attributes:
        size: Number of completions per prompt.
        advantage: Key in ``ADVANTAGES``.
        num_updates: Number of optimiser steps per batch of completions.
        max_resamples: Maximum number of times a group with equal rewards is replaced.
    """

    size: int
    seed: int
    advantage: str = "scaled"
    num_updates: int = 1
    max_resamples: int = 0


class GRPOTrainer(TokenTrainer):
    """Trainer on groups of completions per prompt, with advantages relative to the group (Shao et al. 2024, section 4.1).

    ``batch_size`` is the number of completions per step across all ranks.
    """

    phase = "rl"

    def __init__(
        self,
        policy: HuggingFacePolicy,
        rows: PackedRows[Prompt] | StreamedRows[Prompt],
        *,
        num_steps: int,
        batch_size: int,
        groups: Groups,
        loss: GRPOLossFn,
        completer: Completer,
        completion_validation: CompletionValidation | None = None,
    ) -> None:
        super().__init__(policy, rows, num_steps)
        self.completer, self.completion_validation = completer, completion_validation
        self.batch_size, self.groups = batch_size, groups
        self._loss, self._flat_steps = loss, 0
        if loss.needs_reference:
            policy.keep_reference()

    def step(self, step: int) -> TokenUpdate:
        """Generate completions and train on them."""
        start = time.monotonic()
        with deadline("rollout"):
            with self.completer.generator.ready():
                groups, num_replaced = self._collect(step)
            # Wait inside the rollout deadline, because a rank may be late while its rollout worker is being replaced.
            barrier()
        deadlines.clock.add_rollout(time.monotonic() - start)
        completions = [completion for group in groups for completion in group]
        batch = self._batch(completions)
        (num_tokens,) = sum_over_ranks([float(batch["attention_mask"].sum())])
        updates = [self.policy.train(batch, self._loss) for _ in range(self.groups.num_updates)]
        metrics: dict[str, Any] = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        named = completion_metrics(completions, "rollout")
        flat = sum_over_ranks([float(sum(_is_flat(group) for group in groups)), float(num_replaced)])
        named["rollout/zero_variance_group_fraction"] = flat[0] * self.groups.size / self.batch_size
        named["rollout/replaced_groups"] = flat[1]
        self._warn_of_flat_steps(named)
        # Use only the first update, because later ones no longer have the weights that generated the completions.
        for name in ("logprob_gap_mean", "logprob_gap_exp_mean"):
            named[f"rollout/{name}"] = updates[0][name]
        kept = ("loss", "grad_norm", "policy_loss", "approx_kl", "clip_fraction", "kl_to_reference", "entropy")
        named |= self.named(metrics, *kept)
        # Print the reward instead of the loss, which is always near zero because the advantages in each group sum to about zero.
        shown = {"Reward": named["rollout/reward_mean"], "Length": named["rollout/completion_length_mean"]}
        num_truncated = round(named["rollout/truncated_fraction"] * self.batch_size)
        shown |= {f"Truncated completions of {self.batch_size}": num_truncated} if num_truncated else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, self.batch_size, shown)

    def _warn_of_flat_steps(self, metrics: dict[str, Any]) -> None:
        """Warn after every ``FLAT_STEPS`` consecutive steps in which every group has equal rewards."""
        self._flat_steps = self._flat_steps + 1 if metrics["rollout/zero_variance_group_fraction"] == 1 else 0
        if self._flat_steps and self._flat_steps % FLAT_STEPS == 0 and rank() == 0:
            logger.warning(
                "Within every group, all rewards were equal for %d steps, so nothing was learned "
                "(rollout/zero_variance_group_fraction is 1, rollout/reward_mean %.4g). Look at the completions in the report, check the "
                "reward function, or increase train.train_policy.temperature or rollout.n_generation",
                self._flat_steps, metrics["rollout/reward_mean"],
            )  # fmt: skip

    def validate(self, step: int) -> Validation | None:
        """Return the rewards on the validation prompts."""
        return None if self.completion_validation is None else self.completion_validation(step)

    def _collect(self, step: int) -> tuple[list[list[Completion]], int]:
        """Generate this rank's groups with their advantages; also return the number of replaced groups."""
        num_groups = self.batch_size // self.groups.size // world_size()
        prompts = self.rows.batch(step, num_groups * world_size(), rank(), world_size())
        numbers = range(rank() * num_groups, (rank() + 1) * num_groups)
        groups = self._groups(step, 0, dict(zip(numbers, prompts, strict=True)))
        num_replaced = 0
        for attempt in range(1, 1 + self.groups.max_resamples):
            flat = [number for number, group in groups.items() if _is_flat(group)]
            # Generation is collective, so a rank without flat groups takes part as long as any rank has some.
            if not any_rank(bool(flat)):
                break
            num_replaced += len(flat)
            replacements = {
                number: self._replacement(step, attempt, number, groups[number][0].prompt) for number in flat
            }
            groups |= self._groups(step, attempt, replacements)
        for group in groups.values():
            rewards = torch.tensor([completion.reward for completion in group], dtype=torch.float64)
            for completion, value in zip(group, ADVANTAGES[self.groups.advantage](rewards).tolist(), strict=True):
                completion.advantage = value
        return list(groups.values()), num_replaced

    def _groups(self, step: int, attempt: int, prompts: dict[int, Prompt]) -> dict[int, list[Completion]]:
        repeated = [prompt for prompt in prompts.values() for _ in range(self.groups.size)]
        # Seeds depend on the step, the group and the index within it, so that any number of ranks samples the same tokens. The label is
        # part of the seed, so changing it would change every run.
        seeds = [
            derive_seed(self.groups.seed, "answer", step, attempt, number, place)
            for number in prompts
            for place in range(self.groups.size)
        ]
        completions = self.completer.complete(repeated, seeds)
        size = self.groups.size
        return {number: completions[i * size : (i + 1) * size] for i, number in enumerate(prompts)}

    def _replacement(self, step: int, attempt: int, number: int, prompt: Prompt) -> Prompt:
        """Return a random prompt from the dataset, or the same prompt for a stream, which has no random access."""
        if isinstance(self.rows, StreamedRows):
            return prompt
        random = np.random.default_rng(derive_seed(self.groups.seed, "replacement", step, attempt, number))
        return self.rows[int(random.integers(len(self.rows)))]

    def _batch(self, completions: Sequence[Completion]) -> BatchedDataDict:
        batch = collate([completion.sample() for completion in completions])
        batch["advantages"] = torch.tensor([completion.advantage for completion in completions], dtype=torch.float32)
        generated = torch.zeros(batch["input_ids"].shape)
        for row, completion in enumerate(completions):
            start = len(completion.prompt.input_ids)
            generated[row, start : start + len(completion.tokens)] = torch.tensor(completion.logprobs)
        batch["generation_logprobs"] = generated
        # With a single update, the current log-probabilities are the old ones, so skip the additional pass.
        if self.groups.num_updates > 1:
            batch["old_logprobs"] = self.policy.get_logprobs(batch)["logprobs"]
        if self._loss.needs_reference:
            batch["reference_logprobs"] = self.policy.get_reference_logprobs(batch)["logprobs"]
        return batch


def _is_flat(group: Sequence[Completion]) -> bool:
    return len({completion.reward for completion in group}) == 1


def scaled_advantages(rewards: Tensor) -> Tensor:
    """Return ``(r - mean) / (std + 1e-6)`` for a group ``[G]``, with the population std (Shao et al. 2024, section 4.1.2)."""
    scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    return scaled.clamp(-MAX_ADVANTAGE, MAX_ADVANTAGE)


def unscaled_advantages(rewards: Tensor) -> Tensor:
    """Return ``r - mean`` for a group ``[G]``, without the bias towards prompts with low reward std (Liu et al. 2025, section 3.1)."""
    return rewards - rewards.mean()


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Return each ``r`` minus the mean of the remaining rewards in the group ``[G]`` (RLOO, Ahmadian et al. 2024, eq. 7)."""
    return (rewards - rewards.mean()) * len(rewards) / max(1, len(rewards) - 1)


ADVANTAGES = {"scaled": scaled_advantages, "unscaled": unscaled_advantages, "leave_one_out": leave_one_out_advantages}
"""Functions by name that compute advantages from a group's rewards ``[G]``."""
