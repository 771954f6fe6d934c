"""One optimiser step, of action policies and token policies alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rlinf.distributed.parallel import Parallel, clip_gradients, grad_norm
from rlinf.distributed.process_group import sum_over_ranks
from rlinf.distributed.transfers import fetch
from rlinf.errors import NonFiniteError
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.schedule import learning_rate

Part = TypeVar("Part")


class Totals(dict[str, float]):
    """Metrics of a minibatch, summed over its micro-batches and ranks. Each micro-batch adds its fraction of a mean."""

    def add(self, shares: Sequence[Mapping[str, Tensor | float]], *others: Tensor) -> list[float]:
        """Add the fractions of micro-batches, in their order. Return ``others`` as floats, which come by the same copy from a GPU."""
        values = iter(fetch([*(value for metrics in shares for value in metrics.values()), *others]))
        for metrics in shares:
            for name in metrics:
                self[name] = self.get(name, 0.0) + next(values)
        return list(values)

    def over_ranks(self, sum_values: Callable[[list[float]], list[float]] = sum_over_ranks) -> dict[str, float]:
        """Return the sums over all ranks, which must have the same names (a collective call)."""
        return dict(zip(self, sum_values(list(self.values())), strict=True))


class _Norms(NamedTuple):
    """The masters of each part that have gradients, the norm of each part (0.0: without gradients), and the norm of all."""

    parts: list[list[nn.Parameter]]
    norms: list[Tensor | float]
    total: Tensor


class TrainStep:
    """Accumulates gradients over micro-batches, then rejects, clips, schedules and steps. Every trainer steps by one.

    Args:
        optimizer: Steps the parameters.
        max_grad_norm: The gradients of each part are scaled down to this norm; 0 turns clipping off.
        warmup_steps: Steps over which the learning rates rise linearly to the optimiser's.
        parts: Masters that are clipped together; None: all of them are one part.
        clips_together: Clip all parts by the norm of all gradients.
        parallel: How the ranks hold the model, whose gradients are summed over them; None: the caller sums.
        norm_of: Returns the norm of the gradients of a part over all ranks.

    Attributes:
        num_steps: Steps taken.
        decay: Fraction of the learning rates after the warm-up, which the trainer sets.
        grad_norm: Norm of all gradients at the last ``apply``, before clipping.
        part_norms: Norms of the gradients of the parts at the last ``accumulate``.
    """

    def __init__(
        self,
        optimizer: MasterAdamW,
        max_grad_norm: float,
        *,
        warmup_steps: int = 0,
        parts: Sequence[Sequence[nn.Parameter]] | None = None,
        clips_together: bool = False,
        parallel: Parallel | None = None,
        norm_of: Callable[[list[nn.Parameter]], Tensor] = grad_norm,
    ) -> None:
        self.optimizer = optimizer
        self.max_grad_norm, self.warmup_steps, self.clips_together = max_grad_norm, warmup_steps, clips_together
        self.parts = [optimizer.masters] if parts is None else parts
        self.parallel, self.norm_of = parallel, norm_of
        self.num_steps, self.decay = 0, 1.0
        self.grad_norm = 0.0
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._measured: tuple[_Norms, list[float]] | None = None  # by ``accumulate``, for ``apply``
        self.part_norms = [0.0] * len(self.parts)

    def set_learning_rate(self, rate: float) -> None:
        """Step all parameters with this learning rate from now on (after a warm-up)."""
        self._peaks = [rate] * len(self._peaks)

    def accumulate(
        self,
        micro_batches: Iterable[Part],
        loss_of: Callable[[Part], tuple[Tensor, Mapping[str, Tensor]]],
        frozen: Sequence[nn.Parameter] = (),
    ) -> Totals:
        """Add up the gradients of a minibatch over micro-batches and ranks, and the metrics of this rank.

        The host waits for a GPU once, at the end, for the metrics and the norms of the gradients together.

        Args:
            micro_batches: What ``loss_of`` takes, one after the other; with shards, as many on every rank.
            loss_of: Returns the micro-batch's fraction of the loss and of each metric. A fraction divides by counts of the whole
                minibatch, so numbers of micro-batches and ranks change no result.
            frozen: Masters whose gradients are dropped at the end.
        """
        found: list[Mapping[str, Tensor]] = []
        parts = list(micro_batches)
        for number, part in enumerate(parts, start=1):
            if self.parallel is not None:
                self.parallel.start_backward(is_last=number == len(parts))
            loss, metrics = loss_of(part)
            loss.backward()
            self.optimizer.gather_gradients()
            found.append(metrics)
        if self.parallel is not None:
            self.parallel.sum_gradients(self.optimizer.masters)
        for master in frozen:
            master.grad = None
        totals, norms = Totals(), self._norms()
        self._measured = (norms, totals.add(found, norms.total, *norms.norms))
        self.part_norms = self._measured[1][1:]
        return totals

    def _norms(self) -> _Norms:
        parts = [[p for p in part if p.grad is not None] for part in self.parts]
        norms = [self.norm_of(part) if part else 0.0 for part in parts]
        found = [norm for norm in norms if isinstance(norm, Tensor)]
        if len(parts) == 1 and found:
            return _Norms(parts, norms, found[0])
        squares = [norm.to(found[0].device) ** 2 for norm in found] or [torch.zeros(())]
        return _Norms(parts, norms, torch.stack(squares).sum().sqrt())

    def apply(self, loss: float) -> float:
        """Clip the gradients and take the step; return ``grad_norm``.

        The gradients must still be as the last ``accumulate`` left them, if there was any since the last step.
        Raise NonFiniteError, before anything changes, if ``loss`` or a gradient is NaN or infinite.
        """
        if self._measured is None:
            norms = self._norms()
            self._measured = (norms, fetch([norms.total]))
        (norms, (self.grad_norm, *_)), self._measured = self._measured, None
        if not (math.isfinite(loss) and math.isfinite(self.grad_norm)):
            raise NonFiniteError(f"The loss is {loss} and the gradient norm {self.grad_norm}; the step was not taken.")
        if self.clips_together:
            clip_gradients(sum(norms.parts, []), norms.total, self.max_grad_norm)
        else:
            for part, norm in zip(norms.parts, norms.norms, strict=True):
                clip_gradients(part, norm, self.max_grad_norm)
        self.step(moves=any(norms.parts))
        return self.grad_norm

    def step(self, moves: bool = True) -> None:
        """Take the step by the gradients as they are, with the learning rates of the schedule, and forget them.

        Args:
            moves: False: without any gradient, the step only counts.
        """
        share = self.decay * learning_rate(self.num_steps, math.inf, warmup_steps=self.warmup_steps)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        if moves:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
