"""The shape of every refusal: the value found, the requirement, the override that fixes it."""

from __future__ import annotations

from typing import NoReturn

from rlinf.errors import ConfigError


def refuse(found: str, required: str, fix: str) -> NoReturn:
    """Raise a ``ConfigError``.

    Args:
        found: The values, as ``key=value`` where possible.
        required: The requirement, or why they do not work.
        fix: Overrides that fix it.
    """
    raise ConfigError(f"{found}; required: {required}. Set {fix}")
