"""One trainer rank: scores rollouts, takes optimiser steps. It knows nothing of envs, files or how ranks were started."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from rlinf.distributed.process_group import any_rank, gather_objects, rank, world_size
from rlinf.distributed.sums import maximum
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError, NonFiniteError
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import Totals, TrainStep
from rlinf.training.minibatches import Minibatch
from rlinf.types import Observation, RolloutBatch

VALUE_HEAD = "value_head"


@dataclass
class FailedBatch:
    """A minibatch whose loss or gradient was not finite, for the report.

    Attributes:
        rank: The first rank whose rows are not finite, or whose loss of them, or 0: the one whose rows are worth keeping.
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
    """What the report of a failure tells of a minibatch; its images are selected only then."""

    phase: str
    step: int
    observe: Callable[[], Observation]
    tensors: dict[str, Tensor]


class TrainWorker:
    """Trains one policy.

    Steps are in float32: parameters in 16 bits are trained through float32 masters (``MasterAdamW``), which also sum the
    gradients of micro-batches.

    Args:
        model: The policy.
        config: Optimiser settings; None: another trainer continues with the policy, without this optimiser.
        temperature: Of the action distribution, as in the rollout.
        micro_batch_size: Rows of a forward-backward pass.
        val_micro_batch_size: Rows of a forward pass.
        precision: ``bf16-mixed`` runs under autocast.
        parallel: How the ranks hold ``model``; None: every rank the whole.
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
        """Start behaviour cloning or RL with a fresh optimiser, which steps the masters of the one before."""
        self.config = config
        former = None if self.train_step is None else self.optimizer
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        policy = [p for name, p in named if VALUE_HEAD not in name]
        value = [p for name, p in named if VALUE_HEAD in name]
        groups: dict[tuple[float, float], list[Tensor]] = {}  # few, because each takes a kernel of its own
        for parameter in policy:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            groups.setdefault((config.learning_rate, decay), []).append(parameter)
        groups.setdefault((config.value_learning_rate, 0.0), []).extend(value)
        optimizer = MasterAdamW(
            [{"params": held, "lr": rate, "weight_decay": decay} for (rate, decay), held in groups.items() if held],
            masters=None if former is None else dict(zip(former.parameters, former.masters, strict=True)),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        optimizer.check_trains(self.model)
        self.named_masters = {name: optimizer.master_of(p) for name, p in named}
        self.policy_masters = [optimizer.master_of(p) for p in policy]
        self.value_masters = [optimizer.master_of(p) for p in value]
        # The value head learns at its own pace: clipped with the policy, a large value error would shrink the policy's step.
        parts = (self.policy_masters, self.value_masters)
        self.train_step = TrainStep(
            optimizer,
            config.max_grad_norm,
            warmup_steps=config.warmup_steps,
            parts=parts,
            clips_together=config.clip_together,
            parallel=self.parallel,
        )
        self._has_learnt = False  # a gradient has reached the policy

    def end_phase(self) -> None:
        """Forget the optimiser with its masters, moments and gradients: another trainer continues with the policy."""
        if self.train_step is not None:
            self.optimizer.zero_grad()
        self.train_step, self.named_masters, self.policy_masters, self.value_masters = None, {}, [], []

    @property
    def optimizer(self) -> MasterAdamW | None:
        """The optimiser of the present phase; None: another trainer has the policy."""
        return None if self.train_step is None else self.train_step.optimizer

    def autocast(self) -> AbstractContextManager:
        """Return the context in which the policy computes, in rollouts and in training."""
        return autocast(self.model, self.precision)

    @record_function("score")
    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Score the valid rows of a time-major rollout of this rank (a collective call).

        Return log-probabilities float32 ``[T, B, A]`` and values ``[T, B]``; 0 where ``loss_mask`` is false.
        """
        model = self.model.eval()
        tokens, size = batch.action_tokens.flatten(0, 1), self.val_micro_batch_size
        valid = torch.nonzero(batch.loss_mask.flatten()).flatten()
        logprobs, values = torch.zeros(batch.rollout_logprobs.flatten(0, 1).shape), torch.zeros(len(tokens))
        found: list[tuple[Tensor, Tensor]] = []
        with self.autocast():
            # A sharded model is gathered in every call, so a rank with fewer rows than another scores its first one again.
            for start in range(0, int(maximum(len(valid))[0]), size):
                rows = valid[start : start + size]
                rows = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
                first, end = int(rows[0]), int(rows[-1]) + 1
                chosen = slice(first, end) if end - first == len(rows) else rows.numpy()  # a slice copies nothing
                inputs = model.preprocess(batch.observation.select(chosen))
                device = next(iter(inputs.values())).device
                scored = model.evaluate_actions(inputs, to_device(tokens[rows], device), self.temperature)
                if start < len(valid):
                    found.append((scored.logprobs, scored.values))
                heartbeat()
        if found:  # one copy for all, so that nothing waits in between
            logprobs[valid], values[valid] = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
        shape = batch.loss_mask.shape
        return logprobs.unflatten(0, shape), values.unflatten(0, shape)

    @record_function("update")
    def update(self, batch: RolloutBatch, minibatch: Minibatch, algorithm: Algorithm, step: int) -> dict[str, float]:
        """Take one optimiser step on the rows of a minibatch that this rank holds (a collective call).

        The loss is divided by counts of the whole minibatch, so neither the micro-batch size nor the number of ranks
        changes the gradient. Raise NonFiniteError, before anything changes, if loss or gradient is not finite. Return metrics of the
        minibatch, equal on all ranks.

        Args:
            batch: Flattened rollout of this rank.
            minibatch: Rows of it.
            algorithm: Gives the loss.
            step: Iteration of the run.
        """
        if not self.model.training:  # the call visits every module
            self.model.train()
        rows = minibatch.rows
        # A rank copies the images of its micro-batches only.
        own = algorithm.of_minibatch(batch.select(rows, observation=False))
        counts = LossCounts.of(own, algorithm.config).over_ranks()

        sent = cache(own.to)

        def loss_of(start: int) -> tuple[Tensor, Mapping[str, Tensor]]:
            part = rows[start : start + self.micro_batch_size]
            # Another rank may have more rows, and every pass of a sharded model is a collective call.
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
        # Critic warm-up. AdamW skips parameters without a gradient altogether: no decay, no momentum, no movement. With gradients
        # of 0 it would still decay the weights and move them by former momentum.
        dropped = self.policy_masters if frozen else ()
        totals = self.train_step.accumulate(range(0, minibatch.max_rows, self.micro_batch_size), loss_of, dropped)
        described = _Described("rl", step, lambda: batch.observation.select(rows.numpy()), own.tensors())
        return self._take_step(totals, described, frozen)

    @record_function("update")
    def sft_update(
        self, observation: Observation, actions: Tensor, num_rows: int, step: int, seed: int = 0
    ) -> dict[str, float]:
        """Take one behaviour-cloning step on a minibatch; every rank holds its own rows.

        Args:
            observation: The ``K`` rows of ``own_rows(num_rows)``.
            actions: ``[K, sft_chunk_len, D]`` in env units.
            num_rows: Rows of the minibatch over all ranks.
            step: For the report of a failure, which holds the rows of its rank.
            seed: Fixes the random numbers of the loss; they are drawn for all rows at once, so that neither the
                micro-batch size nor the number of ranks changes them.
        """
        self.model.train()
        uniforms = None
        if self.model.num_sft_uniforms:
            shape = (num_rows, self.model.num_sft_uniforms)
            uniforms = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
            uniforms.clamp_min_(torch.finfo(torch.float32).tiny)  # the open interval (0, 1)
        held = torch.arange(len(actions)).split(self.micro_batch_size)

        def loss_of(rows: tuple[Tensor, tuple[Tensor, Tensor]]) -> tuple[Tensor, Mapping[str, Tensor]]:
            here, (index, valid) = rows
            with self.autocast():
                inputs = self.model.preprocess(observation.select(here.numpy()))
                device = next(iter(inputs.values())).device
                drawn = () if uniforms is None else (to_device(uniforms[index], device),)
                losses = self.model.sft_loss(inputs, to_device(actions[here], device), *drawn)
            share = torch.where(to_device(valid, losses.device), losses.float(), 0.0).sum() / num_rows
            return share, {"loss": share.detach()}

        micro_batches = zip(*(part.split(self.micro_batch_size) for part in own_rows(num_rows)), strict=True)
        totals = self.train_step.accumulate(zip(held, micro_batches, strict=True), loss_of)
        return self._take_step(totals, _Described("sft", step, lambda: observation, {"actions": actions}))

    def _take_step(self, totals: Totals, minibatch: _Described, frozen: bool = False) -> dict[str, float]:
        """Take the optimiser step, unless something is wrong with it; return the metrics of all ranks."""
        own_loss, metrics = totals["loss"], totals.over_ranks()
        if not frozen and not self._has_learnt and math.isfinite(metrics["loss"]):
            self._check_gradient(minibatch)
        try:
            metrics["grad_norm"] = self.train_step.apply(metrics["loss"])
        except NonFiniteError as error:
            self._fail(metrics["loss"], own_loss, minibatch, error)
        heartbeat()
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _check_gradient(self, minibatch: _Described) -> None:
        """Reject a gradient of exactly 0, although the minibatch has something to teach."""
        tensors = minibatch.tensors
        norm = self.train_step.part_norms[0]
        self._has_learnt = norm > 0
        advantages = tensors.get("advantages")
        teaches = any_rank(advantages is None or bool((advantages[tensors["loss_mask"]] != 0).any()))
        if norm == 0 and teaches:
            raise ConfigError(
                f"No gradient reaches the policy in the first update of {minibatch.phase}: the gradients of its "
                f"{len(self.policy_masters)} trained tensors are all 0 or missing, so nothing would be learnt. The loss is "
                "detached from the policy, or its weights are frozen; `rlinf diagnose` tells which tensors have a gradient"
            )

    def _fail(self, loss: float, own_loss: float, minibatch: _Described, cause: NonFiniteError) -> NoReturn:
        """Keep the minibatch for the report, and raise NonFiniteError with the settings that may help (a collective call).

        ``own_loss`` is this rank's fraction of ``loss``.
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
        own = [name for name, each in tensors.items() if each.is_floating_point() and not each.isfinite().all()]
        of_ranks = gather_objects((own, math.isfinite(own_loss), bad))
        spoilt = sorted({name for names, _, _ in of_ranks for name in names})
        bad = [name for name in self.named_masters if any(name in names for _, _, names in of_ranks)]
        # Rows that are not finite tell more than a loss.
        worst = min(range(len(of_ranks)), key=lambda r: (not of_ranks[r][0], of_ranks[r][1]))
        self.failed_batch = FailedBatch(worst, phase, step, loss, norm, bad, list(observation.instruction), tensors)
        way_on = (
            f"Lower {phase if phase == 'sft' else 'trainer'}.learning_rate, or use model.precision=fp32."
            if not spoilt
            else f"The batch itself is not finite ({', '.join(spoilt)}), so no setting of the optimiser mends it: look at what gives "
            "these numbers (dataset, rewards, states, statistics of the normalisation)."
        )
        raise NonFiniteError(
            f"{phase} step {step}: loss {loss}, gradient norm {norm}; gradients of {len(bad)} parameters are not finite"
            f"{' (first: ' + bad[0] + ')' if bad else ''}. The optimiser step was not taken. {way_on}"
        ) from cause


def own_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return which rows of a minibatch this rank computes, as many on every rank.

    Returns:
        int64 ``[ceil(num_rows / ranks)]``, and bool of that shape: whether the row counts. A row that does not is the
        minibatch's last one again, so that every rank takes part in equally many collective calls.
    """
    padded = torch.arange(-(-num_rows // world_size()) * world_size())
    mine = padded[rank() :: world_size()]
    return mine.clamp_max(num_rows - 1), mine < num_rows


def rl_trainer_config(trainer: TrainerConfig, rollbacks: int) -> TrainerConfig:
    """Return the optimiser settings of RL: each time that the run went back halves both learning rates."""
    share = 2**-rollbacks
    return replace(
        trainer,
        learning_rate=trainer.learning_rate * share,
        value_learning_rate=trainer.value_learning_rate * share,
    )


def sft_trainer_config(trainer: TrainerConfig, sft: SFTConfig) -> TrainerConfig:
    """The optimiser settings of behaviour cloning: the trainer's, with SFT's learning rate and warm-up."""
    return replace(trainer, learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps)
