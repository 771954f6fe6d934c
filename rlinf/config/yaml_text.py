"""Writes a configuration as YAML the way the packaged groups look: nested sections, lists on one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def yaml_text(mapping: Mapping[str, Any], indent: int = 0) -> str:
    """Return ``mapping`` as YAML; numbers keep their shortest exact form, strings are quoted only where they must be."""
    lines = []
    for key, value in mapping.items():
        margin = " " * indent
        if isinstance(value, Mapping) and value:
            lines.append(f"{margin}{key}:\n{yaml_text(value, indent + 2)}")
        else:
            lines.append(f"{margin}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        text = repr(value)  # YAML reads 1e-08 as a string; it wants a point in the mantissa.
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    # As an item of a flow list, so that commas and brackets in strings are quoted.
    return yaml.safe_dump([value], default_flow_style=True, width=10**9, sort_keys=False).strip()[1:-1]
