"""Load a recipe: find its file, apply overrides, translate older keys, and build its ``RecipeConfig``."""

import dataclasses
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import rlinf
from rlinf.config.compose import reason_of
from rlinf.config.overrides import put, with_overrides
from rlinf.errors import ConfigError, did_you_mean
from rlinf.files import decode_text
from rlinf.options import from_mapping, override_text, plain_container, public_fields, section_class
from rlinf.recipes.checks import NOT_DONE, WITHOUT_EFFECT, check_recipe
from rlinf.recipes.config import RecipeConfig

SUFFIXES = (".toml", ".yaml")
"""Supported file suffixes; Hydra does not read ``.yml``."""
GRPO_KEYS = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
"""Keys that imply GRPO if ``train.train_policy.type`` is missing."""

ALIASES = {
    "train.enable_validation": "validation.enable",
    "train.validation_step": "validation.freq",
    "train.validation_batch_per_replica": "validation.batch_size",
}
"""Keys in published recipes, and their current names."""

OLDER = {
    "dataset_name": "train.train_policy.dataset.name",
    "dataset_subset": "train.train_policy.dataset.subset",
    "dataset_revision": "train.train_policy.dataset.revision",
    "dataset_train_split": "train.train_policy.dataset.split",
    "dataset_test_split": "validation.dataset.split",
    "dataset_test_size": "train.train_policy.dataset.test_size",
    "enable_logging": "logging.logger=[console,wandb]",
    "validation_freq": "validation.freq",
    "vision_asset_column_name": "custom.vision_asset_column_name in your dataset script",
    "fps": "custom.fps in your dataset script",
    "max_pixels": "custom.max_pixels in your dataset script",
}
"""Keys from older releases, in any section, and their current names."""


def packaged_recipes() -> Path:
    """Return the folder with the packaged recipes and scripts: ``examples/reasoning``, or ``rlinf/reasoning`` in a wheel."""
    package = Path(rlinf.__file__).parent
    installed = package / "reasoning"
    return installed if installed.is_dir() else package.parent / "examples" / "reasoning"


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in (packaged_recipes() / "configs").rglob("*.toml"))


def find_recipe(name: str) -> Path:
    """Return a recipe's path; raise ConfigError if it is missing, or neither TOML nor YAML.

    ``name`` is one of ``recipe_names()``, or a path relative to the working directory or, failing that, ``packaged_recipes()``.
    """
    folder, path = packaged_recipes(), Path(name).expanduser()
    files = [file for file in (path, folder / name) if file.is_file()]
    if not files and path.parent == Path(".") and path.suffix not in SUFFIXES:
        files = list((folder / "configs").rglob(f"{name}.toml"))
    if not files:
        raise ConfigError(
            f"--config is '{name}', which is not in . or {folder}.{did_you_mean(path.stem, recipe_names())}"
        )
    if files[0].suffix not in SUFFIXES:
        raise ConfigError(f"--config is '{name}'; expected a file with the suffix {' or '.join(SUFFIXES)}.")
    return files[0]


def read_recipe(path: Path) -> dict[str, Any]:
    """Parse a TOML file, or compose a YAML file and its defaults list with Hydra."""
    text = decode_text(path.read_bytes(), path)
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}.") from error
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(path.parent.absolute()), version_base="1.3", job_name="rlinf"):
            return plain_container(compose(path.name))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path} cannot be composed: {reason_of(error)}") from error


def load_recipe(name: str, overrides: Sequence[str] = ()) -> tuple[RecipeConfig, list[str]]:
    """Load and check a recipe with overrides; also return one notice per key that was renamed or has no effect.

    Raise ConfigError if a key is unknown or outdated, a value is rejected, or two keys contradict each other.
    """
    mapping = with_overrides(read_recipe(find_recipe(name)), overrides)
    notices = translate(mapping)
    reject_unknown(mapping)
    config = from_mapping(RecipeConfig, mapping)
    check_recipe(config)
    return config, notices


def translate(mapping: dict[str, Any]) -> list[str]:
    """Rename keys in ``ALIASES``, infer the method, remove keys without effect, and return one notice per change.

    Raise ConfigError for a value that only an older release accepted, or that is unsupported (``NOT_DONE``).
    """
    notices = []
    for old, new in ALIASES.items():
        if (section := _holder(mapping, old)) is not None:
            value = section.pop(_name(old))
            # If both are set, the new key takes precedence over its old name.
            if _holder(mapping, new) is None:
                put(mapping, new, value)
            notices.append(f"{old} is read as {new}")
    if (_holder(mapping, "train.resume") or {}).get("resume") == "None":
        raise ConfigError("train.resume is 'None'; expected false, true, auto or a folder. Set train.resume=false")
    method = (_holder(mapping, "train.train_policy") or {}).get("train_policy")
    if isinstance(method, dict) and "type" not in method:
        method["type"] = "grpo" if any(key in method for key in GRPO_KEYS) else "sft"
    return notices + _without_dead_keys(mapping)


def _without_dead_keys(mapping: dict[str, Any]) -> list[str]:
    """Remove keys without a field in ``RecipeConfig``, and return one notice per value that would have had an effect."""
    known = dict(keys_of(RecipeConfig))
    for key, (supported, reason) in NOT_DONE.items():
        if (section := _holder(mapping, key)) is not None:
            value = section[_name(key)]
            if value not in supported:
                raise ConfigError(
                    f"{key} is {override_text(value)}, but {reason}; expected "
                    f"{' or '.join(map(override_text, supported))}. Set {key}={override_text(supported[0])}"
                )
            if key not in {*known, *WITHOUT_EFFECT}:
                section.pop(_name(key))
    notices = []
    for key, (neutral, reason) in WITHOUT_EFFECT.items():
        if (section := _holder(mapping, key)) is not None:
            value = section.pop(_name(key))
            if value not in neutral:
                notices.append(f"{key}={override_text(value)} has no effect: {reason}")
    # RecipeConfig has no section fp8, so even an empty one would be reported as unknown.
    if (train := _holder(mapping, "train.fp8")) is not None and not train["fp8"]:
        del train["fp8"]
    return notices


def reject_unknown(mapping: Mapping[str, Any]) -> None:
    """Raise ConfigError for a renamed key, or a key in the wrong section."""
    known = {*dict(keys_of(RecipeConfig)), *NOT_DONE, *WITHOUT_EFFECT}
    for dotted in _leaves(mapping, RecipeConfig):
        name = _name(dotted)
        if dotted in known:
            continue
        if name in OLDER:
            raise ConfigError(f"The key '{dotted}' was renamed. Use {OLDER[name]}")
        places = sorted(path for path in known if _name(path) == name)
        if places and len(places) <= 3:
            raise ConfigError(f"There is no key '{dotted}'. Did you mean {' or '.join(places)}?")


def keys_of(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Yield the dotted path and field of every key in a dataclass, including nested sections."""
    hints = typing.get_type_hints(cls)
    for name, field in public_fields(cls).items():
        yield prefix + name, field
        section = section_class(hints[name])
        if section is not None:
            yield from keys_of(section, f"{prefix}{name}.")


def _leaves(mapping: Mapping[str, Any], cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every given key, except for keys nested under unknown or free-form keys."""
    hints = typing.get_type_hints(cls)
    for key, value in mapping.items():
        yield f"{prefix}{key}"
        section = section_class(hints[key]) if key in public_fields(cls) else None
        if section is not None and isinstance(value, Mapping):
            yield from _leaves(value, section, f"{prefix}{key}.")


def _name(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _holder(mapping: Any, dotted: str) -> dict[str, Any] | None:
    """Return the section that contains a key, or None if the key is not given."""
    *sections, key = dotted.split(".")
    for section in sections:
        mapping = mapping.get(section) if isinstance(mapping, dict) else None
    return mapping if isinstance(mapping, dict) and key in mapping else None
