"""Objects by their names ``"module:attribute"``, and modules whose public names are imported at first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_string(target: str) -> Any:
    """Import and return ``"module:attribute"``.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: The module has no such attribute.
    """
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def lazy_attributes(module: str, defined_in: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` (PEP 562) of a module whose public names are defined elsewhere.

    Args:
        module: ``__name__`` of the module.
        defined_in: Public name to the module that defines it.
    """

    def __getattr__(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return import_string(f"{defined_in[name]}:{name}")

    return __getattr__
