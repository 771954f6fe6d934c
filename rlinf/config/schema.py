"""The complete configuration of a run as a dataclass, and its construction from a composed mapping."""

import dataclasses
import math
import os
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from rlinf import models
from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.config import AnyAlgorithmConfig, PPOConfig
from rlinf.checkpoints.folders import read_saved_config, resolve_checkpoint
from rlinf.config.plugins import load_plugins
from rlinf.config.training import ClusterConfig, TrainerConfig
from rlinf.data.config import GOOD, CollectConfig, SFTConfig
from rlinf.distributed.start import launch_context
from rlinf.envs import ENVS
from rlinf.envs.config import EnvConfig
from rlinf.errors import SYNONYMS, ConfigError, MissingDependencyError, RLinfError, closest, did_you_mean
from rlinf.evaluation.config import EvaluationConfig
from rlinf.files import follow_latest
from rlinf.models.config import ModelConfig, TokenizerConfig
from rlinf.options import (
    PathText,
    from_mapping,
    option,
    override_of,
    override_text,
    plain_container,
    public_fields,
    unknown_key_message,
)
from rlinf.rollout.config import RolloutConfig
from rlinf.run_folder import LATEST, MODEL_FOLDER
from rlinf.tracking.tracker import TrackingConfig
from rlinf.wings import missing


@dataclass
class RunConfig:
    """Configuration of a run; `rlinf train` composes it from packaged groups, files and overrides."""

    experiment_name: str = option("default", "Name of the run folder, by default the experiment file's name.")
    seed: int = option(0, "Random seed of the run.", minimum=0, maximum=2**63 - 1)
    output_dir: PathText | None = option(None, "Run folder; null: outputs/<experiment_name>/<date>_<time>.")
    checkpoint: PathText | None = option(None, "Checkpoint or run folder to evaluate, export or collect with.")
    dataset: PathText | None = option(None, "New folder into which `rlinf collect` writes demonstrations.")
    resume: PathText | None = option(None, "Checkpoint or run folder to resume; auto: the newest, or a new run.")
    init_from: PathText | None = option(None, "Checkpoint or run folder with the initial weights of a new run.")
    plugins: list[PathText] = option([], "Python modules or .py files that register models, envs, algorithms.")
    model: ModelConfig = option(ModelConfig(), "The policy network.")
    tokenizer: TokenizerConfig = option(TokenizerConfig(), "Tokenizer and processors.")
    env: EnvConfig = option(EnvConfig(), "The simulator.")
    algorithm: AnyAlgorithmConfig = option(PPOConfig(), "The reinforcement learning algorithm.")
    rollout: RolloutConfig = option(RolloutConfig(), "How experience is collected.")
    trainer: TrainerConfig = option(TrainerConfig(), "Optimiser and training loop.")
    sft: SFTConfig = option(SFTConfig(), "Behaviour cloning before RL.")
    collect: CollectConfig = option(CollectConfig(), "Collection of demonstrations (`rlinf collect`).")
    evaluation: EvaluationConfig = option(EvaluationConfig(), "Evaluation on held-out episodes.")
    tracking: TrackingConfig = option(TrackingConfig(), "Metrics.")
    cluster: ClusterConfig = option(ClusterConfig(), "Processes and devices.")

    @property
    def evaluation_temperature(self) -> float:
        """Temperature of sampled actions in an evaluation."""
        temperature = self.evaluation.temperature
        return self.rollout.temperature if temperature is None else temperature


REGISTRIES = {"env": ENVS, "algorithm": ALGORITHMS}
"""Sections with a ``name`` that selects their dataclass from a registry."""

SOURCES = (
    "checkpoint", "resume", "init_from", "model.model_path", "model.lora_path", "sft.dataset", "algorithm.replay_from",
    "algorithm.offline_dataset", "evaluation.compare",
)  # fmt: skip
"""Keys of input folders, in which ``latest`` is resolved before a new run becomes the latest one."""


def section_class(section: str, name: str) -> type:
    """Return the configuration dataclass that ``section.name`` selects."""
    registry = REGISTRIES[section]
    if not isinstance(name, str):
        raise ConfigError(
            f"{section}.name is {override_text(name)}; expected one name. Set {section}={getattr(RunConfig(), section).name}"
        )
    if name not in registry:
        if (reason := missing(f"{section}s", name)) is not None:
            raise ConfigError(reason)
        fix = f"Set {section}={closest(name, registry) or '<name>'}, or plugins=[<its module>]"
        actual = f"{section}.name is {override_text(name)!r}, which is not registered"
        raise ConfigError(f"{actual}.{did_you_mean(name, registry)} {fix}")
    return registry.config_class(name)


def field_types(config: Any = None, path: str = "") -> dict[str, Any]:
    """Return the type of every dotted key, sections included, under the default env and algorithm."""
    config = RunConfig() if config is None else config
    names, hints = public_fields(type(config)), typing.get_type_hints(type(config))
    types = {path + name: hints[name] for name in names}
    for name in names:
        if dataclasses.is_dataclass(getattr(config, name)):
            types |= field_types(getattr(config, name), f"{path}{name}.")
    return types


def fields_meant(name: str) -> list[str]:
    """Return the dotted keys whose last part is ``name`` or an alias of it: ``steps`` means ``trainer.max_steps`` and ``sft.max_steps``."""
    keys = list(field_types())
    return [key for meant in (name, *SYNONYMS.get(name, ())) for key in keys if key.rpartition(".")[2] == meant]


def overrides_text(keys: Iterable[str], value: Any) -> str:
    """Return the overrides of the keys, joined by "or"."""
    types = field_types()
    return " or ".join(override_of(key, value, types.get(key, Any)) for key in keys)


def unknown_key_error(dotted: str, value: Any, known: Iterable[str], hints: Mapping[str, Any] | None = None) -> str:
    """Return the message for an unknown key; ``hints``: types of the ``known`` keys, by default for the default env and algorithm."""
    (section, _, name), known, types = dotted.rpartition("."), list(known), field_types()
    meant, is_similar = name, closest(name, known) is not None
    if not section and not fields_meant(name) and not is_similar:
        meant = closest(name, (key.rpartition(".")[2] for key in types)) or name
    elsewhere = [key for key in fields_meant(meant) if key.rpartition(".")[0] != section]
    if elsewhere and set(known).isdisjoint(SYNONYMS.get(name, ())):
        return f"There is no key '{dotted}'. Set {overrides_text(elsewhere, value)}"
    if hints is None:
        hints = {key: types.get(f"{section}.{key}" if section else key, Any) for key in known}
    message, override = unknown_key_message(dotted, value, known, hints), f"{name}={override_text(value)}"
    if section == "model" and not is_similar:
        message += f" A key of the model itself: model.init_config.{override} or model.override_config.{override}"
    return message


def _unknown_section_key(section: str, name: str, key: str, value: Any, cls: type) -> str:
    """Return the message for a key that an env or algorithm lacks, listing those that have it."""
    dotted, owners = f"{section}.{key}", []
    for other in REGISTRIES[section]:
        with suppress(MissingDependencyError):  # its simulator is not installed
            owners += [other] if key in public_fields(section_class(section, other)) else []
    if not owners:
        return unknown_key_error(dotted, value, public_fields(cls), typing.get_type_hints(cls))
    return f"{section}={name} has no key '{key}', which belongs to {', '.join(owners)}. Remove {dotted}, or set {section}={owners[0]}"


def chunks_needed(config: RunConfig) -> int:
    """Return the number of policy calls (chunks) in the longest episode."""
    longest = ENVS.get(config.env.name).longest_horizon(config.env)
    return math.ceil(longest / config.model.action_chunks_len)


def declared_policy(config: RunConfig) -> tuple[Any, Any] | None:
    """Return the policy's class and model configuration, from the checkpoint or the model section; None if not on this machine."""
    source = config.checkpoint or config.init_from
    if source is not None:
        checkpoint = resolve_checkpoint(source)
        for folder in (checkpoint / MODEL_FOLDER, checkpoint):  # adapters are applied to the model of the section
            if (folder / "config.json").is_file():
                return models.local_settings(config.model, folder)
    return models.local_settings(config.model)


def is_alone(config: RunConfig) -> bool:
    """Return whether RL starts from untrained weights, in which case an actor can train its own encoder instead."""
    with suppress(RLinfError, AttributeError):
        folders = [path for path in (config.resume, config.init_from, config.checkpoint) if path not in (None, "auto")]
        if folders:
            return read_saved_config(resolve_checkpoint(folders[0]))["model"].get("features") == "inputs"
        policy = declared_policy(config)
        is_new = config.sft.max_steps == 0 and config.model.model_path is None and config.model.url is None
        return is_new and policy is not None and policy[0].implements("make_encoder")
    return False


def expert_acts(config: RunConfig) -> bool:
    """Return whether `rlinf collect` runs the scripted expert, because no policy is specified."""
    return config.checkpoint is None and config.model.url is None and config.model.model_path is None


def cameras_read(config: RunConfig) -> list[str]:
    """Return as many of the env's default cameras as the model reads, or all of them for a dataset of the expert."""
    try:
        usual = config.env.default_cameras()
    except (ConfigError, MissingDependencyError):  # an unknown env, which `validate` reports
        return []
    if config.dataset is not None and expert_acts(config):
        return usual
    try:
        policy = declared_policy(config)
    except RLinfError:  # an unknown model or folder, which `validate` reports
        return usual
    count = None if policy is None else policy[0].num_cameras(policy[1])
    return usual[:count] if isinstance(count, int) else usual  # ``validate`` reports a wrong type


LEAST_IMAGE = 36
"""Minimum image side of `cnn` in pixels; smaller env images are enlarged."""


def size_by_env(config: RunConfig, num_cameras: int) -> None:
    """Replace null sizes of random weights with the env's; ``validate`` reports envs with unknown sizes."""
    model, env, sizes = config.model, config.env, config.model.init_config
    env_sizes: dict[str, Any] = {
        "state_dim": 1,
        "image_size": max(env.image_size, LEAST_IMAGE),
        "num_images_in_input": num_cameras or 1,
    }
    with suppress(ConfigError, MissingDependencyError):
        if model.action_token_len is None:
            model.action_token_len = ENVS.get(env.name).action_width(env)
        if sizes.get("state_dim", 0) is None:
            env_sizes["state_dim"] = ENVS.get(env.name).state_width(env) or 0
    model.action_token_len = model.action_token_len or type(model)().action_token_len
    sizes |= {key: value for key, value in env_sizes.items() if sizes.get(key, 0) is None}


def build_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Convert a composed configuration to a ``RunConfig``, and fill in nulls that follow from other values."""
    # The order matters: sizes come before cameras, which depend on the model; the algorithm then completes the remaining values.
    config, env = typed_config(mapping), mapping.get("env", {})
    if config.cluster.num_processes is None:
        place = launch_context(os.environ)
        config.cluster.num_processes = 1 if place is None else place.size
    size_by_env(config, len((env.get("cameras") if isinstance(env, Mapping) else None) or ()))
    if isinstance(env, Mapping) and env.get("cameras") is None:
        config.env.cameras = cameras_read(config)
    if config.rollout.num_chunks is None:
        with suppress(ConfigError, MissingDependencyError):
            config.rollout.num_chunks = chunks_needed(config)
    labels = config.sft.max_steps > 0 and config.sft.advantage_top_fraction is not None
    if labels and config.model.prompt_suffix is None:
        config.model.prompt_suffix = GOOD
    config.algorithm.complete(config.model, partial(is_alone, config))
    for dotted in SOURCES:
        *sections, key = dotted.split(".")
        owner = reduce(getattr, sections, config)
        path = getattr(owner, key, None)  # only some algorithms have these keys
        if path is not None and LATEST in Path(path).parts:
            setattr(owner, key, str(follow_latest(path)))
    return config


def typed_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Check the keys and types of a nested mapping or ``DictConfig``; missing keys and sections have their defaults."""
    values = dict(plain_container(mapping))
    # Plugins first: they register the names that the sections may use.
    values["plugins"] = load_plugins(from_mapping(RunConfig, {"plugins": values.get("plugins", [])}).plugins)
    for section in REGISTRIES:
        given, default = values.get(section), getattr(RunConfig(), section).name
        if isinstance(given, Mapping):
            name = given.get("name", default)
            cls = section_class(section, name)
            known = public_fields(cls)
            unknown, absent = set(given) - set(known), set(known) - set(given)
            of_default = set(given) >= set(public_fields(section_class(section, default)))
            if of_default and unknown and (absent or len(unknown) > 1):  # only the name was changed
                actual = f"{section}.name is '{name}', with the settings of {default}"
                raise ConfigError(f"{actual}; expected the group instead of the name. Set {section}={name}")
            for key, value in given.items():
                if key not in known:
                    raise ConfigError(_unknown_section_key(section, name, key, value, cls))
            values[section] = from_mapping(cls, given, section)
        elif section not in values:
            values[section] = section_class(section, default)()
    return from_mapping(RunConfig, values)
