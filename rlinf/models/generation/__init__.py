"""Public import path for the token-policy generation API in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes
from rlinf.models.generation.interfaces import DEFINED_IN

__getattr__ = lazy_attributes(
    __name__,
    DEFINED_IN
    | dict.fromkeys(("VllmGeneration", "VllmGenerationWorker"), "rlinf.llm.vllm_generation")
    | {"HuggingFaceGeneration": "rlinf.llm.hf_generation"},
)
