"""The shape of every rejection: the value found, the requirement, the override that fixes it."""

from __future__ import annotations

from typing import NoReturn

from rlinf.errors import ConfigError


def reject(found: str, required: str, fix: str) -> NoReturn:
    """Raise a ``ConfigError``: the values that were found, why they do not work, and overrides that fix it."""
    raise ConfigError(f"{found}; required: {required}. Set {fix}")
