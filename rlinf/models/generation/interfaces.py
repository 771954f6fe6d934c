"""The interfaces of generation, by the path that users import; they are defined in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "GenerationConfig": "rlinf.llm.generation_interface",
        "GenerationDatumSpec": "rlinf.llm.generation_interface",
        "GenerationInterface": "rlinf.llm.generation_interface",
        "GenerationOutputSpec": "rlinf.llm.generation_interface",
        "VllmConfig": "rlinf.llm.generation_interface",
        "verify_right_padding": "rlinf.llm.batch_checks",
    },
)
