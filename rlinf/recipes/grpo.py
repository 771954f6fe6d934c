"""Group relative policy optimisation with rewards that are functions of the answer."""

from __future__ import annotations

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
from rlinf.errors import ConfigError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import GRPOLossFn
from rlinf.recipes.completions import Answers, Completer, Completion, completion_metrics
from rlinf.recipes.datasets import PackedRows, StreamedRows
from rlinf.recipes.samples import Prompt, collate
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation
from rlinf.seeding import derive_seed

logger = logging.getLogger("rlinf")

EPSILON = 1e-6
"""Added to the deviation of a group."""
FLAT_STEPS = 3
"""Steps in a row without any group whose rewards differ, after which the run warns."""
MAX_ADVANTAGE = 5.0
"""Scaled advantages are clipped to plus and minus this; others have the units of the reward."""


@dataclass(frozen=True)
class Groups:
    """How answers are grouped and learned from.

    Attributes:
        size: Answers of a prompt.
        advantage: How rewards are compared: a key of ``ADVANTAGES``.
        num_updates: Optimiser steps on the answers of a step.
        max_resamples: How often a group whose rewards are equal is replaced.
    """

    size: int
    seed: int
    advantage: str = "scaled"
    num_updates: int = 1
    max_resamples: int = 0


class GRPOTrainer(TokenTrainer):
    """Groups of answers to a prompt, whose rewards are compared (Shao et al. 2024, section 4.1).

    The random numbers of an answer depend on the seed, the step, its group and its place there, and not on ranks or earlier steps.

    Args:
        num_steps: Steps of the run, each with new answers.
        batch_size: Answers of one step, over all ranks.
        answers: Evaluates the policy; None: nothing does.
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
        answers: Answers | None = None,
    ) -> None:
        multiple = groups.size * world_size()
        if batch_size % multiple:
            raise ConfigError(
                f"A batch of {batch_size} answers cannot be divided into groups of rollout.n_generation={groups.size} on {world_size()} "
                f"ranks. Set train.train_batch_per_replica to a multiple of {multiple}"
            )
        super().__init__(policy, rows, num_steps)
        self.completer, self.answers = completer, answers
        self.batch_size, self.groups = batch_size, groups
        self._loss, self._flat_steps = loss, 0
        if loss.needs_reference:
            policy.keep_reference()

    def step(self, step: int) -> TokenUpdate:
        """Collect answers and learn from them."""
        start = time.monotonic()
        with deadline("rollout"):
            with self.completer.generator.ready():
                groups, num_replaced = self._collect(step)
            barrier()  # here, because a rank whose rollout worker is replaced is late by up to this deadline
        deadlines.clock.add_rollout(time.monotonic() - start)
        own = [each for group in groups for each in group]
        batch = self._batch(groups, own)
        (num_tokens,) = sum_over_ranks([float(batch["attention_mask"].sum())])
        updates = [self.policy.train(batch, self._loss) for _ in range(self.groups.num_updates)]
        metrics: dict[str, Any] = {name: sum(each[name] for each in updates) / len(updates) for name in updates[0]}
        named = completion_metrics(own, "rollout")
        flat = sum_over_ranks([float(sum(_is_flat(group) for group in groups)), float(num_replaced)])
        named["rollout/zero_variance_group_fraction"] = flat[0] * self.groups.size / self.batch_size
        named["rollout/replaced_groups"] = flat[1]
        self._warn_of_flat_steps(named)
        for name in ("logprob_gap_mean", "logprob_gap_exp_mean"):
            named[f"rollout/{name}"] = updates[0][name]
        for name in ("loss", "grad_norm", "policy_loss", "approx_kl", "clip_fraction", "kl_to_reference", "entropy"):
            if name in metrics:
                named[f"train/{name}"] = metrics[name]
        named |= {name: value for name, value in metrics.items() if name.startswith("memory/")}
        # The loss of a step says little: its advantages sum to about zero in each group.
        shown = {"Reward": named["rollout/reward_mean"], "Length": named["rollout/completion_length_mean"]}
        num_cut = round(named["rollout/truncated_fraction"] * self.batch_size)
        shown |= {f"Cut answers of {self.batch_size}": num_cut} if num_cut else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, self.batch_size, shown)

    def _warn_of_flat_steps(self, metrics: dict[str, Any]) -> None:
        """Warn when no group teaches anything for ``FLAT_STEPS`` steps, and whenever as many more have passed."""
        self._flat_steps = self._flat_steps + 1 if metrics["rollout/zero_variance_group_fraction"] == 1 else 0
        if self._flat_steps and self._flat_steps % FLAT_STEPS == 0 and rank() == 0:
            logger.warning(
                "The rewards of every group were equal for %d steps, so nothing was learned "
                "(rollout/zero_variance_group_fraction is 1, rollout/reward_mean %.4g). Look at the answers in the report, check the "
                "reward function, or set train.train_policy.temperature or rollout.n_generation higher",
                self._flat_steps, metrics["rollout/reward_mean"],
            )  # fmt: skip

    def validate(self, step: int) -> Validation | None:
        """Return what the answers to the validation prompts reach."""
        return None if self.answers is None else self.answers(step)

    def _collect(self, step: int) -> tuple[list[list[Completion]], int]:
        """Return the groups of this rank with their advantages, and how many of them replace others."""
        num_groups = self.batch_size // self.groups.size // world_size()
        prompts = self.rows.batch(step, num_groups * world_size(), rank(), world_size())
        numbers = range(rank() * num_groups, (rank() + 1) * num_groups)
        groups = self._groups(step, 0, dict(zip(numbers, prompts, strict=True)))
        num_replaced = 0
        for attempt in range(1, 1 + self.groups.max_resamples):
            flat = [number for number, group in groups.items() if _is_flat(group)]
            if not any_rank(bool(flat)):
                break
            num_replaced += len(flat)
            others = {number: self._other_prompt(step, attempt, number, groups[number][0].prompt) for number in flat}
            groups |= self._groups(step, attempt, others)
        for group in groups.values():
            rewards = torch.tensor([each.reward for each in group], dtype=torch.float64)
            for each, value in zip(group, ADVANTAGES[self.groups.advantage](rewards).tolist(), strict=True):
                each.advantage = value
        return list(groups.values()), num_replaced

    def _groups(self, step: int, attempt: int, prompts: dict[int, Prompt]) -> dict[int, list[Completion]]:
        repeated = [prompt for prompt in prompts.values() for _ in range(self.groups.size)]
        seeds = [
            derive_seed(self.groups.seed, "answer", step, attempt, number, place)
            for number in prompts
            for place in range(self.groups.size)
        ]
        found = self.completer.complete(repeated, seeds)
        size = self.groups.size
        return {number: found[i * size : (i + 1) * size] for i, number in enumerate(prompts)}

    def _other_prompt(self, step: int, attempt: int, number: int, present: Prompt) -> Prompt:
        """Return another prompt of the dataset; of a streamed one the same again, whose answers will be others."""
        if isinstance(self.rows, StreamedRows):
            return present
        random = np.random.default_rng(derive_seed(self.groups.seed, "replacement", step, attempt, number))
        return self.rows[int(random.integers(len(self.rows)))]

    def _batch(self, groups: Sequence[Sequence[Completion]], own: Sequence[Completion]) -> BatchedDataDict:
        batch = collate([each.sample() for each in own])
        batch["advantages"] = torch.tensor([each.advantage for each in own], dtype=torch.float32)
        generated = torch.zeros(batch["input_ids"].shape)
        for row, each in enumerate(own):
            start = len(each.prompt.input_ids)
            generated[row, start : start + len(each.tokens)] = torch.tensor(each.logprobs)
        batch["generation_logprobs"] = generated
        if self.groups.num_updates > 1:
            batch["old_logprobs"] = self.policy.get_logprobs(batch)["logprobs"]
        if self._loss.needs_reference:
            batch["reference_logprobs"] = self.policy.get_reference_logprobs(batch)["logprobs"]
        return batch


def _is_flat(group: Sequence[Completion]) -> bool:
    return len({each.reward for each in group}) == 1


def scaled_advantages(rewards: Tensor) -> Tensor:
    """Return ``(r - mean) / (std + 1e-6)`` of a group ``[G]``, with the population's deviation (Shao et al. 2024, section 4.1.2)."""
    scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    return scaled.clamp(-MAX_ADVANTAGE, MAX_ADVANTAGE)


def unscaled_advantages(rewards: Tensor) -> Tensor:
    """Return ``r - mean`` of a group ``[G]``, which does not favour questions with little spread (Liu et al. 2025, section 3.1)."""
    return rewards - rewards.mean()


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Return ``r`` minus the mean of the others of the group ``[G]`` (RLOO, Ahmadian et al. 2024, eq. 7)."""
    others = max(1, len(rewards) - 1)
    return (rewards - rewards.mean()) * len(rewards) / others


ADVANTAGES = {"scaled": scaled_advantages, "unscaled": unscaled_advantages, "leave_one_out": leave_one_out_advantages}
"""How the rewards of a group ``[G]`` are compared."""
