"""Statistics over the rollout of all ranks, of which each rank holds its own envs.

Every function is a collective call: all ranks call the same ones in the same order. What an env contributes is added up in
float64, then the envs are added in their order (``rlinf.distributed.sums``). So results have the same bits on any number of
ranks, where a mean of the ranks' own means would not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algorithms.advantages import ROUNDING
from rlinf.distributed.sums import maximum, sum_env_groups


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the elements in ``mask`` over all ranks, 0 without any.

    Args:
        values: ``[B]``, or time-major ``[T, B, ...]``; ``B`` envs of this rank.
        mask: bool of that shape.
    """
    return _means(mask, values)[0]


def masked_normalize(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the elements in ``mask`` of all ranks; the others become 0.

    If the deviation is within rounding, all become 0. Shapes are as in ``masked_mean``.
    """
    valid = torch.where(mask, advantages, 0.0).double()
    (mean,) = _means(mask, valid)
    centred = valid - mean
    std = _means(mask, centred**2)[0] ** 0.5
    (largest,) = maximum(float(valid.abs().nan_to_num().max()))
    normal = torch.zeros_like(centred) if std <= ROUNDING * largest else centred / (std + eps)
    return torch.where(mask, normal, 0.0).to(advantages.dtype)


def normalize_rows(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the rows of a minibatch, of which each rank has any number, as ``masked_normalize`` does a rollout.

    The deviation is the sample's (``n - 1``), as in Stable-Baselines3; a single element stays as it is. Both arguments are ``[N, C]``.
    """
    valid = torch.where(mask, advantages, 0.0).double()
    total, count = _sums(valid, mask.double())
    if count < 2:
        return advantages
    centred = torch.where(mask, valid - total / count, 0.0)
    (squares,) = _sums(centred**2)
    return (centred / ((squares / (count - 1)) ** 0.5 + eps)).to(advantages.dtype)


def _sums(*values: Tensor) -> list[float]:
    """Return the sum of each tensor over all ranks."""
    return sum_env_groups(torch.stack([each.sum() for each in values]).unsqueeze(0)).tolist()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var[returns - values] / Var[returns]`` over the elements in ``mask`` of all ranks, ``[T, B]``.

    0 if the returns do not vary.
    """
    returns, errors = returns.double(), returns.double() - values.double()
    mean_return, mean_error = _means(mask, returns, errors)
    variance, rest = _means(mask, (returns - mean_return) ** 2, (errors - mean_error) ** 2)
    return 0.0 if variance < 1e-12 else 1 - rest / variance


def _means(mask: Tensor, *values: Tensor) -> list[float]:
    """Return the means of several tensors over the elements in ``mask`` of all ranks."""
    parts = [torch.where(mask, each, 0.0).double() for each in values] + [mask.double()]
    if mask.ndim > 1:
        parts = [part.movedim(1, 0).flatten(1) for part in parts]  # an env in each row
    # cumsum adds one after the other. The order of `sum` depends on the number of rows.
    rows = torch.stack([part.reshape(len(part), -1).cumsum(1)[:, -1] for part in parts], 1)
    *sums, count = sum_env_groups(rows).tolist()
    return [total / max(count, 1) for total in sums]
