"""Heads by name: the small networks that learn on top of a frozen policy."""

from __future__ import annotations

from rlinf.registry import Registry

HEADS: Registry = Registry("head", "rlinf.heads", {"residual": "rlinf.models.heads.residual:ResidualHead"})
