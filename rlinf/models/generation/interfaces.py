"""The interfaces of ``rlinf.llm.generation_interfaces``, by the path that users import."""

from rlinf.imports import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(
        [
            "GenerationConfig",
            "GenerationDatumSpec",
            "GenerationInterface",
            "GenerationOutputSpec",
            "VllmConfig",
            "response_mask",
            "verify_right_padding",
            "verify_text_only",
            "verify_token_ids",
        ],
        "rlinf.llm.generation_interfaces",
    ),
)
