"""Heads by name: the small networks that learn on top of a frozen policy."""

from __future__ import annotations

from rlinf.registry import Registry

HEADS: Registry = Registry(
    "head",
    "rlinf.heads",
    {
        "chunk": "rlinf.models.heads.chunk:ChunkHead",
        "direct": "rlinf.models.heads.direct:DirectHead",
        "edit": "rlinf.models.heads.edit:EditHead",
        "noise": "rlinf.models.heads.noise:NoiseHead",
        "residual": "rlinf.models.heads.residual:ResidualHead",
    },
)
