"""The interfaces of generation, by the path that users import; they are defined in ``rlinf.llm``."""

from rlinf.imports import lazy_attributes
from rlinf.models.generation import DEFINED_IN

__getattr__ = lazy_attributes(__name__, DEFINED_IN)
