"""The module that a worker process of an engine imports before it makes its model.

With tensor parallelism, vLLM starts each worker as a new process, which knows the models of vLLM only.
"""

from __future__ import annotations

import os

from rlinf.imports import import_string

MODEL_CLASS = "RLINF_VLLM_MODEL_CLASS"
"""The variable that names the model class of this engine, ``module:Class``, for its worker processes."""


class WorkerExtension:
    """An extension of vLLM's worker that adds nothing: vLLM imports the module of an extension in every worker."""


def register(model_class: str) -> type:
    """Make a model class known to vLLM in this process, under its own name."""
    from vllm import ModelRegistry

    name = model_class.rpartition(":")[2]
    found: type = import_string(model_class)
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, found)
    return found


if MODEL_CLASS in os.environ:
    register(os.environ[MODEL_CLASS])
