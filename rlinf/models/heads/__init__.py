"""Heads by name: the small networks that learn on top of a frozen policy."""

from __future__ import annotations

from rlinf.registry import Registry

HEADS: Registry = Registry(
    "head",
    "rlinf.heads",
    {
        "actor": "rlinf.models.heads.kinds:ActorHead",
        "chunk": "rlinf.models.heads.kinds:ChunkHead",
        "direct": "rlinf.models.heads.kinds:DirectHead",
        "edit": "rlinf.models.heads.kinds:EditHead",
        "noise": "rlinf.models.heads.kinds:NoiseHead",
        "residual": "rlinf.models.heads.kinds:ResidualHead",
    },
)
