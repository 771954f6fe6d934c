"""Statistics over the rollouts of all ranks, where each rank stores the rollout of its own envs.

Every function is a collective call: all ranks call the same functions in the same order. Values are summed per env in float64, and
the sums are added in env order (``rlinf.distributed.process_group``). The results are therefore bit-identical for any number of ranks, which
a mean of the ranks' means would not be.
"""

import torch
from torch import Tensor

from rlinf.algorithms.advantages import ROUNDING
from rlinf.distributed.process_group import maximum, sum_env_groups


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the elements selected by ``mask`` over all ranks, or 0 for an empty mask.

    ``values`` are ``[B]``, or time-major ``[T, B, ...]``, for this rank's ``B`` envs; ``mask`` is a bool tensor of the same shape.
    """
    return _means(mask, values)[0]


def masked_normalize(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the elements selected by ``mask`` to mean 0 and std 1 over all ranks, and set all remaining elements to 0.

    If the std is zero up to rounding, all elements become 0. Shapes are as in ``masked_mean``.
    """
    valid = torch.where(mask, advantages, 0.0).double()
    (mean,) = _means(mask, valid)
    centred = valid - mean
    std = _means(mask, centred**2)[0] ** 0.5
    (largest,) = maximum(float(valid.abs().nan_to_num().max()))
    normal = torch.zeros_like(centred) if std <= ROUNDING * largest else centred / (std + eps)
    return torch.where(mask, normal, 0.0).to(advantages.dtype)


def normalize_rows(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the rows ``[N, C]`` of a minibatch to mean 0 and std 1 over all ranks; ``N`` may differ between ranks.

    Divides by the sample std (``n - 1``), as Stable-Baselines3 does, and leaves a single element unchanged.
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
    return sum_env_groups(torch.stack([tensor.sum() for tensor in values]).unsqueeze(0)).tolist()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var[returns - values] / Var[returns]`` over the elements ``[T, B]`` selected by ``mask`` on all ranks.

    The result is 0 if the returns do not vary.
    """
    returns, errors = returns.double(), returns.double() - values.double()
    mean_return, mean_error = _means(mask, returns, errors)
    variance, error_variance = _means(mask, (returns - mean_return) ** 2, (errors - mean_error) ** 2)
    return 0.0 if variance < 1e-12 else 1 - error_variance / variance


def _means(mask: Tensor, *values: Tensor) -> list[float]:
    """Return the means of several tensors over the elements selected by ``mask`` on all ranks."""
    summands = [torch.where(mask, tensor, 0.0).double() for tensor in values] + [mask.double()]
    if mask.ndim > 1:
        summands = [summand.movedim(1, 0).flatten(1) for summand in summands]  # [B, T * ...]
    # cumsum adds sequentially, whereas the summation order of `sum` depends on the size.
    env_sums = torch.stack([summand.reshape(len(summand), -1).cumsum(1)[:, -1] for summand in summands], 1)
    *sums, count = sum_env_groups(env_sums).tolist()
    return [total / max(count, 1) for total in sums]
