"""Import objects from ``"module:attribute"`` strings, and import public names at first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_string(target: str) -> Any:
    """Import and return ``"module:attribute"``; raise ImportError or AttributeError if it does not exist."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_attributes(module: str, defined_in: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` (PEP 562) for ``module``; ``defined_in`` maps each public name to its defining module."""

    def __getattr__(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return import_string(f"{defined_in[name]}:{name}")

    return __getattr__
