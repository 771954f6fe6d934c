"""Overrides (``key=value``) as users type them: every value except a list, mapping, number or quoted text is text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError

from rlinf.errors import ConfigError

_ITEM = r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[^\s{0}](?:[^{0}]*[^\s{0}])?"""
"""Quoted text, or text up to the next of some characters."""


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides that have their quotes (``quoted``); raise ConfigError if a key, a list or a mapping follows no grammar."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise unreadable(error) from error


def values_of(words: Iterable[str]) -> dict[str, Any]:
    """Return key to value, of words as typed for a command without sweeps."""
    parsed = parse_overrides(quoted(word) for word in words)
    for item in parsed:
        if item.is_delete():
            raise ConfigError(f"'{item.input_line}' deletes a key; required: key=value. Leave the key out")
    return {item.key_or_group: item.value() for item in parsed}


def unreadable(error: OverrideParseException) -> ConfigError:
    """Say which override cannot be read, and how to quote it."""
    written = str(error.override).removeprefix("++")  # which ``normalize_overrides`` may have added
    key, _, value = written.partition("=")
    reason = str(error).strip().splitlines()[0]
    hint = "Quote a list for the shell, e.g. 'model.image_size=[224,224]', and a text twice"
    return ConfigError(
        f"The override '{written}' cannot be read: {reason}. {hint}: {shlex.quote(f'{key}={_text(value)}')}"
    )


def quoted(word: str, sweeps: bool = False, splits: bool = False, interpolates: bool = False) -> str:
    """Return an override with quotes around text, or around items of a list, that Hydra would change or could not read.

    Args:
        word: ``key=value``.
        sweeps: ``a,b`` is a sweep over two values, else text, if Hydra can read it.
        splits: It is one also if Hydra cannot: its items get quotes.
        interpolates: A whole ``${...}`` in the text is an interpolation; other ``${`` are escaped.
    """
    key, equals, value = word.partition("=")
    if not equals:
        return word
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        parsed = None
    if parsed is None and (value[:1] in ("[", "{") or (splits and "," in value)):
        ends = re.escape("[]{},:" if value[:1] == "{" else "[]{},")
        return f"{key}={re.sub(_ITEM.replace('{0}', ends), lambda item: _item(item, interpolates), value)}"
    if parsed is not None and parsed.is_sweep_override():
        is_text = not sweeps
    elif parsed is not None:  # Hydra strips text and takes backslashes out of it; casts stay
        changed = isinstance(parsed._value, str) and parsed._value != value
        is_text = changed and "${" not in value and not re.match(r"\w+\(", value)
    return f"{key}={_text(value, interpolates)}" if parsed is None or is_text else word


def _item(item: re.Match, interpolates: bool) -> str:
    return item[0] if item[1] else quoted(f"x={item[0]}", interpolates=interpolates)[2:]


def _text(value: str, interpolates: bool = False) -> str:
    """Return text in double quotes, as Hydra reads it back."""
    if interpolates and "${" in value:
        try:
            grammar_parser.parse(value)
        except GrammarParseError:
            value = value.replace("${", r"\${")
    return QuotedString(value, Quote.double).with_quotes()
