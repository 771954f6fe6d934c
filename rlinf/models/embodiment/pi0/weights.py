"""The names of pi0's tensors in public files (openpi's, and lerobot's with a prefix), and ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.distributed.deferred import Weight, in_memory
from rlinf.errors import CheckpointError

LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EMBED_TOKENS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
# prefix of public names -> prefix of ours; all other names are the same
_PREFIXES = {
    "paligemma_with_expert.paligemma.model.vision_tower.vision_model.": "vision_tower.",
    "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.": "projector.",
    "paligemma_with_expert.paligemma.model.language_model.": "language_model.",
    "paligemma_with_expert.gemma_expert.model.": "expert.",
    "paligemma_with_expert.gemma_expert.lm_head.": "expert_lm_head.",
}


def from_public(state_dict: Mapping[str, Weight]) -> dict[str, Weight]:
    """Rename the tensors of an openpi or lerobot checkpoint, where the token embedding is tied to ``lm_head``."""
    if all(name.startswith("model.") for name in state_dict):
        state_dict = {name.removeprefix("model."): tensor for name, tensor in state_dict.items()}
    tensors = dict(state_dict)
    head = tensors.pop(LM_HEAD, None)
    if head is not None:
        if EMBED_TOKENS in tensors and not torch.equal(in_memory(head), in_memory(tensors[EMBED_TOKENS])):
            raise CheckpointError(
                f"'{EMBED_TOKENS}' and '{LM_HEAD}' are one tensor in pi0, and differ here. "
                "Set model.model_path=<another folder>"
            )
        tensors[EMBED_TOKENS] = head
    return {_renamed(name, _PREFIXES): tensor for name, tensor in tensors.items()}


def to_public(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``from_public``, in openpi's form: the result has the names of an openpi file (and our heads)."""
    names = {ours: public for public, ours in _PREFIXES.items()}
    tensors = {_renamed(name, names): tensor for name, tensor in state_dict.items()}
    tensors[LM_HEAD] = tensors.pop(EMBED_TOKENS)
    return tensors


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
