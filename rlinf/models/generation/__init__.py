"""Engines that generate tokens; each is imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "GenerationConfig": "interfaces",
    "GenerationDatumSpec": "interfaces",
    "GenerationInterface": "interfaces",
    "GenerationOutputSpec": "interfaces",
    "HuggingFaceGeneration": "hf_generation",
    "VllmConfig": "interfaces",
    "VllmGeneration": "vllm_generation",
    "VllmGenerationWorker": "vllm_generation",
    "verify_right_padding": "interfaces",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
