"""Fully sharded data parallelism (FSDP2) over the modules that a model declares."""

from __future__ import annotations

import warnings

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
        ConfigError: No declared module class occurs in the model, so nothing would be sharded as a unit.
    """
    # It warns of writing into what the model returns, which nobody here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = init_device_mesh(device, (world_size(),))
    names = set(model.fsdp_wrap_modules)
    units = [module for module in model.modules() if type(module).__name__ in names]
    if names and not units:
        raise ConfigError(f"None of the declared fsdp_wrap_modules {sorted(names)} occurs in {type(model).__name__}.")
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


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Global 2-norm of sharded or plain gradients, float32 scalar on the CPU; a collective call when sharded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    return full_tensor(norm).float().cpu()


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of global norm ``norm`` down to ``max_norm``; 0 turns clipping off."""
    if max_norm > 0 and parameters:
        device = parameters[0].device
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.to(device), foreach=True)
