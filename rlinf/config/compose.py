"""From command-line overrides to a composed configuration, with Hydra's errors in our words."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.config import search
from rlinf.config.options import closest, unknown_key_message
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError, did_you_mean

ROOT = "train"
"""Name of the packaged primary config."""

_KEY = re.compile(r"^(\+\+|\+|~)?([\w/.@:-]+)(=.*)?$", re.DOTALL)


def normalize_overrides(overrides: Iterable[str]) -> list[str]:
    """Accept what users naturally type: ``+experiment=x`` like ``experiment=x``, and new keys in free-form sections.

    Args:
        overrides: Command-line overrides in Hydra's grammar.

    Raises:
        ConfigError: One is no ``key=value`` at all.
    """
    result = []
    for override in overrides:
        match = _KEY.match(override)
        if not match or (match[3] is None and match[1] != "~"):
            hint = closest(override, search.experiment_names())
            example = f"experiment={hint}" if hint else "trainer.max_steps=10"
            raise ConfigError(f"'{override}' is no override; required: key=value. Type e.g. {example}")
        prefix, key, value = match[1] or "", match[2], match[3] or ""
        if key == search.GROUP and prefix in ("+", "++"):
            prefix = ""
        if not prefix and any(key.startswith(f"{path}.") for path in free_form_sections()):
            prefix = "++"
        result.append(f"{prefix}{key}{value}")
    return result


def free_form_sections(cls: type = RunConfig, path: str = "") -> list[str]:
    """Return the dotted paths of the sections that take any key (``model.init_config``)."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        dotted = f"{path}.{name}" if path else name
        if dataclasses.is_dataclass(hint):
            found += free_form_sections(hint, dotted)
        elif typing.get_origin(hint) is dict:
            found.append(dotted)
    return found


def compose_config(overrides: Iterable[str] = (), config_dir: str | None = None, root: str = ROOT) -> DictConfig:
    """Compose the packaged groups, experiments and overrides into one configuration (without the node ``hydra``).

    Args:
        overrides: As on the command line, e.g. ``["experiment=quickstart", "trainer.max_steps=3"]``.
        config_dir: Folder of the user's own groups and experiments.
        root: Primary config.

    Raises:
        ConfigError: An override is no override, or names a key or a group option that does not exist.
    """
    overrides = normalize_overrides(overrides)
    search.register(config_dir)
    try:
        return _compose(overrides, root)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise explain(error, overrides, root) from error


def _compose(overrides: list[str], root: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("rlinf.config", version_base="1.3", job_name="rlinf"):
        return compose(root, overrides=overrides)


def explain(error: Exception, overrides: list[str], root: str = ROOT) -> ConfigError:
    """Turn an error of the composition into one sentence with the correction.

    Args:
        error: What Hydra, OmegaConf or the YAML reader raised.
        overrides: Normalised overrides of the command line.
        root: Primary config.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or []
        close = closest(name, options)
        hint = f" Type {group}={close}" if close else ""
        where = (
            f" (experiments lie in {', '.join(map(str, search.experiment_folders()))})" if group == search.GROUP else ""
        )
        return ConfigError(f"There is no {group or 'config'} '{name}'.{did_you_mean(name, options)}{where}{hint}")
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"The override '{error.override}' cannot be read: {first_line(error)}. Quote it for the shell if it holds "
            "brackets, commas or spaces, e.g. 'model.image_size=[224,224]'"
        )
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"A YAML file cannot be read: {' '.join(str(error).split())}")
    ambiguous = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", str(error))
    if ambiguous:
        key, value = ambiguous.groups()
        return ConfigError(
            f"{key}={value} holds several values. For one run per value type rlinf train -m {key}={value}; for a list type "
            f"'{key}=[{value}]'"
        )
    match = re.search(r"Could not (?:override|append to config|delete from config)[^']*'?([\w./@-]+)'?", str(error))
    if match:
        override = next((item for item in parse_overrides(overrides) if item.key_or_group == match[1]), None)
        if override is not None:
            message = _unknown_key(override, root)
            if message:
                return ConfigError(message)
    return ConfigError(first_line(error))


def _unknown_key(override: Override, root: str) -> str | None:
    """Explain an override of a key that does not exist, by walking the configuration without it."""
    node: Any = _compose([], root)
    parts = override.key_or_group.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = [str(key) for key in node] if isinstance(node, DictConfig) else []
            path = ".".join(parts[: depth + 1])
            if not known:
                return f"'{'.'.join(parts[:depth])}' is a value, so there is no key '{path}' in it."
            rest = ".".join(parts[depth + 1 :])
            message = unknown_key_message(path, override.value(), known if depth else [*known, search.GROUP])
            return re.sub(r"(Type [\w.]+)=", rf"\1.{rest}=", message) if rest else message
        node = node[part]
    return None


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar."""
    return OverridesParser.create().parse_overrides(list(overrides))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def compose_on_saved(saved: dict[str, Any], overrides: Iterable[str], config_dir: str | None = None) -> DictConfig:
    """Lay overrides over the configuration of an earlier run: what is not overridden stays as it was.

    Group choices (``env=tabletop``) replace the whole section, values replace single keys. ``output_dir``, ``resume`` and
    ``init_from`` belong to the earlier run and are not taken over.

    Args:
        saved: Resolved configuration of the earlier run.
        overrides: As on the command line.
        config_dir: Folder of the user's own groups and experiments.
    """
    parsed = [
        item for item in parse_overrides(normalize_overrides(overrides)) if not item.key_or_group.startswith("hydra.")
    ]
    sections = {name for name, hint in typing.get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)}
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"'{override.input_line}' asks for a sweep; only `rlinf train -m` and `rlinf sft -m` do sweeps."
            )
        if override.key_or_group == search.GROUP:
            raise ConfigError(
                f"{override.input_line} cannot be laid over the configuration of a checkpoint, which has one already. "
                "Leave it out, and override single keys or whole groups, e.g. env=tabletop"
            )
    groups = [item for item in parsed if item.key_or_group in sections and isinstance(item.value(), str)]
    fresh = compose_config([item.input_line for item in groups], config_dir)
    config = OmegaConf.create(saved)
    config.resume = config.init_from = None
    for override in groups:
        config[override.key_or_group] = fresh[override.key_or_group]
    for override in parsed:
        if override not in groups:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    if all(override.key_or_group != "output_dir" for override in parsed):
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        config.output_dir = f"outputs/{config.get('experiment_name', 'default')}/evaluate_{stamp}"
    return config
