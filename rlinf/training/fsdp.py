"""Fully sharded data parallelism (FSDP2) over the modules that a model declares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rlinf.distributed.process_group import world_size
from rlinf.errors import ConfigError

ENTRY_POINTS = ("predict_action_batch", "evaluate_actions", "sft_loss")


def shard(model: nn.Module, device: str) -> nn.Module:
    """Shard ``model`` in place over all ranks: each module named in ``fsdp_wrap_modules``, then the rest.

    Raises:
        ConfigError: A declared module class does not occur in the model, so it would silently not be sharded.
    """
    mesh = init_device_mesh(device, (world_size(),))
    names = set(model.fsdp_wrap_modules)
    units = [module for module in model.modules() if type(module).__name__ in names]
    missing = names - {type(module).__name__ for module in units}
    if names and not units:
        raise ConfigError(f"None of the declared fsdp_wrap_modules {sorted(missing)} occurs in {type(model).__name__}.")
    for module in units:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ENTRY_POINTS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return model


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (a collective call on all ranks); others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the global norm of sharded or plain gradients; returns the norm before clipping, float32 scalar."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"), foreach=True)
    return full_tensor(norm).float()
