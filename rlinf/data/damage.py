"""One error for whatever is wrong with the files of a dataset."""

from __future__ import annotations

from rlinf.errors import ConfigError


def damaged(place: object, reason: str | Exception) -> ConfigError:
    """Return the error that a dataset, or one of its files, is damaged or incomplete."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
    return ConfigError(f"{place} is damaged or incomplete ({text}). Copy the dataset again, or use another one")
