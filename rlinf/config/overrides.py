"""Parsing of overrides (``key=value``): every value except a list, mapping, number or quoted text is text."""

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError

from rlinf.errors import ConfigError
from rlinf.options import override_text

_ITEM = r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[^\s{0}](?:[^{0}]*[^\s{0}])?"""
"""Pattern of quoted text, or of text up to one of the characters ``{0}``."""


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides already quoted by ``quoted``; raise ConfigError for a syntax error."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise unreadable(error) from error


def values_of(arguments: Iterable[str]) -> dict[str, Any]:
    """Return a dict of the values of overrides, for a command without sweeps."""
    parsed = parse_overrides(quoted(argument) for argument in arguments)
    for item in parsed:
        if item.is_delete():
            raise ConfigError(f"'{item.input_line}' deletes a key; expected key=value. Remove the key")
    return {item.key_or_group: item.value() for item in parsed}


def with_overrides(mapping: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` overrides to a mapping in place and return it; raise ConfigError for a key nested under a plain value."""
    for key, value in values_of(overrides).items():
        put(mapping, key, value)
    return mapping


def put(mapping: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a nested value in place; raise ConfigError if a section of ``dotted`` is a plain value."""
    *sections, key = dotted.split(".")
    for depth, section in enumerate(sections, 1):
        if mapping.get(section) is None:
            mapping[section] = {}
        mapping = mapping[section]
        if not isinstance(mapping, dict):
            path = ".".join(sections[:depth])
            raise ConfigError(f"The key '{dotted}' is unknown: {path} is {override_text(mapping)}. Set {path}=<value>")
    mapping[key] = value


def unreadable(error: OverrideParseException) -> ConfigError:
    """Return the error for an override with a syntax error, showing how to quote it."""
    written = str(error.override).removeprefix("++")  # ``normalize_overrides`` may have added it
    key, _, value = written.partition("=")
    reason = str(error).strip().splitlines()[0]
    hint = "Quote a list for the shell, e.g. 'model.image_size=[224,224]', and a string twice"
    example = shlex.quote(f"{key}={_text(value)}")
    return ConfigError(f"The override '{written}' cannot be read: {reason}. {hint}: {example}")


def quoted(override: str, sweeps: bool = False, splits: bool = False, interpolates: bool = False) -> str:
    """Quote the text or list items of an override (``key=value``) if Hydra would change them or could not read them.

    Args:
        sweeps: If Hydra can parse ``a,b``, treat it as a sweep over two values; otherwise as text.
        splits: Treat ``a,b`` as a sweep even if Hydra cannot parse it, by quoting its items.
        interpolates: Treat a complete ``${...}`` in the text as an interpolation; escape any other ``${``.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return override
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        parsed = None
    if parsed is None and (value[:1] in ("[", "{") or (splits and "," in value)):
        ends = re.escape("[]{},:" if value[:1] == "{" else "[]{},")
        return f"{key}={re.sub(_ITEM.replace('{0}', ends), lambda item: _item(item, interpolates), value)}"
    if parsed is not None and parsed.is_sweep_override():
        is_text = not sweeps
    elif parsed is not None:
        # Hydra strips spaces and removes backslashes: quote such text, except for interpolations and casts.
        changed = isinstance(parsed._value, str) and parsed._value != value
        is_text = changed and "${" not in value and not re.match(r"\w+\(", value)
    return f"{key}={_text(value, interpolates)}" if parsed is None or is_text else override


def _item(item: re.Match, interpolates: bool) -> str:
    return item[0] if item[1] else quoted(f"x={item[0]}", interpolates=interpolates)[2:]


def _text(value: str, interpolates: bool = False) -> str:
    """Return text in double quotes, in Hydra's syntax."""
    if interpolates and "${" in value:
        try:
            grammar_parser.parse(value)
        except GrammarParseError:
            value = value.replace("${", r"\${")
    return QuotedString(value, Quote.double).with_quotes()
