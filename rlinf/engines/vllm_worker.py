"""Register a model class in the worker processes of an engine.

With tensor parallelism, vLLM starts each worker as a new process, in which only vLLM's own models are registered.
"""

import os

from rlinf.imports import import_string

MODEL_CLASS = "RLINF_VLLM_MODEL_CLASS"
"""Environment variable that passes the engine's model class, ``module:Class``, to its worker processes."""


class WorkerExtension:
    """Empty extension of vLLM's worker, which makes vLLM import this module in every worker."""


def register(model_class: str) -> type:
    """Register a model class with vLLM in this process, under its class name."""
    from vllm import ModelRegistry

    name = model_class.rpartition(":")[2]
    loaded: type = import_string(model_class)
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, loaded)
    return loaded


if MODEL_CLASS in os.environ:
    register(os.environ[MODEL_CLASS])
