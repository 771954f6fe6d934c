"""Documented configuration fields, and strict conversion of mappings to configuration dataclasses."""

import copy
import dataclasses
import math
import os
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from operator import attrgetter
from typing import Annotated, Any

from rlinf.errors import ConfigError, RLinfError, closest, did_you_mean, reject

LARGEST = 2**32
"""Maximum value of an option without ``maximum``. Larger values, including durations in seconds, would overflow somewhere."""

PathText = Annotated[str, "path"]
"""Type of options for files or folders. A leading ``~`` is expanded to the home folder."""
LITERAL = r"For the text ${...} itself, write '\${...}'"


def option(
    default: Any,
    help: str,
    choices: tuple | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a documented configuration field.

    Args:
        default: Default value. Lists, dicts and dataclasses are copied for each instance.
        help: One short statement for the configuration reference, including the unit.
        choices: Accepted values.
        minimum, maximum: Inclusive bounds. null is accepted if the type allows it.
        below: Exclusive upper bound.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "below": below}
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def public_fields(cls: type) -> dict[str, dataclasses.Field]:
    """Return a configuration dataclass's public fields by name, in order of declaration."""
    return {field.name: field for field in dataclasses.fields(cls) if not field.name.startswith("_")}


def from_mapping(cls: type, mapping: Mapping[str, Any], path: str = "") -> Any:
    """Build a configuration dataclass, whose fields are ``option``s, from a plain mapping or ``DictConfig``.

    Missing keys get the dataclass's defaults. Integers are accepted as floats; no other values are converted. Raise ConfigError
    if a key is unknown, or if a value has the wrong type, is not among the choices or is out of bounds. ``path`` is the dotted
    path of ``mapping`` in the configuration, for messages.
    """
    mapping = plain_container(mapping)
    if not isinstance(mapping, Mapping):
        problem, keys = f"{path or 'The configuration'} is {override_text(mapping)!r}", ", ".join(public_fields(cls))
        raise ConfigError(f"{problem}; expected a section with the keys {keys}.")
    known, hints, values = public_fields(cls), typing.get_type_hints(cls, include_extras=True), {}
    for key, value in mapping.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ConfigError(unknown_key_message(dotted, value, known, hints))
        values[key] = _convert(value, hints[key], dotted, known[key])
    return cls(**values)


def check_options(config: Any) -> None:
    """Raise ConfigError if a dataclass has a field with a value that its ``option`` does not accept."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name, field in public_fields(type(config)).items():
        _convert(getattr(config, name), hints[name], name, field)


def to_mapping(config: Any) -> dict[str, Any]:
    """Convert a configuration dataclass to nested plain dictionaries that can be written as YAML."""
    return {name: _plain(getattr(config, name)) for name in public_fields(type(config))}


def check_arguments(arguments: typing.Iterable[str], keys: typing.Iterable[str]) -> None:
    """Raise ConfigError if an argument is not of the form ``key=value``. ``keys`` are the command's keys."""
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"'{argument}' is not of the form key=value; keys are {', '.join(keys)}.")


def unknown_key_message(
    dotted: str, value: Any, known: typing.Iterable[str], hints: Mapping[str, Any] | None = None
) -> str:
    """Return the error message for an unknown key, with the section's known keys and a suggested override.

    ``hints`` are the types of the known keys, used to write list values in brackets.
    """
    section, dot, key = dotted.rpartition(".")
    names = list(known)
    close = closest(key, names)
    fix = f" Set {override_of(section + dot + close, value, (hints or {}).get(close, Any))}" if close else ""
    return f"There is no key '{dotted}'.{did_you_mean(key, names)}{fix}"


def override_of(dotted: str, value: Any, hint: Any = Any) -> str:
    """Format ``key=value`` for the command line. A single item for a list option is put in brackets and quoted."""
    if not _match(value, hint)[0] and _match([value], hint)[0]:
        return f"'{dotted}={override_text([value])}'"
    return f"{dotted}={override_text(value)}"


def require_values(config: object, actual: str, *rules: tuple[str, object, str] | tuple[str, object, str, str]) -> None:
    """Raise ConfigError for the first ``(key, wanted value, requirement[, alternative fix])`` whose key has a different value."""
    for key, wanted, requirement, *alternative in rules:
        if (value := attrgetter(key)(config)) != wanted:
            fix = ", or ".join([f"{key}={override_text(wanted)}", *alternative])
            reject(f"{actual} with {key}={override_text(value)}", requirement, fix)


def override_text(value: Any) -> str:
    """Format a value for the command line, such as ``null``, ``true`` or ``[1,2]``; a section becomes ``...``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(override_text(item) for item in value)}]"
    if isinstance(value, dict) or dataclasses.is_dataclass(value):
        return "..." if value else "{}"
    return str(value)


def type_name(hint: Any) -> str:
    """Return a type's name in the configuration reference, such as ``int``, ``list of str`` or ``float or null``."""
    if hint is type(None):
        return "null"
    if hint is Any:
        return "anything"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(type_name(item) for item in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict or hint is dict:
        return "section of any keys"
    return "str" if hint is PathText else hint.__name__


@contextmanager
def fixed_by_settings(section: str, **renamed: str | None) -> Iterator[None]:
    """Replace "Pass argument=value" with "Set key=value" in library errors raised inside the block.

    ``section`` contains the keys. ``renamed`` maps arguments to keys with different names, or to None without a key.
    """
    try:
        yield
    except RLinfError as error:
        named = ((renamed.get(name, name), value) for name, value in error.fix.items())
        overrides = [f"{section}.{name}={override_text(value)}" for name, value in named if name is not None]
        if overrides:
            error.args, error.fix = (f"{error.args[0]} Set {' or '.join(overrides)}",), {}
        raise


def plain_container(mapping: Any) -> Any:
    """Convert an OmegaConf container to plain Python values; return anything else unchanged.

    Raise ConfigError if an interpolation (``${...}``) cannot be resolved or a value is missing (``???``).
    """
    if not type(mapping).__module__.startswith("omegaconf"):
        return mapping
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(mapping, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "a value"
        raise ConfigError(
            f"{key} cannot be resolved: {str(error).splitlines()[0]}. Set {key}=<value>. {LITERAL}"
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _convert(value: Any, hint: Any, dotted: str, field: dataclasses.Field) -> Any:
    """Convert a value to its declared type, checking choices and bounds."""
    section = section_class(hint)
    if section is not None and (value is not None or section is hint):
        return value if isinstance(value, section) else from_mapping(section, value, dotted)
    accepted, converted = _match(value, hint)
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    example = f"{dotted}={override_text(default)}"
    if not accepted:
        if _match([value], hint)[0]:
            example = override_of(dotted, value, hint)
        # The command line has parsed text such as 1e3 or 2026-01-01 as a number or date; suggest quoting it.
        elif isinstance(value, (int, float, date, time)) and _match("", hint)[0]:
            example = f"'{dotted}=\"{override_text(value)}\"'"
        elif isinstance(value, list) and value and _match(value[0], hint)[0]:
            first, all_values = override_text(value[0]), ",".join(map(override_text, value))
            example = f"{dotted}={first}, or -m {dotted}={all_values} for one run of each"
        problem = f"{dotted} is {override_text(value)!r} ({type(value).__name__})"
        raise ConfigError(f"{problem}; expected {type_name(hint)}. Set e.g. {example}")
    choices = field.metadata.get("choices")
    if choices and converted is not None and converted not in choices:
        close = closest(str(converted), map(str, choices)) or override_text(choices[0])
        problem, names = f"{dotted} is {override_text(converted)!r}", ", ".join(map(override_text, choices))
        raise ConfigError(f"{problem}; expected one of {names}. Set {dotted}={close}")
    numbers = converted if isinstance(converted, list) else [converted]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        what = "a finite number" if numbers is not converted else "finite numbers"
        raise ConfigError(f"{dotted} is {override_text(converted)}; expected {what}. Set e.g. {example}")
    bounds = bounds_text(field.metadata)
    if field.metadata.get("maximum") is None and any(
        isinstance(number, (int, float)) and abs(number) > LARGEST for number in numbers
    ):
        bounds = f"at most {LARGEST:,} in size"
    elif not isinstance(converted, (int, float)) or _within(converted, field.metadata):
        return converted
    raise ConfigError(f"{dotted} is {override_text(converted)}; expected {bounds}. Set e.g. {example}")


def section_class(hint: Any) -> type | None:
    """Return the dataclass of a section or optional section, or None for any other type."""
    types_of_value = [item for item in typing.get_args(hint) or (hint,) if item is not type(None)]
    is_section = len(types_of_value) == 1 and dataclasses.is_dataclass(types_of_value[0])
    return types_of_value[0] if is_section else None


def bounds_text(metadata: Mapping[str, Any]) -> str:
    """Describe the bounds, for example as ``at least 0 and below 1``. The text is empty if there are none."""
    labels = (("minimum", "at least"), ("maximum", "at most"), ("below", "below"))
    return " and ".join(f"{label} {metadata[key]}" for key, label in labels if metadata.get(key) is not None)


def keys_help(kind: type, width: int) -> str:
    """Return a configuration dataclass's help text, with the default, choices, bounds and meaning of each key."""
    lines, defaults, indent = [], to_mapping(kind()), " " * 6
    for name, field in public_fields(kind).items():
        limits = " | ".join(map(override_text, field.metadata["choices"] or ())) or bounds_text(field.metadata)
        lines.append(f"  {name}={override_text(defaults[name])}{limits and f'  ({limits})'}")
        lines.append(textwrap.fill(field.metadata["help"], width, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines)


def _within(number: float, metadata: Mapping[str, Any]) -> bool:
    minimum, maximum, below = (metadata.get(key) for key in ("minimum", "maximum", "below"))
    in_bounds = (minimum is None or number >= minimum) and (maximum is None or number <= maximum)
    return in_bounds and (below is None or number < below)


def _match(value: Any, hint: Any) -> tuple[bool, Any]:
    """Return whether ``value`` matches the type ``hint``, and the converted value."""
    if hint is Any:
        return True, value
    if hint is PathText:
        return isinstance(value, str), os.path.expanduser(value) if isinstance(value, str) else value
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        matches = (_match(value, item) for item in typing.get_args(hint))
        return next((match for match in matches if match[0]), (False, value))
    if typing.get_origin(hint) is list:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            return False, value
        items = [_match(item, typing.get_args(hint)[0]) for item in value]
        return all(ok for ok, _ in items), [item for _, item in items]
    if typing.get_origin(hint) is dict:
        return isinstance(value, Mapping), copy.deepcopy(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    # In Python, bool is a subclass of int, but `batch_size=true` must not be accepted as 1.
    if isinstance(value, bool) and hint is not bool:
        return False, value
    return isinstance(value, hint), value
