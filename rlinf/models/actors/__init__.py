"""Registry of actors: small networks that are trained on top of a frozen policy."""

from rlinf.registry import Registry

ACTORS: Registry = Registry(
    "actor",
    "rlinf.actors",
    {
        "scratch": "rlinf.models.actors.kinds:ScratchActor",
        "rlt": "rlinf.models.actors.kinds:RLTActor",
        "direct": "rlinf.models.actors.kinds:DirectActor",
        "expo": "rlinf.models.actors.kinds:EXPOActor",
        "dsrl": "rlinf.models.actors.kinds:DSRLActor",
        "residual": "rlinf.models.actors.kinds:ResidualActor",
    },
)
