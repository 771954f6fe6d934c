"""The interfaces of ``rlinf.llm.interfaces``, by the path that users import."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(
        [
            "BatchedDataDict",
            "GenerationConfig",
            "GenerationDatumSpec",
            "GenerationInterface",
            "GenerationOutputSpec",
            "LogprobsSpec",
            "LossFunction",
            "PolicyInterface",
            "TrainingDatumSpec",
            "verify_right_padding",
        ],
        "rlinf.llm.interfaces",
    ),
)
