"""The optimiser step that all trainers use, for action policies and token policies."""

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

MicroBatch = TypeVar("MicroBatch")


class Totals(dict[str, float]):
    """Metrics of a minibatch, summed over its micro-batches and ranks. Each micro-batch contributes its fraction of a mean."""

    def add(self, micro_batches: Sequence[Mapping[str, Tensor | float]], *extra: Tensor) -> list[float]:
        """Add the micro-batches' metrics in order; return ``extra`` as floats."""
        # Copy all values from the GPU at once, because each copy waits until the GPU has finished.
        values = iter(fetch([*(value for metrics in micro_batches for value in metrics.values()), *extra]))
        for metrics in micro_batches:
            for name in metrics:
                self[name] = self.get(name, 0.0) + next(values)
        return list(values)

    def over_ranks(self, sum_values: Callable[[list[float]], list[float]] = sum_over_ranks) -> dict[str, float]:
        """Return the sums over all ranks, which must have the same metric names (a collective call)."""
        return dict(zip(self, sum_values(list(self.values())), strict=True))


class _Norms(NamedTuple):
    """Each part's masters with gradients, each part's gradient norm (0.0 without gradients), and the norm of all gradients."""

    parts: list[list[nn.Parameter]]
    norms: list[Tensor | float]
    total: Tensor


class TrainStep:
    """Accumulates gradients over micro-batches, checks and clips them, sets the learning rate, and takes the optimiser step.

    Args:
        max_grad_norm: Norm to which each part's gradients are clipped; 0 disables clipping.
        warmup_steps: Number of steps over which the learning rates increase linearly to the optimiser's.
        parts: Groups of masters, each clipped by its own norm; None for a single part.
        clips_together: Whether to clip all parts by the norm of all gradients.
        parallel: How the model is distributed over ranks, which sums gradients over them; None if the caller sums them.
        norm_of: Function that returns the norm of a part's gradients over all ranks.

    Attributes:
        num_steps: Number of steps taken.
        decay: Factor applied to the learning rates after the warm-up, set by the trainer.
        grad_norm: Norm of all gradients before clipping in the last ``apply``.
        part_norms: Norms of each part's gradients in the last ``accumulate``.
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
        # `accumulate` computes the norms that `apply` uses, so that both need only one wait for the GPU.
        self._measured: tuple[_Norms, list[float]] | None = None
        self.part_norms = [0.0] * len(self.parts)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate for all parameters (after the warm-up)."""
        self._peaks = [rate] * len(self._peaks)

    def accumulate(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_of: Callable[[MicroBatch], tuple[Tensor, Mapping[str, Tensor]]],
        frozen: Sequence[nn.Parameter] = (),
    ) -> Totals:
        """Sum a minibatch's gradients over micro-batches and ranks; return this rank's metrics.

        Args:
            micro_batches: Inputs for ``loss_of``; with a sharded model, every rank needs the same number.
            loss_of: Returns a micro-batch's fraction of the loss and of each metric: sums divided by the entire minibatch's counts, so
                that the result does not depend on the number of micro-batches or ranks.
            frozen: Masters that are not updated; their gradients are dropped at the end.
        """
        batch_metrics: list[Mapping[str, Tensor]] = []
        batches = list(micro_batches)
        for number, batch in enumerate(batches, start=1):
            if self.parallel is not None:
                self.parallel.start_backward(is_last=number == len(batches))
            loss, metrics = loss_of(batch)
            loss.backward()
            # Gather after every micro-batch, because sums of many 16-bit gradients would be rounded to 16 bits.
            self.optimizer.gather_gradients()
            batch_metrics.append(metrics)
        if self.parallel is not None:
            self.parallel.sum_gradients(self.optimizer.masters)
        # Drop them before computing the norms, which must exclude them.
        for master in frozen:
            master.grad = None
        totals, norms = Totals(), self._norms()
        self._measured = (norms, totals.add(batch_metrics, norms.total, *norms.norms))
        self.part_norms = self._measured[1][1:]
        return totals

    def _norms(self) -> _Norms:
        parts = [[p for p in part if p.grad is not None] for part in self.parts]
        norms = [self.norm_of(part) if part else 0.0 for part in parts]
        tensors = [norm for norm in norms if isinstance(norm, Tensor)]
        # With one part, use its norm directly, because the root of its square could differ by rounding.
        if len(parts) == 1 and tensors:
            return _Norms(parts, norms, tensors[0])
        squares = [norm.to(tensors[0].device) ** 2 for norm in tensors] or [torch.zeros(())]
        return _Norms(parts, norms, torch.stack(squares).sum().sqrt())

    def apply(self, loss: float) -> float:
        """Clip the gradients, take the step, and return ``grad_norm``.

        The gradients must not have changed since the last ``accumulate``, because its norms are used.
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
        """Take an unclipped step with the scheduled learning rates, and clear the gradients.

        If ``moves`` is False (no parameter has a gradient), only the step counter is incremented.
        """
        factor = self.decay * learning_rate(self.num_steps, math.inf, warmup_steps=self.warmup_steps)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        if moves:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
