"""The one shape of a refusal: what was found, what was required, the override that fixes it."""

from __future__ import annotations

from typing import NoReturn

from rlinf.errors import ConfigError


def refuse(found: str, required: str, fix: str) -> NoReturn:
    """Raise a ``ConfigError``.

    Args:
        found: The values, as ``key=value`` where possible.
        required: What was required of them, or why they do not work.
        fix: Overrides that fix it.
    """
    raise ConfigError(f"{found}; required: {required}. Set {fix}")
