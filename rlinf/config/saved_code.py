"""Detects saved configuration values that would run code. They must be typed again, so that a checkpoint remains pure data."""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.options import override_text, to_mapping

SECTIONS = ("env", "model")
"""Sections whose values may be imported as code: gymnasium's ``env.id``, fields of third-party envs or models."""

NAMES = ("env.tasks", "env.cameras", "env.instruction")
"""Text values in these sections that are never imported."""

IMPORTED = ("env.id",)
"""Keys whose text gymnasium imports up to a colon."""

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def check_code(saved: Mapping[str, Any], typed: Collection[str], folder: str | Path) -> None:
    """Raise CheckpointError for values that would run code, unless their keys or groups are in ``typed`` (e.g. ``{"plugins"}``)."""
    names = tuple(f"{name}." for name in typed)
    untyped = [(key, value) for key, value in code_values(saved) if not f"{key}.".startswith(names)]
    if untyped:
        reason = f"The configuration in {folder} names Python code to run, and a checkpoint runs none by itself"
        raise CheckpointError(f"{reason}. Read that code first. Set {_overrides(untyped)}")


def code_overrides(config: Mapping[str, Any]) -> str:
    """Return the overrides that load code (``plugins``, ...) and must be repeated on the command line; usually none."""
    return _overrides(code_values(config))


def code_values(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values that load code: plugins, ``trust_remote_code``, ``module:attribute``."""
    if saved.get("plugins"):
        yield "plugins", saved["plugins"]
    model = saved.get("model")
    if isinstance(model, Mapping) and model.get("trust_remote_code"):
        yield "model.trust_remote_code", model["trust_remote_code"]
    for section in SECTIONS:
        for key, value in leaves(saved.get(section), section):
            texts = [text for _, text in leaves(value, "") if isinstance(text, str)]
            if key not in NAMES and any(_CODE.fullmatch(text) or (key in IMPORTED and ":" in text) for text in texts):
                yield key, value


def literal(value: Any) -> Any:
    """Escape ``${`` in all strings in ``value``, so that OmegaConf does not interpolate them."""
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: rf"{match[1] * 2}\${{", value)
    if isinstance(value, Mapping):
        return {key: literal(item) for key, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list) else value


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of all non-mappings; if ``path`` is empty, also of list items."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else "")
    elif isinstance(value, list) and not path:
        for item in value:
            yield from leaves(item, "")
    else:
        yield path, value


def env_overrides(config: Any) -> str:
    """Return the overrides that reproduce the env of a ``RunConfig`` in a different command, quoted for a shell."""
    # A policy exported without its env's code (``external``) records the env that it was trained on.
    if getattr(config.env, "trained_on", None):
        return config.env.trained_on
    defaults = to_mapping(type(config.env)())
    changed = {name: value for name, value in to_mapping(config.env).items() if defaults.get(name) != value}
    changed["cameras"] = list(config.env.cameras)
    keys = [f"env.{name}={typed(value)}" for name, value in changed.items() if name != "name"]
    plugins = [f"plugins={typed(config.plugins)}"] if config.plugins else []
    return shlex.join([*plugins, f"env={config.env.name}", *keys])


def typed(value: Any) -> str:
    """Return a value in Hydra's command-line syntax."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:@-]+", value):
        return json.dumps(value, ensure_ascii=False)
    return override_text(value)


def _overrides(values: Iterable[tuple[str, Any]]) -> str:
    texts = [f"{key}={override_text(value)}" for key, value in values]
    return " ".join(text if re.fullmatch(r"[\w.=:/-]+", text) else f"'{text}'" for text in texts)
