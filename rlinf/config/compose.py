"""Composes a configuration from command-line overrides, with readable errors instead of Hydra's."""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from rlinf.config import search
from rlinf.config.overrides import parse_overrides, quoted, unreadable
from rlinf.config.plugins import load_plugins
from rlinf.config.presets import KEY as PRESET
from rlinf.config.presets import apply_preset
from rlinf.config.saved_code import check_code, leaves, literal
from rlinf.config.schema import (
    REGISTRIES,
    RunConfig,
    field_types,
    fields_meant,
    overrides_text,
    section_class,
    unknown_key_error,
)
from rlinf.envs import ENVS
from rlinf.errors import ConfigError, RLinfError, did_you_mean
from rlinf.files import Json
from rlinf.options import LITERAL, closest, from_mapping, override_text, public_fields, to_mapping

ROOT = "train"
"""Name of the packaged primary config."""

_KEY = re.compile(r"^(\+\+|\+|~)?([\w/.@:-]+)(=.*)?$", re.DOTALL)


def normalize_overrides(overrides: Iterable[str], sweeps: bool = False) -> list[str]:
    """Accept ``+experiment=x``, new keys in free-form sections, unquoted text, and, if ``sweeps`` is set, values ``a,b``."""
    result, overrides, types = [], list(overrides), field_types()
    any_keys = [key for key, hint in types.items() if dict in map(typing.get_origin, (hint, *typing.get_args(hint)))]
    free = tuple(f"{path}." for path in (*any_keys, *REGISTRIES))
    for position, override in enumerate(overrides):
        match = _KEY.match(override)
        if not match or (match[3] is None and match[1] != "~"):
            raise _no_override(
                override, next((text for text in overrides[position + 1 :] if "=" not in text), "<value>")
            )
        prefix, key, value = match[1] or "", match[2], match[3] or ""
        if key == search.GROUP and prefix in ("+", "++"):
            prefix = ""
        # Keys of ``env`` and ``algorithm`` depend on the chosen class, against which ``build_config`` checks them.
        if not prefix and (key.startswith(free) or key in any_keys):
            prefix = "++"
        many = sweeps or str not in (types.get(key), *typing.get_args(types.get(key)))
        result.append(quoted(f"{prefix}{key}{value}", many, sweeps, interpolates=True))
    return result


def _no_override(argument: str, following: str) -> ConfigError:
    """Return the error for an argument without ``=``, suggesting its probable meaning."""
    if keys := [argument] if argument == search.GROUP else fields_meant(argument):
        example = overrides_text(keys, following)
    elif Path(argument).expanduser().is_dir():
        example = (
            f"checkpoint={argument} to evaluate, export or collect with it, resume={argument} to continue training"
        )
    else:
        example = f"e.g. experiment={closest(argument, search.experiment_names()) or 'quickstart'}"
    return ConfigError(f"'{argument}' is not an override; expected key=value. Set {example}")


def compose_config(overrides: Iterable[str] = (), config_dir: str | None = None, root: str = ROOT) -> DictConfig:
    """Compose groups, experiments (including those in ``config_dir``) and overrides on the primary config ``root``, without ``hydra``."""
    return compose_normalized(normalize_overrides(overrides), config_dir, root)


def compose_normalized(overrides: list[str], config_dir: str | None = None, root: str = ROOT) -> DictConfig:
    """Compose like ``compose_config``, but from normalised overrides."""
    search.register(config_dir)
    try:
        _load_named_plugins(overrides)
        return fitted(_compose(overrides, root), overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise explain(error, overrides, root) from error


def _load_named_plugins(overrides: list[str]) -> None:
    """Import the plugins given by overrides or their experiment, because Hydra needs the names that they register."""
    typed = {item.key_or_group: item.value() for item in parse_overrides(overrides) if not item.is_sweep_override()}
    for key in (search.GROUP, *to_mapping(RunConfig())):
        names = typed.get(key, "") if key == search.GROUP or dataclasses.is_dataclass(getattr(RunConfig(), key)) else ""
        if not all(isinstance(name, str) for name in (names if isinstance(names, list) else [names])):
            inner = "" if key == search.GROUP else f", or one of its keys: {key}.<key>=<value>"
            raise ConfigError(f"{key} is {override_text(typed[key])}; expected a name. Set {key}=<name>{inner}")
    path, plugins = search.find_experiment(str(typed.get(search.GROUP))), typed.get("plugins", [])
    if "plugins" not in typed and path is not None:
        with suppress(yaml.YAMLError):  # Hydra reads the file later, and reports the error
            experiment = OmegaConf.load(path)
            if OmegaConf.is_list(experiment):  # Hydra ignores a list silently
                raise ConfigError(f"{path} contains a list; expected keys of the configuration, such as trainer.")
            plugins = experiment.get("plugins")
    load_plugins(from_mapping(RunConfig, {"plugins": plugins or []}).plugins)


def fitted(composed: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """Remove experiment keys that the chosen env or algorithm lacks, then apply ``algorithm.preset`` to unset keys.

    If the env or algorithm is typed, they are printed. Otherwise only keys are removed that the experiment inherits, for another env
    or algorithm, from an experiment that it extends; other unknown keys remain, and are rejected.
    """
    typed = {item.key_or_group: item.value() for item in parse_overrides(overrides)}
    path = search.find_experiment(str(typed.get(search.GROUP)))
    given = {} if path is None else OmegaConf.to_container(OmegaConf.load(path))
    for section, registry in REGISTRIES.items() if typed.get(search.GROUP) else ():
        is_typed = isinstance(typed.get(section), str)
        keys = {*composed[section]} if is_typed else _inherited_keys(path, section) - {*(given.get(section) or {})}
        if not keys:
            continue
        name = composed[section].name
        known = public_fields(section_class(section, name))
        lacks = [key for key in composed[section] if key in keys - {*known} and f"{section}.{key}" not in typed]
        if not is_typed:
            classes = [registry.config_class(other) for other in registry] if lacks else []
            lacks = [key for key in lacks if any(key in public_fields(cls) for cls in classes)]
        with open_dict(composed):
            for key in lacks:
                del composed[section][key]
        if lacks and is_typed:
            reason = f"because {section}={name} has no such keys"
            print(f"removed from the experiment, {reason}: {', '.join(lacks)}", file=sys.stderr)
    sections = (*given.items(), *typed.items())
    return apply_preset(composed, {key for name, value in sections for key, _ in leaves(value, name)})


def _inherited_keys(path: Path | None, section: str) -> set[str]:
    """Return the keys of a section that are set by the experiments that an experiment extends."""
    keys: set[str] = set()
    for item in [] if path is None else OmegaConf.load(path).get("defaults", []):
        if isinstance(item, str) and (base := search.find_experiment(item)):
            keys |= {*(OmegaConf.load(base).get(section) or {}), *_inherited_keys(base, section)}
    return keys


def _compose(overrides: list[str], root: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("rlinf.config", version_base="1.3", job_name="rlinf"):
        return compose(root, overrides=overrides)


def explain(error: Exception, overrides: list[str], root: str = ROOT) -> ConfigError:
    """Convert an error of Hydra, OmegaConf or the YAML reader to a one-line message; ``overrides`` are normalised."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return ConfigError(no_such_option(group, name, error.options or []))
    if isinstance(error, OverrideParseException):
        return unreadable(error)
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"A YAML file cannot be read: {reason_of(error)}")
    ambiguous = re.match(r"Ambiguous value for argument '(?:\+\+)?([^=]+)=(.*)'", str(error))
    if ambiguous:
        key, value = ambiguous.groups()
        sweep = f"Run rlinf train -m {key}={value} for one run per value"
        fix = f"set '{key}=[{value}]' for a list, or '{key}=\"{value}\"' for a string"
        return ConfigError(f"{key}={value} contains several values. {sweep}, or {fix}")
    if match := re.match(r"Error merging override (?:\+\+)?([^=]+)=(.*)", str(error)):
        key, value = match.groups()
        return ConfigError(f"{key} is {value}; expected a section. Set one of its keys: {key}.<key>=<value>")
    match = re.search(r"Could not (?:override|append to config|delete from config)[^']*'?([\w./@-]+)'?", str(error))
    if match:
        override = next((item for item in parse_overrides(overrides) if item.key_or_group == match[1]), None)
        if override is not None and (message := _unknown_key(override, root)):
            return ConfigError(message)
    return ConfigError(reason_of(error))


def no_such_option(group: str, name: str, options: Iterable[str]) -> str:
    """Return the message for an unknown option of a group, suggesting a similar one or how to list them."""
    if group == "env" and (env := _env_of_task(name, options)):
        hint = f" It is a task of {env}. Set env={env} 'env.tasks=[{name}]'"
    elif close := closest(name, options):
        hint = f" Did you mean '{close}'? Set {group}={close}"
    elif group == search.GROUP:
        hint = " `rlinf models` lists them; your own files need --config-dir <folder>"
    else:
        hint = did_you_mean(name, options)
        if group in ("model", *REGISTRIES):
            hint += f" Set plugins=[<file or module>] if one of yours registers this {group}"
    return f"There is no {group or 'config'} '{name}'.{hint}"


def _env_of_task(task: str, envs: Iterable[str]) -> str | None:
    """Return the first installed env that has such a task under its default settings."""
    for name in envs:
        with suppress(RLinfError):  # not installed, or not the name of an env but of a group
            if task in ENVS.get(name).all_task_names(ENVS.get(name).config_class()):
                return name
    return None


def _unknown_key(override: Override, root: str) -> str | None:
    """Explain an override of a key that does not exist, by walking the configuration without it."""
    node: Any = _compose([], root)
    *sections, name = override.key_or_group.split(".")
    for depth, section in enumerate(sections):
        if not isinstance(node, DictConfig):
            return f"'{'.'.join(sections[:depth])}' is a value, so it has no key '{section}'."
        if section not in node:
            close = closest(section, map(str, node))
            keys = [".".join([*sections[:depth], close, *sections[depth + 1 :], name])] if close else fields_meant(name)
            fix = f" Set {overrides_text(keys, override.value())}" if keys else did_you_mean(section, map(str, node))
            return f"There is no key '{'.'.join(sections[: depth + 1])}'.{fix}"
        node = node[section]
    if not isinstance(node, DictConfig):
        return f"'{'.'.join(sections)}' is a value, so it has no key '{name}'."
    known = [*map(str, node), *([] if sections else [search.GROUP])]
    return None if name in node else unknown_key_error(override.key_or_group, override.value(), known)


def reason_of(error: BaseException) -> str:
    """Return the message of a Hydra, OmegaConf or YAML error on one line, with file and line number if known."""
    inner = error
    while not str(inner).strip() and (inner.__cause__ or inner.__context__) is not None:
        inner = inner.__cause__ or inner.__context__
    mark = getattr(inner, "problem_mark", None)
    if mark is not None:
        hint = " Indent with spaces" if "'\\t'" in inner.problem else ""
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {inner.problem}.{hint}"
    hint = f". {LITERAL}" if isinstance(inner, (GrammarParseError, InterpolationResolutionError)) else ""
    return (str(inner).strip().splitlines() or [type(inner).__name__])[0] + hint


def compose_on_saved(
    saved: Json,
    overrides: Iterable[str],
    config_dir: str | None = None,
    folder: str | Path = "the checkpoint",
) -> DictConfig:
    """Apply overrides to the configuration of an earlier run.

    Group choices (``env=tabletop``) replace a section, and values replace individual keys. ``output_dir`` and the earlier run's
    keys for checkpoints, evaluations, servers and datasets are reset. Raise CheckpointError for keys that load code, unless they
    are typed again. ``folder`` is the location of ``saved``, used in messages.
    """
    parsed = parse_overrides(normalize_overrides(overrides))
    parsed = [item for item in parsed if not item.key_or_group.startswith("hydra.")]
    sections = {name for name, hint in typing.get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)}
    for override in parsed:
        key, given = override.key_or_group, f"'{override.input_line}'"
        if override.is_sweep_override():
            raise ConfigError(f"{given} requests a sweep; only `rlinf train -m` and `rlinf sft -m` support sweeps.")
        if key == search.GROUP:
            fix = "Remove it, and override single keys or complete groups, e.g. env=tabletop"
            raise ConfigError(f"{given} cannot be applied to a checkpoint, which has its own configuration. {fix}")
        if override.is_delete():
            raise ConfigError(f"{given}: a checkpoint's configuration has a value for every key. Set {key}=<value>")
        if key.partition(".")[0] not in public_fields(RunConfig):
            raise ConfigError(unknown_key_error(key, override.value(), public_fields(RunConfig)))
    groups = [item for item in parsed if item.key_or_group in sections and isinstance(item.value(), str)]
    # A mapping is merged into the saved one, so only its leaves are considered typed.
    typed = {key for override in parsed for key, _ in leaves(override.value(), override.key_or_group)}
    if isinstance(plugins := saved.get("plugins"), list):  # an export contains its model's plug-in file
        paths = [(Path(folder) / str(name), name) for name in plugins]
        saved = {**saved, "plugins": [str(path) if path.is_file() else name for path, name in paths]}
    check_code(saved, typed, folder)
    code = [item for item in parsed if item.key_or_group == "plugins"]
    fresh = compose_config([item.input_line for item in (*groups, *code)], config_dir)
    config = OmegaConf.create(literal(saved))
    config.resume = config.init_from = config.checkpoint = config.dataset = None
    for key in ("evaluation.compare", "model.url", "model.api_key_env"):
        OmegaConf.update(config, key, None, force_add=True)
    for override in groups:
        config[override.key_or_group] = fresh[override.key_or_group]
    for override in parsed:
        if override not in groups:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    if PRESET in typed:
        apply_preset(config, typed)
    name = str(config.get("experiment_name", "default"))
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"experiment_name is '{name}', which leads out of outputs. Set experiment_name=<a name>")
    if "output_dir" not in typed:
        config.output_dir = f"outputs/{name}/evaluate_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return config
