"""The generation API of token policies, by the names that users import; it is defined in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "GenerationConfig": "rlinf.llm.generation_interfaces",
        "GenerationDatumSpec": "rlinf.llm.generation_interfaces",
        "GenerationInterface": "rlinf.llm.generation_interfaces",
        "GenerationOutputSpec": "rlinf.llm.generation_interfaces",
        "HuggingFaceGeneration": "rlinf.llm.hf_generation",
        "VllmConfig": "rlinf.llm.generation_interfaces",
        "VllmGeneration": "rlinf.llm.vllm_generation",
        "VllmGenerationWorker": "rlinf.llm.vllm_generation",
        "verify_right_padding": "rlinf.llm.generation_interfaces",
    },
)
