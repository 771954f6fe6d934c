"""Checks the checkpoint given by ``resume`` or ``init_from``, and lists the settings that a resumed run changes."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlinf.algorithms import ALGORITHMS
from rlinf.checkpoints.folders import (
    SUPERSEDED,
    flat,
    has_policy,
    policy_folder,
    read_loop_state,
    read_saved_config,
    resolve_checkpoint,
)
from rlinf.config.schema import RunConfig
from rlinf.errors import CheckpointError, ConfigError, reject
from rlinf.manifest import Manifest, compare, reject_mismatches
from rlinf.models.embodiment.actor_policy import has_actor
from rlinf.options import override_text, to_mapping
from rlinf.preflight.conditions import conditions_of

KEYS_OF_OTHER_COMMANDS = {
    "checkpoint": "resume={0} to continue its run, or init_from={0} to start with its weights",
    "dataset": "sft.dataset={0} to train on it",
    "evaluation.compare": "evaluation.compare=null, and later run rlinf evaluate --compare {0} <run folder>/eval/<tag>",
    "evaluation.stop_when": "evaluation.stop_when=null, because all evaluations of a run have the same episodes",
}
"""Keys that training ignores, and their replacements."""

LAUNCH_KEYS = ("output_dir", "resume", "init_from")
"""Keys that specify how and where a run was started; ``changes_since`` ignores them."""


def check_unread_keys(config: RunConfig, command: str) -> None:
    """Check that no key is set that training ignores."""
    for key, fix in KEYS_OF_OTHER_COMMANDS.items():
        value = attrgetter(key)(config)
        if value is not None:
            raise ConfigError(f"{key}={value} is not read by `rlinf {command}`. Set {fix.format(value)}")


def check_start(config: RunConfig, command: str) -> None:
    """Check that the checkpoint given by ``resume`` or ``init_from`` matches the configuration, and was not set aside."""
    folder = resolve_checkpoint(config.resume or config.init_from)
    if config.resume is not None and SUPERSEDED.fullmatch(folder.parent.name):
        back = folder.parent.parent / folder.name
        place = f"{back} (replacing the one there)" if back.exists() else back
        actual = f"resume={config.resume} was set aside when its run continued from an earlier checkpoint"
        move = f"Move {folder} back to {place}, and set resume={back}"
        raise ConfigError(f"{actual}; expected a checkpoint in {back.parent}. {move}")
    state = read_loop_state(folder) if config.resume is not None else None
    saved = Manifest.load(folder)
    check_model_type(folder, saved, config)
    if state is None:
        return
    new_run = f"init_from={config.resume} resume=null output_dir=<a new folder>"
    before = read_saved_config(folder)
    pairs = {"seed": (before.get("seed"), config.seed)}
    if state["phase"] == "rl" and state["step"] > 0:  # the critic was trained with this scale
        scales = before["algorithm"].get("scale_rewards", False), getattr(config.algorithm, "scale_rewards", False)
        pairs["algorithm.scale_rewards"] = scales
    for key, (was, now) in pairs.items():
        if was != now:
            actual = f"{key}={override_text(now)}, and {folder} was written with {key}={override_text(was)}"
            fix = f"{key}={override_text(was)}, or for a new run {new_run}"
            reject(actual, "the same value throughout a run", fix)
    preprocessing = {**saved.preprocessing, "cameras": list(config.env.cameras)}
    reject_mismatches(
        compare(saved, replace(saved, **conditions_of(config), preprocessing=preprocessing)),
        config.evaluation.allow_mismatch,
        f"{folder} was written under conditions that differ from the current ones (a new run may start with its weights: {new_run})",
    )
    if command == "sft" and state["phase"] == "rl":
        raise ConfigError(f"{folder} has finished cloning and is in RL. Run rlinf train resume={config.resume}")
    if command == "train" and state["step"] > config.trainer.max_steps:
        actual = f"trainer.max_steps={config.trainer.max_steps} for {folder}"
        required = f"at least the {state['step']} iterations already done"
        reject(actual, required, f"trainer.max_steps={state['step'] + 10}, or resume=<an earlier checkpoint>")


def check_model_type(folder: Path, saved: Manifest, config: RunConfig) -> None:
    """Check that the checkpoint contains the configured model type."""
    model_type = saved.model.get("model_type")
    if model_type != config.model.model_type:
        actual = f"{folder} contains a '{model_type}', but model.model_type is '{config.model.model_type}'"
        raise CheckpointError(f"{actual}. Set model.model_type={model_type}, or name a different checkpoint")


def changes_since(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return ``key before -> now`` for each key whose value differs from the saved configuration."""
    before, now = flat(saved), flat(to_mapping(config))
    return [
        f"{key} {override_text(before[key])} -> {override_text(value)}"
        for key, value in now.items()
        if key in before and before[key] != value and key not in LAUNCH_KEYS
    ]


def check_no_actor(config: RunConfig) -> None:
    """Check that a policy with an actor is trained by an off-policy algorithm."""
    trains_actors = ALGORITHMS.get(config.algorithm.name).freezes_policy
    if trains_actors and (config.resume is not None or config.sft.max_steps == 0):
        return
    folder = resolve_checkpoint(config.resume or config.init_from)
    if has_policy(folder) and has_actor(policy_folder(folder)):
        actual = f"{folder} contains an actor on a frozen policy"
        reject(actual, "an off-policy algorithm, and no cloning", "algorithm=sac sft.max_steps=0")
