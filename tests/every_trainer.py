"""A small run of each trainer: behaviour cloning, policy gradients, actors on a frozen policy, recipes."""

from pathlib import Path

import torch
from recipe_sums import ROWS, Sums
from run_results import QUIET, REACH, run_config, untimed_metrics

from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.commands.train import build
from rlinf.distributed.launch import launch
from rlinf.options import from_mapping
from rlinf.recipes.build import RecipeData
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.run import run

SMALL = [
    *REACH, *QUIET, "env.max_episode_steps=8", "rollout.num_envs=8", "rollout.num_chunks=8", "trainer.minibatch_size=32",
    "model.micro_batch_size=32", "evaluation.num_episodes=4", "evaluation.num_envs=4", "evaluation.probe=false", "trainer.save_every=1",
    "trainer.max_keep=-1",
    "trainer.adam_eps=1e-3",  # a step is then a smooth function of the gradient, also of one near 0
]  # fmt: skip
HEAD = [
    "rollout.num_envs=4", "rollout.num_chunks=10", "algorithm.learning_starts=30", "algorithm.batch_size=16",
    "algorithm.replay_capacity=100", "algorithm.actor.hidden_size=16",
]  # fmt: skip
FILTERED = [
    "algorithm=filtered_bc", "algorithm.num_episodes=24", "algorithm.num_updates=4", "env.max_episode_steps=40",
]  # fmt: skip
CLONING = ["sft.num_demonstrations=8", "sft.batch_size=15"]
ACTIONS = {
    "cloning": [*CLONING, "trainer.max_steps=0"],
    "ppo": ["algorithm.critic_warmup_steps=1", "trainer.warmup_steps=6"],
    "normalised ppo": [
        "model.init_config.normalize_state=true",
        "algorithm.scale_rewards=true",
        "algorithm.critic_warmup_steps=0",
    ],
    "grpo": ["algorithm=grpo", "rollout.group_size=4", "rollout.auto_reset=false"],
    "rloo": ["algorithm=rloo", "rollout.group_size=4", "algorithm.kl_coef=0.1"],
    "reinforce_pp": ["algorithm=reinforce_pp", "algorithm.kl_coef=0.1"],
    "filtered_bc": FILTERED,
    "sac": ["algorithm=sac", *HEAD, "algorithm.actor.name=expo"],
    "td3": ["algorithm=td3", *HEAD, "algorithm.actor.name=rlt"],
}
"""Trainers of action policies, with the words that choose them."""
VLA = [
    "model=openvla_tiny",
    "env.cameras=[front]",
    "rollout.num_envs=4",
    "sft.num_demonstrations=4",
    "sft.batch_size=15",
]
RECIPES = ("recipe sft", "recipe grpo", "recipe dpo")


def digits(completion, reference, **row):
    """Fraction of digits: a reward that random answers differ in."""
    return sum(letter.isdigit() for letter in completion) / 5


def recipe(name: str, folder: Path, steps: int, model: str, **train) -> RecipeConfig:
    kind = name.removeprefix("recipe ")
    return from_mapping(
        RecipeConfig,
        {
            "train": {
                "output_dir": str(folder.parent), "timestamp": folder.name, "param_dtype": "float32", "optm_lr": 1e-2,
                "train_batch_per_replica": 8, "epoch": 3, "max_num_steps": steps, "optm_warmup_steps": 2, "epsilon": 1e-3,
                "train_policy": {"type": kind, "mini_batch": 4, "kl_beta": 0.01 * (kind == "grpo"), "dataset": {"test_size": 4}},
                "ckpt": {"save_freq": 1, "max_keep": -1, "export_safetensors": False, "save_mode": "sync"},
                **train,
            },
            "policy": {"model_name_or_path": model, "model_max_length": 32, "model_gradient_checkpointing": False, "device": "cpu"},
            "rollout": {"backend": "torch", "n_generation": 4, "batch_size": 2, "max_response_length": 5},
            "validation": {"enable": True, "freq": 2},
        },
    )  # fmt: skip


def _run_recipe(config: RecipeConfig) -> None:
    run(config, RecipeData(ROWS, Sums(), [digits]))


def _run_action(config) -> None:
    build(config).execute()


def start(
    name: str, folder: Path, steps: int, model: str, *more: str, seed: int = 0, resumes: bool = False, ranks: int = 1
) -> None:
    """Run a trainer for so many steps in all, in ``folder``.

    Args:
        model: Folder of a language model, for recipes.
        more: Further words for action policies.
        resumes: Continue from the newest checkpoint there.
    """
    if name in RECIPES:
        launch(_run_recipe, recipe(name, folder, steps, model, seed=seed, resume=resumes), ranks, "cpu")
        return
    number = f"{'sft' if name == 'cloning' else 'trainer'}.max_steps={steps}"
    words = [*SMALL, *ACTIONS[name], number, f"seed={seed}", *more, *([f"resume={folder}"] if resumes else [])]
    config = run_config(folder, *words, f"cluster.num_processes={ranks}")
    launch(_run_action, config, ranks, "cpu")


def checkpoint(name: str, folder: Path, step: int) -> Path:
    """Return the checkpoint after a step."""
    names = f"step_{step}" if name in RECIPES else f"{'sft' if name == 'cloning' else 'rl'}_{step:06d}"
    return folder / "checkpoints" / names


def tensors(name: str, folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return what a checkpoint keeps: weights, moments, and all that a trainer adds, such as a replay buffer and generators."""
    state = checkpoint(name, folder, step) / "trainer_state"
    held = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in read_entries(state).items()}
    read_tensors(state, held)
    return held


def lines(folder: Path) -> list[dict]:
    """Return the lines of the steps, without times."""
    return [line for line in untimed_metrics(folder) if not any(key.startswith("eval/") for key in line)]
