"""The generation API of token policies, by the names that users import; it is defined in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "GenerationConfig": "rlinf.llm.generation_interface",
        "GenerationDatumSpec": "rlinf.llm.generation_interface",
        "GenerationInterface": "rlinf.llm.generation_interface",
        "GenerationOutputSpec": "rlinf.llm.generation_interface",
        "HuggingFaceGeneration": "rlinf.llm.hf_generation",
        "VllmConfig": "rlinf.llm.generation_interface",
        "VllmGeneration": "rlinf.llm.vllm_generation",
        "VllmGenerationWorker": "rlinf.llm.vllm_generation",
        "verify_right_padding": "rlinf.llm.batch_checks",
    },
)
