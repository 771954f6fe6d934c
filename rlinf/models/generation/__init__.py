"""The generation API of token policies, by the names that users import; it is defined in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

INTERFACES = ("GenerationConfig", "GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec", "VllmConfig")
DEFINED_IN = {"verify_right_padding": "rlinf.llm.batch_checks"}
DEFINED_IN |= dict.fromkeys(INTERFACES, "rlinf.llm.generation_interface")

__getattr__ = lazy_attributes(
    __name__,
    DEFINED_IN
    | dict.fromkeys(("VllmGeneration", "VllmGenerationWorker"), "rlinf.llm.vllm_generation")
    | {"HuggingFaceGeneration": "rlinf.llm.hf_generation"},
)
