"""How long the rows of a language model may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def num_positions(config: Any) -> int | None:
    """Positions that a language model was made for; None if its configuration declares none.

    Some models declare in ``max_position_embeddings`` what they have with a scaling of rotary positions (Llama 3, DeepSeek),
    others what they had without (Qwen2): the larger of this and of ``factor`` times the original ones counts.
    """
    declared = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if declared is None or not isinstance(scaling, Mapping):
        return declared
    # One for all layers, or one for each kind.
    of_layers = [each for each in (scaling, *scaling.values()) if isinstance(each, Mapping)]
    scaled = [
        int(each["factor"] * (each.get("original_max_position_embeddings") or declared))
        for each in of_layers
        if each.get("factor")
    ]
    return max([declared, *scaled])
