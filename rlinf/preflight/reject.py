"""Error format for rejected settings: actual value, requirement, and an override that fixes it."""

from typing import NoReturn

from rlinf.errors import ConfigError


def reject(actual: str, required: str, fix: str) -> NoReturn:
    """Raise a ``ConfigError`` with the actual values, the requirement, and overrides that fix it."""
    raise ConfigError(f"{actual}; expected {required}. Set {fix}")
