"""Public import path for the generation interfaces in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes

NAMES = ("GenerationConfig", "GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec", "VllmConfig")
DEFINED_IN = {"verify_right_padding": "rlinf.llm.batch_checks"}
DEFINED_IN |= dict.fromkeys(NAMES, "rlinf.llm.generation_interface")

__getattr__ = lazy_attributes(__name__, DEFINED_IN)
