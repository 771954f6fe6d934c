"""Handle a policy's number formats (names, autocast, float32 layers), and switch off its dropout."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PRECISIONS = {
    **dict.fromkeys(("fp32", "float32", "32", "32-true", "bf16-mixed"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "16", "16-true", "half"), torch.float16),
}
"""Maps ``model.precision`` to the dtype of the weights."""


def torch_dtype_from_precision(precision: str | int | None) -> torch.dtype:
    """Return the dtype of the weights for ``bf16``, ``fp16``, ``fp32`` or ``bf16-mixed`` (float32 weights)."""
    if str(precision) in PRECISIONS:
        return PRECISIONS[str(precision)]
    close = "bf16-mixed" if str(precision).lower().endswith("mixed") else "bf16"
    problem = f"model.precision is '{precision}'; expected fp32, bf16, fp16, or bf16-mixed"
    raise ConfigError(f"{problem}. Set e.g. model.precision={close}")


def torch_dtype_of(name: Any) -> torch.dtype:
    """Return the ``torch.dtype`` for e.g. ``"bfloat16"``, ``"torch.bfloat16"`` or ``torch.bfloat16``."""
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"torch_dtype='{name}'; expected {', '.join(DTYPES)}.", torch_dtype="bfloat16")
    return dtype


def autocast(model: nn.Module, precision: str) -> AbstractContextManager:
    """Return the context for rollout and training passes: bf16 autocast for ``bf16-mixed``, otherwise none."""
    if precision != "bf16-mixed":
        return nullcontext()
    return torch.autocast(autocast_type(next(model.parameters())), torch.bfloat16)


def autocast_type(tensor: torch.Tensor) -> str:
    """Return the device type whose autocast applies to a tensor; for the meta device, which has none, it is the CPU's."""
    return "cpu" if tensor.is_meta else tensor.device.type


def heads_in_float32(model: Any) -> Any:
    """Cast the modules in ``model.float32_modules`` to float32 in place; loading did not round their weights."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.split(".")[0] in getattr(model, "float32_modules", ()) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off within the context, then restore the mode. Objects without modules are unaffected."""
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


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context that turns autocast off on the device of ``tensor``."""
    return torch.autocast(autocast_type(tensor), enabled=False)


class LinearInFloat32(nn.Linear):
    """A linear layer with float32 output; to convert an existing output head of any dtype, set its ``__class__``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_in_float32(x, self.weight, self.bias)


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer in float32: ``[..., H]`` to ``[..., out]``."""
    # Needed for logits: from 16 on, bfloat16 values are at least 0.125 apart, which changes a probability by up to 6 %.
    with without_autocast(x):
        return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def switch_off_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout rate in a model's modules and configuration to 0; return the model."""
    # Published configurations may set rates above 0. Rollout and scoring, both in evaluation mode, would still agree, but the
    # probability ratios of the first update would not be 1.
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear(module)
    _clear_config(model.config)
    return model


def _clear(owner: Any) -> None:
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)


def _clear_config(config: Any) -> None:
    _clear(config)
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):  # a nested configuration, e.g. for the vision tower
            _clear_config(value)
