"""Errors for damaged dataset files and missing packages."""

import importlib
from types import ModuleType

from rlinf.errors import ConfigError, MissingDependencyError


class UnreadableRowError(ConfigError):
    """A row of a dataset has no readable image."""


def damaged(place: object, reason: str | Exception, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Return an error reporting that a dataset or one of its files is damaged or incomplete."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
    return kind(f"{place} is damaged or incomplete ({text}). Copy the dataset again, or use a different one")


def import_reader(module: str, wanted_by: str, files: str) -> ModuleType:
    """Import a module from the ``lerobot`` extra; raise MissingDependencyError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{wanted_by} needs the package '{module.partition('.')[0]}' for {files}. Run pip install -e '.[lerobot]' in the "
            "clone of rlinf"
        ) from error
