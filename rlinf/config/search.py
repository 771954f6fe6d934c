"""Hydra's search path: packaged groups, experiment files, users' folders, third-party packages.

A packaged group contains only the differences from its dataclass; Hydra sees the merged values. An experiment is a YAML file with
differences from the defaults (``experiment=name``, ``+experiment=name`` or ``--config-name name``). Its keys are global (as with
Hydra's ``# @package _global_``), and its ``experiment_name`` defaults to its file name.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf.config.names import GROUP, packaged_experiments
from rlinf.config.plugins import user_folders
from rlinf.config.schema import REGISTRIES, RunConfig, section_class
from rlinf.errors import ConfigError
from rlinf.files import decode_text
from rlinf.models import MODELS
from rlinf.models.config import ModelConfig
from rlinf.options import to_mapping
from rlinf.registry import installed_points
from rlinf.wings import hidden_options

PACKAGE = "pkg://rlinf.config"
REGISTERED = {"model": MODELS, **REGISTRIES}
"""Groups with a registry, whose names are also options."""


def experiment_folders() -> list[Path]:
    """Return the folders of experiment files: ``--config-dir``, its ``experiment/``, rlinf's."""
    return [*user_folders, *(folder / GROUP for folder in user_folders), packaged_experiments()]


def experiment_names() -> list[str]:
    """Return the names of all experiments."""
    names = {path.stem for folder in experiment_folders() if folder.is_dir() for path in folder.glob("*.yaml")}
    return sorted(names - hidden_options(GROUP))


def find_experiment(name: str) -> Path | None:
    """Return the file of an experiment, or None."""
    stem = name.removesuffix(".yaml")
    candidates = (folder / f"{stem}.yaml" for folder in experiment_folders())
    return next((path for path in candidates if path.is_file()), None)


class GroupSource(FileConfigSource):
    """Hydra source of the groups of a folder, merged into their dataclass's defaults unless they extend a YAML file of the same group."""

    @staticmethod
    def scheme() -> str:
        return "rlinf-groups"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        section, _, _ = config_path.rpartition("/")
        default, config = getattr(RunConfig(), section, None), result.config
        if not isinstance(config, DictConfig):
            required = f"keys of the {section or 'configuration'}"
            raise ConfigError(f"{self.path}/{config_path}.yaml contains a list; expected {required}.")
        if not dataclasses.is_dataclass(default) or _has_base(config, section):
            return result
        if section in REGISTRIES:
            default = section_class(section, config.get("name", default.name))()
        result.config = OmegaConf.merge(to_mapping(default), config)
        return result


def _has_base(config: DictConfig, section: str) -> bool:
    """Return whether the defaults list contains a YAML file of the same group, which already includes the dataclass's defaults."""
    items = config.get("defaults", [])
    bases = [item for item in items if isinstance(item, str) and item != "_self_"]
    return bool(bases) or any(
        key.startswith(f"/{section}@") for item in items if isinstance(item, DictConfig) for key in item
    )


class ExperimentSource(FileConfigSource):
    """Hydra source of one folder's YAML files as the group ``experiment``."""

    @staticmethod
    def scheme() -> str:
        return "rlinf-experiments"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.rpartition("/")
        return group == GROUP and super().is_config(name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path.strip("/") != GROUP:
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        names = sorted(path.stem for path in Path(self.path).glob("*.yaml"))
        return [] if results_filter == ObjectType.GROUP else names

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.rpartition("/")
        if group != GROUP:
            raise ConfigLoadError(f"Config not found: {config_path}")
        result = super().load_config(name)
        result.header["package"] = result.header.get("package") or "_global_"
        if isinstance(result.config, DictConfig) and "experiment_name" not in result.config:
            with open_dict(result.config):
                result.config.experiment_name = Path(name).stem
        return result


class RegisteredSource(ConfigSource):
    """Hydra source of registered names without a YAML file, with their dataclass's defaults."""

    @staticmethod
    def scheme() -> str:
        return "rlinf-registered"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *REGISTERED)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return group in REGISTERED and name in REGISTERED[group]

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group in REGISTERED:
            return [] if results_filter == ObjectType.GROUP else list(REGISTERED[group])
        return [] if results_filter == ObjectType.CONFIG else list(REGISTERED)

    def load_config(self, config_path: str) -> ConfigResult:
        section, _, name = config_path.removesuffix(".yaml").rpartition("/")
        cls, key = (section_class(section, name), "name") if section in REGISTRIES else (ModelConfig, "model_type")
        config = OmegaConf.create(to_mapping(cls()) | {key: name})
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header={"package": None})


class RLinfSearchPath(SearchPathPlugin):
    """Adds rlinf's folders, the experiments, and the packages of the entry-point group ``rlinf.configs``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != PACKAGE for element in search_path.get_path()):
            search_path.append("rlinf", PACKAGE)
        for element in search_path.get_path():
            if element.path == PACKAGE:
                element.path = f"{GroupSource.scheme()}://{Path(__file__).parent}"
        for folder in user_folders:
            search_path.append("user", f"{GroupSource.scheme()}://{folder}")
            search_path.append("user experiments", f"{ExperimentSource.scheme()}://{folder}")
        search_path.append("rlinf experiments", f"{ExperimentSource.scheme()}://{packaged_experiments()}")
        for point in installed_points().select(group="rlinf.configs"):
            search_path.append(point.name, f"pkg://{point.value}")
        # Last, so that a YAML with the same name takes precedence.
        search_path.append("registered", f"{RegisteredSource.scheme()}://names")


def choose_by(key: str, values: dict) -> Any:
    """Return the value for ``key``, in YAML ``${by:${env.suite},{libero_10:520,libero_90:400}}``."""
    if key not in values:
        raise ValueError(f"there is no value for {key}, only for {', '.join(values)}")
    return values[key]


def register(config_dir: str | None = None) -> None:
    """Register these sources and ``--config-dir`` with Hydra; raise ConfigError if a packaged file hides one of the user's files."""
    folder = None if config_dir is None else Path(config_dir).expanduser().resolve()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir is '{config_dir}', which is not a folder. Set --config-dir <folder>")
    for path in sorted(folder.rglob("*.yaml")) if folder is not None else ():
        if (Path(__file__).parent / path.relative_to(folder)).is_file():
            actual = f"{path} has the same name as a file of rlinf, which takes precedence"
            raise ConfigError(f"{actual}. Rename it, e.g. {path.with_name(f'my_{path.name}')}")
        decode_text(path.read_bytes(), path)  # raises if it is not UTF-8; Hydra's error would not name the file
    OmegaConf.register_new_resolver("by", choose_by, replace=True)
    OmegaConf.register_new_resolver("home", os.path.expanduser, replace=True)
    plugins = Plugins.instance()
    plugins.register(GroupSource)
    plugins.register(ExperimentSource)
    plugins.register(RegisteredSource)
    plugins.register(RLinfSearchPath)
    user_folders[:] = [] if folder is None else [folder]


def group_options(group: str) -> list[str]:
    """Return the names that ``group=`` accepts, including those of third-party packages and the user's folder."""
    GlobalHydra.instance().clear()
    with initialize_config_module("rlinf.config", version_base="1.3", job_name="rlinf"):
        names = GlobalHydra.instance().config_loader().get_group_options(group)
    return [name for name in names if name not in hidden_options(group)]


def is_complete(path: Path) -> bool:
    """Return whether a YAML file is a primary config, i.e. its defaults list includes ``train``."""
    defaults = OmegaConf.load(path).get("defaults", [])
    return any(item in ("train", "/train") for item in defaults)
