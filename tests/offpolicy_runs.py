"""Small runs of an actor that learns off-policy, and what their checkpoints hold."""

from pathlib import Path

import torch
from run_results import QUIET, REACH, run_config
from safetensors.torch import load_file

from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.cli import main
from rlinf.config.schema import RunConfig
from rlinf.models.embodiment.actor_policy import base_folder
from rlinf.preflight.validation import validate

SMALL = [
    *REACH, *QUIET, "algorithm=sac", "env.max_episode_steps=8", "rollout.num_envs=4", "rollout.num_chunks=10", "trainer.max_steps=4",
    "evaluation.num_episodes=8", "evaluation.num_envs=8", "evaluation.probe=false", "algorithm.learning_starts=30",
    "algorithm.batch_size=16", "algorithm.replay_capacity=100", "algorithm.actor.hidden_size=16", "algorithm.actor.name=residual",
]  # fmt: skip


def config_of(folder: Path, *overrides: str) -> RunConfig:
    config = run_config(folder, *SMALL, *overrides)
    validate(config)
    return config


def all_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return everything of a checkpoint that is a tensor: policy, actor, critics, optimisers, buffer, generators."""
    folder = checkpoint / "trainer_state"
    held = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in read_entries(folder).items()}
    read_tensors(folder, held)
    model = checkpoint / "model"
    return held | load_file(base_folder(model) / "model.safetensors") | load_file(model / "actor.safetensors")


def collected(folder: Path, *overrides: str) -> Path:
    """Return a dataset of eight episodes of the scripted expert in the env of these runs, some of them cut."""
    words = [each for each in SMALL if each.startswith(("env", "cluster", "tracking"))]
    more = [f"dataset={folder}", "collect.num_episodes=8", "collect.only_success=false", "sft.expert.jitter=0.5"]
    assert main(["collect", *words, *more, "env.max_episode_steps=4", *overrides]) == 0
    return folder
