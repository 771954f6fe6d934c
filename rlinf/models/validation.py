"""Public import path for the backend comparison in ``rlinf.llm.validation``."""

from rlinf.imports import lazy_attributes

NAMES = ("log_probability_error", "validate_log_probability_consistency", "vocab_size")
__getattr__ = lazy_attributes(__name__, dict.fromkeys(NAMES, "rlinf.llm.validation"))
