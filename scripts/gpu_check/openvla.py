"""OpenVLA with random weights: drawn once, on the GPU, and kept in the cache, from which all checks read it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gpu_check.rows import GB, NEEDS_FULL_SIZE, Rows, Setting
from rlinf.files import replace_folder

ACTOR_SCALE = 4.0
"""Factor on the head's random weights, whose own logits have a deviation of 1.3: log-probabilities near -2, as of a policy that learns.

At 30 (deviation 38), rounding alone fails the gate: a mean exp gap of 1.2 on an H100.
"""
TINY_MODEL = ["experiment=quickstart_vllm", "rollout.backend=torch", "env.tasks=[reach]"]


def random_words(setting: Setting) -> list[str]:
    """Return the overrides of the model that is drawn: 7B, or a tiny one that decodes token by token as well."""
    if setting.tiny:
        return TINY_MODEL
    sizes = "+model.init_config={n_action_bins: 256}"  # all other fields have the values of the 7B
    return ["experiment=openvla_tabletop_lora", "model.unnorm_key=null", "model.is_lora=false", sizes]


def folder_words(setting: Setting, num_steps: int) -> list[str]:
    """Return the overrides of a run of PPO that trains adapters on the drawn model."""
    common = [f"trainer.max_steps={num_steps}", "evaluation.num_episodes=4", "sft.max_steps=0", "trainer.max_keep=1"]
    common += [f"model.model_path={setting.model}", "model.unnorm_key=null", "model.is_lora=true"]
    if setting.tiny:
        small = ["rollout.num_envs=8", "rollout.num_chunks=16", "trainer.minibatch_size=16", "model.lora.rank=4"]
        return [*TINY_MODEL, "~model.init_config", *small, *common]
    return ["experiment=openvla_tabletop_lora", *common]


def configuration(words: list[str]) -> Any:
    """Return the configuration of a run."""
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    return build_config(compose_config(words))


def save_drawn(model: Any, folder: Path) -> None:
    """Write a model to the cache, where every folder is complete."""
    partial = folder.with_name(f".{folder.name}.tmp")
    model.save_pretrained(partial)
    replace_folder(partial, folder)


def g0_draw(rows: Rows, setting: Setting) -> None:
    """OpenVLA is drawn on the GPU and written to a folder."""
    from rlinf.models import build_policy

    config = configuration([*random_words(setting), f"cluster.device={setting.device}"])
    start = time.monotonic()
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = build_policy(config)
    with torch.no_grad():
        model.language_model.lm_head.weight.mul_(ACTOR_SCALE)
    if setting.is_gpu:
        torch.cuda.synchronize()
    rows.state("parameters, in billions", f"{sum(p.numel() for p in model.parameters()) / 1e9:.3f}")
    if setting.is_full:
        rows.at_most("seconds to initialise the model", time.monotonic() - start, 60)
    else:
        rows.not_measured("seconds to initialise the model", NEEDS_FULL_SIZE)
    start = time.monotonic()
    save_drawn(model, setting.model)
    size = sum(path.stat().st_size for path in setting.model.glob("*.safetensors"))
    rows.state("seconds to write it", f"{time.monotonic() - start:.1f}, {size / GB:.2f} GB")
