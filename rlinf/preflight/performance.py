"""Checks of the options that buy speed or memory, and of the profiler."""

from __future__ import annotations

from typing import Any

from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device
from rlinf.options import cured_by_settings, override_text
from rlinf.preflight.refuse import refuse


def check_performance(config: RunConfig, policy: tuple[Any, Any] | None) -> None:
    """Check the options of a command that trains; ``policy`` is a policy's class and its configuration, where they are known."""
    check_profile(config)
    model = config.model
    if model.gradient_checkpointing and policy is not None and not getattr(policy[0], "fsdp_wrap_modules", ()):
        found = (
            f"model.gradient_checkpointing=true, but {policy[0].__name__} has no repeated blocks (fsdp_wrap_modules)"
        )
        refuse(found, "blocks whose activations can be recomputed", "model.gradient_checkpointing=false")
    if model.compile:
        from rlinf.models.blocks import check_compiler  # imports transformers

        with cured_by_settings("model"):
            check_compiler(resolve_device(config.cluster.device, 1))


def check_cuda_graph(config: RunConfig, policy: tuple[Any, Any] | None) -> None:
    """Check that there is a GPU for ``model.cuda_graph``, and a policy that decodes token by token."""
    if not config.model.cuda_graph:
        return
    device = resolve_device(config.cluster.device, 1)
    if device != "cuda":
        refuse(f"model.cuda_graph=true on the device '{device}'", "an NVIDIA GPU", "model.cuda_graph=false")
    if policy is not None:
        policy[0].check_cuda_graph(policy[1], config.model.attn_implementation)


def check_profile(config: RunConfig) -> None:
    """Check that the profiled steps are steps of the run."""
    steps, trainer = config.trainer.profile_steps, config.trainer
    if steps is None:
        return
    section = "trainer" if trainer.max_steps > 0 else "sft"
    num_steps = getattr(config, section).max_steps
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1] < num_steps:
        last = num_steps - 1
        refuse(
            f"trainer.profile_steps={override_text(steps)} with {section}.max_steps={num_steps}",
            f"[first, last] with 0 <= first <= last <= {last}",
            f"'trainer.profile_steps=[0,{min(2, last)}]', or trainer.profile_steps=null",
        )
