"""Fully sharded data parallelism (FSDP2) over the modules that a model declares."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlinf.distributed.process_group import world_size
from rlinf.errors import ConfigError

ENTRY_POINTS = ("predict_action_batch", "evaluate_actions", "sft_loss")


def shard(model: nn.Module, device: str) -> nn.Module:
    """Shard ``model`` in place over all ranks: each module named in ``fsdp_wrap_modules``, then the rest.

    Trained 16-bit weights become float32 shards. They are gathered and used in 16 bits; their gradients are summed over
    ranks and micro-batches in float32. ``model.compute_dtypes`` then maps their names to the 16-bit format. Frozen
    weights stay in 16 bits, and modules in ``float32_modules`` stay in float32.

    Raises:
        ConfigError: No declared module class occurs in the model, or ``float32_modules`` names a 16-bit model's parameter.
    """
    # FSDP2 warns about in-place writes to the model's outputs; nothing here writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = init_device_mesh(device, (world_size(),))
    names = set(model.fsdp_wrap_modules)
    units = [module for module in model.modules() if type(module).__name__ in names]
    if names and not units:
        raise ConfigError(f"None of the declared fsdp_wrap_modules {sorted(names)} occurs in {type(model).__name__}.")
    model.compute_dtypes = {
        name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.element_size() == 2
    }
    dtype = next((p.dtype for p in model.parameters() if p.element_size() == 2), None)
    if dtype is not None:
        for name in getattr(model, "float32_modules", ()):
            module = getattr(model, name, None)
            if isinstance(module, nn.Parameter):
                raise ConfigError(
                    f"{name} of {type(model).__name__} is not a module, so its shards would be used in {str(dtype)[6:]}. "
                    "Leave it out of float32_modules, put it into its own module, or set model.precision=bf16-mixed"
                )
            if isinstance(module, nn.Module):
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    # The model casts its own inputs: a cast here would round the denoising chain and the state of a flow policy.
    sums = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums, cast_forward_inputs=False)
    for module in [*units, model]:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.element_size() == 2:
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for name in ENTRY_POINTS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return model


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (a collective call on all ranks); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor and its place in the whole; all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, (...,)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the global 2-norm of the gradients, a float32 scalar on the CPU; a collective call if they are sharded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    return full_tensor(norm).float().cpu()


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of global norm ``norm`` down to at most ``max_norm``; 0 turns clipping off."""
    if max_norm > 0 and parameters:
        device = parameters[0].device
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.to(device), foreach=True)
