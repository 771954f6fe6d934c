"""Training on one rank: assign rows of a rollout to minibatches, score them and take optimiser steps, without envs or files."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.profiler import record_function

from rlinf.algorithms.base import Algorithm, LossCounts
from rlinf.config.training import TrainerConfig
from rlinf.data.config import SFTConfig
from rlinf.distributed.deadlines import heartbeat
from rlinf.distributed.parallel import Parallel, Replicated
from rlinf.distributed.process_group import any_rank, gather_env_groups, gather_objects, maximum, rank, world_size
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError, NonFiniteError
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import Totals, TrainStep
from rlinf.seeding import derive_seed
from rlinf.types import Observation, RolloutBatch


class Minibatch(NamedTuple):
    """This rank's rows of a minibatch, int64, and the maximum number of its rows on any rank."""

    rows: Tensor
    max_rows: int


class MinibatchPlan:
    """Round-robin assignment of a rollout's valid rows to ``M = ceil(rows / minibatch_size)`` minibatches.

    The rows of each env group are shuffled. Row ``j`` of an env group preceded by ``P`` rows is assigned to minibatch ``(P + j) mod M``.
    As a result, minibatch sizes differ by at most one row, and minibatches do not depend on the number of ranks.

    Args:
        valid: Valid rows of this rank's envs, bool ``[T, B]``.
        env_groups: This rank's env groups; each consists of ``B / len(env_groups)`` adjacent envs.
        minibatch_size: Maximum minibatch size across all ranks.

    Attributes:
        num_rows: Number of valid rows across all ranks.
    """

    def __init__(self, valid: Tensor, env_groups: range, minibatch_size: int, seed: int) -> None:
        self._env_groups, self._seed = env_groups, seed
        rows = torch.arange(valid.numel()).view(valid.shape)
        parts = zip(*(tensor.tensor_split(len(env_groups), dim=1) for tensor in (rows, valid)), strict=True)
        self._rows = [part[is_valid] for part, is_valid in parts]
        # A rank only needs to know how many rows each env group of the other ranks has.
        counts = gather_env_groups(torch.tensor([len(part) for part in self._rows]))
        self.num_rows = int(counts.sum())
        self.num_minibatches = -(-self.num_rows // minibatch_size)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self._starts = ends[env_groups.start : env_groups.stop].tolist()
        self._ends_of_ranks = ends[:: len(env_groups)]

    def epoch(self, number: int) -> Iterator[Minibatch]:
        """Yield the minibatches of an epoch; every rank yields the same number."""
        if not self.num_minibatches:
            return
        numbers, rows = [], []
        for env_group, start, group_rows in zip(self._env_groups, self._starts, self._rows, strict=True):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, number, env_group))
            rows.append(group_rows[torch.randperm(len(group_rows), generator=generator)])
            numbers.append(torch.arange(start, start + len(group_rows)) % self.num_minibatches)
        minibatch = torch.cat(numbers)
        ordered = torch.cat(rows)[minibatch.argsort(stable=True)]
        sizes = minibatch.bincount(minlength=self.num_minibatches)
        # A rank owns the rows start <= p < end; rows with p mod M = m are in minibatch m. ``before`` is the number of these rows before
        # each end, minus one; the constant cancels in the differences.
        before = (self._ends_of_ranks - torch.arange(self.num_minibatches).unsqueeze(1) - 1) // self.num_minibatches
        yield from map(Minibatch, ordered.split(sizes.tolist()), before.diff().amax(1).tolist())


VALUE_HEAD = "value_head"


@dataclass
class FailedBatch:
    """A minibatch whose loss or gradient is not finite, for the report.

    Attributes:
        rank: First rank whose rows, or otherwise whose loss, are not finite; 0 if there is none.
    """

    rank: int
    phase: str
    step: int
    loss: float
    grad_norm: float
    bad_parameters: list[str]
    instructions: list[str]
    tensors: dict[str, Tensor]


class _Described(NamedTuple):
    """Minibatch for a failure report; its images are only selected when ``observe`` is called."""

    phase: str
    step: int
    observe: Callable[[], Observation]
    tensors: dict[str, Tensor]


class TrainWorker:
    """Trains a policy with float32 masters of 16-bit parameters (``MasterAdamW``), which also accumulate micro-batch gradients.

    Args:
        config: Optimiser settings. If None, no optimiser is created because a different trainer updates the policy.
        temperature: Temperature of the action distribution, as in the rollout.
        precision: With ``bf16-mixed``, the policy runs under autocast.
        parallel: How ``model`` is sharded; None if it is replicated.
    """

    def __init__(
        self,
        model: ActionModel,
        config: TrainerConfig | None,
        *,
        temperature: float,
        micro_batch_size: int,
        val_micro_batch_size: int,
        precision: str,
        parallel: Parallel | None = None,
    ) -> None:
        self.model, self.parallel = model, parallel or Replicated(model)
        self.temperature = temperature
        self.micro_batch_size = micro_batch_size
        self.val_micro_batch_size = val_micro_batch_size
        self.precision = precision
        self.failed_batch: FailedBatch | None = None
        self.train_step: TrainStep | None = None
        if config is not None:
            self.start_phase(config)

    def start_phase(self, config: TrainerConfig) -> None:
        """Start behaviour cloning or RL with a new optimiser that reuses the previous optimiser's masters."""
        self.config = config
        former = None if self.train_step is None else self.optimizer
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        policy = [p for name, p in named if VALUE_HEAD not in name]
        value = [p for name, p in named if VALUE_HEAD in name]
        groups: dict[tuple[float, float], list[Tensor]] = {}  # few, because each needs separate kernel launches
        for parameter in policy:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            groups.setdefault((config.learning_rate, decay), []).append(parameter)
        groups.setdefault((config.value_learning_rate, 0.0), []).extend(value)
        optimizer = MasterAdamW(
            [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items() if group],
            masters=None if former is None else dict(zip(former.parameters, former.masters, strict=True)),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        optimizer.check_trains(self.model)
        self.named_masters = {name: optimizer.master_of(p) for name, p in named}
        self.policy_masters = [optimizer.master_of(p) for p in policy]
        self.value_masters = [optimizer.master_of(p) for p in value]
        # Clip separately: with a common norm, a large value error would shrink the policy's step.
        parts = (self.policy_masters, self.value_masters)
        self.train_step = TrainStep(
            optimizer,
            config.max_grad_norm,
            warmup_steps=config.warmup_steps,
            parts=parts,
            clips_together=config.clip_together,
            parallel=self.parallel,
        )
        self._has_learnt = False  # whether a gradient has reached the policy

    def end_phase(self) -> None:
        """Free the optimiser with its masters, moments and gradients, before a different trainer takes over the policy."""
        if self.train_step is not None:
            self.optimizer.zero_grad()
        self.train_step, self.named_masters, self.policy_masters, self.value_masters = None, {}, [], []

    @property
    def optimizer(self) -> MasterAdamW | None:
        """Optimiser of the current phase; None if a different trainer updates the policy."""
        return None if self.train_step is None else self.train_step.optimizer

    def autocast(self) -> AbstractContextManager:
        """Return the policy's autocast context for rollouts and training."""
        return autocast(self.model, self.precision)

    @record_function("score")
    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[T, B, A]`` and values ``[T, B]``, float32, of a rollout's valid rows (a collective call)."""
        model = self.model.eval()
        tokens, size = batch.action_tokens.flatten(0, 1), self.val_micro_batch_size
        valid = torch.nonzero(batch.loss_mask.flatten()).flatten()
        logprobs, values = torch.zeros(batch.rollout_logprobs.flatten(0, 1).shape), torch.zeros(len(tokens))
        scores: list[tuple[Tensor, Tensor]] = []
        with self.autocast():
            # A sharded model is gathered in every call, so all ranks must make equally many calls: a rank with fewer rows repeats one.
            for start in range(0, int(maximum(len(valid))[0]), size):
                rows = valid[start : start + size]
                rows = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
                first, end = int(rows[0]), int(rows[-1]) + 1
                chosen = (
                    slice(first, end) if end - first == len(rows) else rows.numpy()
                )  # a slice avoids a copy of the images
                inputs = model.preprocess(batch.observation.select(chosen))
                device = next(iter(inputs.values())).device
                scored = model.evaluate_actions(inputs, to_device(tokens[rows], device), self.temperature)
                if start < len(valid):
                    scores.append((scored.logprobs, scored.values))
                heartbeat()
        if scores:  # copy to the CPU only once, so that the GPU does not wait between micro-batches
            logprobs[valid], values[valid] = (torch.cat(parts).cpu() for parts in zip(*scores, strict=True))
        shape = batch.loss_mask.shape
        return logprobs.unflatten(0, shape), values.unflatten(0, shape)

    @record_function("update")
    def update(self, batch: RolloutBatch, minibatch: Minibatch, algorithm: Algorithm, step: int) -> dict[str, float]:
        """Take an optimiser step on this rank's rows of a minibatch; return metrics that are equal on all ranks (a collective call).

        If loss or gradient is not finite, raise NonFiniteError before any state changes. ``batch`` is this rank's flattened rollout.
        """
        if not self.model.training:  # train() visits every module, which is slow for a large model
            self.model.train()
        rows = minibatch.rows
        # Images are omitted here and copied per micro-batch. Counts refer to the complete minibatch, so that neither the micro-batch
        # size nor the number of ranks changes the gradient.
        rank_batch = algorithm.of_minibatch(batch.select(rows, observation=False))
        counts = LossCounts.of(rank_batch, algorithm.config).over_ranks()

        sent = cache(rank_batch.to)

        def loss_of(start: int) -> tuple[Tensor, Mapping[str, Tensor]]:
            part = rows[start : start + self.micro_batch_size]
            # Every pass of a sharded model is a collective call, so if other ranks have more rows, this rank repeats a masked row.
            is_empty = len(part) == 0
            part = torch.zeros(1, dtype=torch.int64) if is_empty else part
            seen = batch.observation.select(part.numpy())
            with self.autocast():
                inputs = self.model.preprocess(seen)
                device = next(iter(inputs.values())).device
                tokens = to_device(batch.action_tokens[part], device)
                evaluation = self.model.evaluate_actions(inputs, tokens, self.temperature)
            device = evaluation.logprobs.device
            if is_empty:
                micro = batch.select(part, observation=False).to(device)
                micro.loss_mask = torch.zeros_like(micro.loss_mask)
            elif len(part) == len(rows):
                micro = sent(device)
            else:
                micro = sent(device).select(slice(start, start + len(part)), observation=False)
            output = algorithm.loss(replace(micro, observation=seen), evaluation, counts, step)
            return output.loss, output.metrics

        frozen = algorithm.policy_is_frozen(step)
        # During critic warm-up, drop the policy's gradients: AdamW skips parameters without a gradient, but with zero gradients it would
        # still decay the weights and apply earlier momentum.
        dropped = self.policy_masters if frozen else ()
        totals = self.train_step.accumulate(range(0, minibatch.max_rows, self.micro_batch_size), loss_of, dropped)
        described = _Described("rl", step, lambda: batch.observation.select(rows.numpy()), rank_batch.tensors())
        return self._take_step(totals, described, frozen)

    @record_function("update")
    def sft_update(
        self, observation: Observation, actions: Tensor, num_rows: int, step: int, seed: int = 0, phase: str = "sft"
    ) -> dict[str, float]:
        """Take a behaviour-cloning step on this rank's rows of a minibatch.

        Args:
            observation: Observations of the ``K`` rows in ``rank_rows(num_rows)``.
            actions: Actions ``[K, sft_chunk_len, D]`` in env units.
            num_rows: Minibatch size across all ranks.
            step, phase: Current step and phase, for failure reports.
            seed: Seed for the random numbers used in the loss.
        """
        self.model.train()
        uniforms = None
        if self.model.num_sft_uniforms:
            # Draw random numbers for all rows, so that a row's numbers depend neither on the micro-batch size nor on the number of ranks.
            shape = (num_rows, self.model.num_sft_uniforms)
            uniforms = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
            uniforms.clamp_min_(torch.finfo(torch.float32).tiny)  # the open interval (0, 1)
        positions = torch.arange(len(actions)).split(self.micro_batch_size)

        def loss_of(rows: tuple[Tensor, tuple[Tensor, Tensor]]) -> tuple[Tensor, Mapping[str, Tensor]]:
            here, (index, valid) = rows
            with self.autocast():
                inputs = self.model.preprocess(observation.select(here.numpy()))
                device = next(iter(inputs.values())).device
                drawn = () if uniforms is None else (to_device(uniforms[index], device),)
                losses = self.model.sft_loss(inputs, to_device(actions[here], device), *drawn)
            loss = torch.where(to_device(valid, losses.device), losses.float(), 0.0).sum() / num_rows
            return loss, {"loss": loss.detach()}

        micro_batches = zip(*(part.split(self.micro_batch_size) for part in rank_rows(num_rows)), strict=True)
        totals = self.train_step.accumulate(zip(positions, micro_batches, strict=True), loss_of)
        return self._take_step(totals, _Described(phase, step, lambda: observation, {"actions": actions}))

    def _take_step(self, totals: Totals, minibatch: _Described, frozen: bool = False) -> dict[str, float]:
        """Check the gradient and take the optimiser step; return metrics aggregated over all ranks."""
        rank_loss, metrics = totals["loss"], totals.over_ranks()
        if not frozen and not self._has_learnt and math.isfinite(metrics["loss"]):
            self._check_gradient(minibatch)
        try:
            metrics["grad_norm"] = self.train_step.apply(metrics["loss"])
        except NonFiniteError as error:
            self._fail(metrics["loss"], rank_loss, minibatch, error)
        heartbeat()
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _check_gradient(self, minibatch: _Described) -> None:
        """Raise ConfigError if the gradient is exactly 0 although the minibatch is informative."""
        tensors = minibatch.tensors
        norm = self.train_step.part_norms[0]
        self._has_learnt = norm > 0
        advantages = tensors.get("advantages")
        is_informative = any_rank(advantages is None or bool((advantages[tensors["loss_mask"]] != 0).any()))
        if norm == 0 and is_informative:
            raise ConfigError(
                f"No gradient reaches the policy in the first update of {minibatch.phase}: the gradients of its "
                f"{len(self.policy_masters)} trained tensors are all 0 or missing, so it cannot learn. The loss is detached from "
                "the policy, or its weights are frozen; `rlinf diagnose` shows which tensors have a gradient"
            )

    def _fail(self, loss: float, rank_loss: float, minibatch: _Described, cause: NonFiniteError) -> NoReturn:
        """Store the minibatch for the report, and raise NonFiniteError with a hint (a collective call).

        ``rank_loss`` is this rank's contribution to ``loss``.
        """
        phase, step, observe, tensors = minibatch
        norm = self.train_step.grad_norm
        bad = [
            name for name, p in self.named_masters.items()
            if p.grad is not None and not bool(torch.isfinite(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).all())
        ]  # fmt: skip
        observation = observe()
        tensors = dict(tensors) | {f"image/{name}": torch.from_numpy(x) for name, x in observation.images.items()}
        if observation.state is not None:
            tensors["state"] = torch.from_numpy(observation.state)
        self.optimizer.zero_grad(set_to_none=True)
        not_finite = [
            name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()
        ]
        faults = gather_objects((not_finite, math.isfinite(rank_loss), bad))
        inputs = sorted({name for names, _, _ in faults for name in names})
        bad = [name for name in self.named_masters if any(name in names for _, _, names in faults)]
        # Prefer ranks with non-finite rows, because these are closer to the cause than a non-finite loss.
        worst = min(range(len(faults)), key=lambda r: (not faults[r][0], faults[r][1]))
        self.failed_batch = FailedBatch(worst, phase, step, loss, norm, bad, list(observation.instruction), tensors)
        hint = (
            f"Lower {phase if phase == 'sft' else 'trainer'}.learning_rate, or use model.precision=fp32."
            if not inputs
            else f"The batch itself contains non-finite values ({', '.join(inputs)}), which optimiser settings cannot fix: check their "
            "source (dataset, rewards, states, normalisation statistics)."
        )
        raise NonFiniteError(
            f"{phase} step {step}: loss {loss}, gradient norm {norm}; gradients of {len(bad)} parameters are not finite"
            f"{' (first: ' + bad[0] + ')' if bad else ''}. The optimiser step was not taken. {hint}"
        ) from cause


def rank_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a minibatch, int64 ``[ceil(num_rows / ranks)]``, and a bool mask of that shape, false for padding."""
    # Pad with the last row, so that every rank takes part in the same number of collective calls.
    padded = torch.arange(-(-num_rows // world_size()) * world_size())
    mine = padded[rank() :: world_size()]
    return mine.clamp_max(num_rows - 1), mine < num_rows


def rl_trainer_config(trainer: TrainerConfig, rollbacks: int) -> TrainerConfig:
    """Return the optimiser settings for RL; each rollback halves both learning rates."""
    factor = 2**-rollbacks
    value_learning_rate = trainer.value_learning_rate * factor
    return replace(trainer, learning_rate=trainer.learning_rate * factor, value_learning_rate=value_learning_rate)


def sft_trainer_config(trainer: TrainerConfig, sft: SFTConfig) -> TrainerConfig:
    """Return the optimiser settings for behaviour cloning: the trainer's, but with the learning rate and warm-up from ``sft``."""
    return replace(trainer, learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps)
