"""The whole configuration of a run as one dataclass, and the way from a composed mapping to it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.algorithms.config import AlgorithmConfig, PPOConfig
from rlinf.config.options import (
    from_mapping,
    option,
    override_text,
    plain_container,
    public_fields,
    to_mapping,
    unknown_key_message,
)
from rlinf.config.plugins import load_plugins
from rlinf.data.config import CollectConfig
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, did_you_mean
from rlinf.evaluation.config import EvaluationConfig
from rlinf.models.config import ModelConfig, TokenizerConfig
from rlinf.tracking.config import TrackingConfig
from rlinf.training.config import ClusterConfig, RolloutConfig, SFTConfig, TrainerConfig


@dataclass
class RunConfig:
    """Everything that a run needs to know; `rlinf train` composes it from packaged groups, files and overrides."""

    experiment_name: str = option("default", "Names the run folder; an experiment file without it lends its own name.")
    seed: int = option(0, "Seed of everything random in the run.", minimum=0)
    output_dir: str | None = option(
        None, "Run folder; null: outputs/<experiment_name>/<date>_<time> under the folder where the command runs."
    )
    checkpoint: str | None = option(None, "Checkpoint or run folder to evaluate, export or collect with.")
    dataset: str | None = option(None, "New folder into which `rlinf collect` writes demonstrations.")
    resume: str | None = option(
        None, "Checkpoint or run folder to continue: weights, optimiser, counters and random state."
    )
    init_from: str | None = option(
        None, "Checkpoint or run folder whose weights start this run, and nothing else of it."
    )
    plugins: list[str] = option(
        [], "Python modules or .py files to import first; they register models, envs, algorithms."
    )
    model: ModelConfig = option(ModelConfig(), "The policy network.")
    tokenizer: TokenizerConfig = option(TokenizerConfig(), "Tokenizer and processors.")
    env: EnvConfig = option(EnvConfig(), "The simulator.")
    algorithm: AlgorithmConfig = option(PPOConfig(), "The reinforcement learning algorithm.")
    rollout: RolloutConfig = option(RolloutConfig(), "Collection of experience.")
    trainer: TrainerConfig = option(TrainerConfig(), "Optimiser and loop.")
    sft: SFTConfig = option(SFTConfig(), "Behaviour cloning before RL.")
    collect: CollectConfig = option(CollectConfig(), "Collection of demonstrations (`rlinf collect`).")
    evaluation: EvaluationConfig = option(EvaluationConfig(), "Evaluation on held-out episodes.")
    tracking: TrackingConfig = option(TrackingConfig(), "Metrics.")
    cluster: ClusterConfig = option(ClusterConfig(), "Processes and devices.")


REGISTRIES = {"env": ("rlinf.envs", "ENVS"), "algorithm": ("rlinf.algorithms", "ALGORITHMS")}
"""Sections whose dataclass is the ``config_class`` of what their ``name`` stands for in a registry."""


def section_class(section: str, name: str) -> type:
    """Return the configuration dataclass that ``section.name`` selects.

    Raises:
        ConfigError: The name is not registered.
    """
    module, attribute = REGISTRIES[section]
    registry = getattr(importlib.import_module(module), attribute)
    if name not in registry:
        raise ConfigError(
            f"{section}.name is {override_text(name)!r}, which is not registered.{did_you_mean(name, registry)} "
            f"Type {section}=<name>, or import its module with plugins=[module]."
        )
    return registry.get(name).config_class


def fields_named(name: str) -> list[str]:
    """Return the dotted keys whose last part is ``name``: ``trainer.max_steps`` and ``sft.max_steps`` for ``max_steps``."""

    def below(mapping: dict[str, Any], path: str) -> list[str]:
        found = [path + name] if name in mapping else []
        for key, value in mapping.items():
            found += below(value, f"{path}{key}.") if isinstance(value, dict) else []
        return found

    return below(to_mapping(RunConfig()), "")


def no_key(dotted: str, value: Any, known: Iterable[str]) -> str:
    """Say that there is no such key, and where its name is one, or which of the ``known`` ones was meant."""
    elsewhere = [key for key in fields_named(dotted.rpartition(".")[2]) if key != dotted]
    if not elsewhere:
        return unknown_key_message(dotted, value, known)
    return f"There is no key '{dotted}'. Type {' or '.join(f'{key}={override_text(value)}' for key in elsewhere)}"


def build_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Turn a composed configuration into a ``RunConfig``; plugins are imported first, so that their names are known.

    Args:
        mapping: Nested mapping or OmegaConf ``DictConfig``; missing keys and sections take their defaults.

    Raises:
        ConfigError: Unknown key, wrong type, value out of range, unknown env or algorithm.
    """
    values = dict(plain_container(mapping))
    values["plugins"] = load_plugins(from_mapping(RunConfig, {"plugins": values.get("plugins", [])}).plugins)
    for section in REGISTRIES:
        given = values.get(section)
        if isinstance(given, Mapping):
            cls = section_class(section, given.get("name", getattr(RunConfig(), section).name))
            known = public_fields(cls)
            for key, value in given.items():
                if key not in known:
                    raise ConfigError(no_key(f"{section}.{key}", value, known))
            values[section] = from_mapping(cls, given, section)
        elif section not in values:
            values[section] = section_class(section, getattr(RunConfig(), section).name)()
    return from_mapping(RunConfig, values)
