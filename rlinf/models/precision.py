"""Number formats: what they are called, and in which of them a policy acts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rlinf.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PRECISIONS = {
    **dict.fromkeys(("fp32", "float32", "32", "32-true", "bf16-mixed"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "16", "16-true", "half"), torch.float16),
}
"""``model.precision`` to the dtype of the weights."""


def torch_dtype_from_precision(precision: str | int | None) -> torch.dtype:
    """Return the dtype of the weights: ``bf16``, ``fp16``, ``fp32``; ``bf16-mixed`` keeps float32 weights."""
    if str(precision) in PRECISIONS:
        return PRECISIONS[str(precision)]
    close = "bf16-mixed" if str(precision).lower().endswith("mixed") else "bf16"
    found = f"model.precision is '{precision}'; required: fp32, bf16, fp16, or bf16-mixed"
    raise ConfigError(f"{found}. Set e.g. model.precision={close}")


def torch_dtype_of(name: Any) -> torch.dtype:
    """Return the ``torch.dtype`` of ``"bfloat16"``, ``"torch.bfloat16"`` or ``torch.bfloat16``."""
    found = DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"torch_dtype='{name}'; required: {', '.join(DTYPES)}.", torch_dtype="bfloat16")
    return found


def autocast(model: nn.Module, precision: str) -> AbstractContextManager:
    """Return the context in which a model computes: bf16 autocast for ``bf16-mixed``. Rollout and training use the same."""
    if precision != "bf16-mixed":
        return nullcontext()
    return torch.autocast(autocast_type(next(model.parameters())), torch.bfloat16)


def autocast_type(tensor: torch.Tensor) -> str:
    """Return the device type whose autocast a tensor obeys; the meta device has none, and takes the name of the CPU's."""
    return "cpu" if tensor.is_meta else tensor.device.type


def heads_in_float32(model: Any) -> Any:
    """Turn what ``model.float32_modules`` names into float32, in place; ``from_pretrained`` has kept the digits of files."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.split(".")[0] in getattr(model, "float32_modules", ()) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off inside, and back to what they were. Do nothing for an object that only acts."""
    if not isinstance(model, nn.Module):
        yield
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
