"""Values of a saved configuration that would run code: a checkpoint stays data until the user types these values again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError
from rlinf.options import override_text, to_mapping

SECTIONS = ("env", "model")
"""Sections whose values may be names that are imported: ``env.id`` of gymnasium, fields of an env or model of others."""

NAMES = ("env.tasks", "env.cameras", "env.instruction")
"""Texts in them that are never imported."""

IMPORTED = ("env.id",)
"""Keys whose text before a colon gymnasium imports as a module."""

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def check_code(saved: Mapping[str, Any], typed: Collection[str], folder: str | Path) -> None:
    """Raise CheckpointError for values that would make Python import or trust code, with everything that has to be typed.

    The user has replaced the values of the keys and groups ``typed``, e.g. ``{"plugins", "env"}``. ``folder`` is for the message.
    """
    names = tuple(f"{name}." for name in typed)
    found = [(key, value) for key, value in code_values(saved) if not f"{key}.".startswith(names)]
    if found:
        reason = f"The configuration in {folder} names Python code to run, and a checkpoint runs none by itself"
        raise CheckpointError(f"{reason}. Read that code first. Set {_overrides(found)}")


def code_overrides(config: Mapping[str, Any]) -> str:
    """Return what has to be typed again wherever a checkpoint of a run with this configuration is used; mostly nothing."""
    return _overrides(code_values(config))


def code_values(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all that names code: plugins, trust in a folder's code, ``module:attribute``."""
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
    """Return ``value`` such that OmegaConf reads ``${...}`` in its texts as these characters."""
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: rf"{match[1] * 2}\${{", value)
    if isinstance(value, Mapping):
        return {key: literal(item) for key, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list) else value


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of everything that is not a mapping; below ``""`` also the items of lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else "")
    elif isinstance(value, list) and not path:
        for item in value:
            yield from leaves(item, "")
    else:
        yield path, value


def env_overrides(config: Any) -> str:
    """Return the overrides that give a different command the env of a ``RunConfig``, quoted for a shell.

    Of a policy that was exported without the code of its env (``external``), the env that it was trained on.
    """
    if getattr(config.env, "trained_on", None):
        return config.env.trained_on
    defaults = to_mapping(type(config.env)())
    changed = {name: value for name, value in to_mapping(config.env).items() if defaults.get(name) != value}
    changed["cameras"] = list(config.env.cameras)
    words = [f"env.{name}={typed(value)}" for name, value in changed.items() if name != "name"]
    plugins = [f"plugins={typed(config.plugins)}"] if config.plugins else []
    return shlex.join([*plugins, f"env={config.env.name}", *words])


def typed(value: Any) -> str:
    """Return a value as Hydra reads it from the command line, mappings and texts with spaces or commas included."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:@-]+", value):
        return json.dumps(value, ensure_ascii=False)
    return override_text(value)


def _overrides(values: Iterable[tuple[str, Any]]) -> str:
    texts = [f"{key}={override_text(value)}" for key, value in values]
    return " ".join(text if re.fullmatch(r"[\w.=:/-]+", text) else f"'{text}'" for text in texts)
