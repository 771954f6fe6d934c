"""Convert weights between public OpenVLA files (timm names) and our modules (transformers' names)."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.distributed.deferred import Weight
from rlinf.models.embodiment.openvla.config import OpenVLAConfig

_BLOCK = re.compile(r"(vision_backbone\.(?:fused_)?featurizer)\.blocks\.(\d+)\.(.+)")
# Maps public names inside a layer to ours; with three targets, rows are split into queries, keys and values.
_DINO_NAMES = {
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.o_proj",),
    "ls1.scale_factor": ("layer_scale1.lambda1",),
    "ls2.scale_factor": ("layer_scale2.lambda1",),
}
_SIGLIP_NAMES = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.out_proj",),
    "norm1": ("layer_norm1",),
    "norm2": ("layer_norm2",),
}


def _names_by_tower(config: OpenVLAConfig) -> dict[str, dict[str, tuple[str, ...]]]:
    prefixes = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")
    tables = {"dinov2": _DINO_NAMES, "siglip": _SIGLIP_NAMES}
    return {prefix: tables[spec.kind] for prefix, spec in zip(prefixes, config.vision_towers(), strict=False)}


def from_public(state_dict: Mapping[str, Weight], config: OpenVLAConfig) -> dict[str, Weight]:
    """Rename and split the tensors of a public checkpoint; tensors that already have our names are unchanged."""
    tables = _names_by_tower(config)
    result: dict[str, Weight] = {}
    for name, tensor in state_dict.items():
        match = _BLOCK.fullmatch(name)
        table = tables.get(match[1], {}) if match else {}
        public = next((key for key in table if match and (match[3] == key or match[3].startswith(key + "."))), None)
        if match is None or public is None:
            result[name] = tensor
            continue
        targets, rest = table[public], match[3][len(public) :]
        for target, part in zip(targets, tensor.chunk(len(targets)), strict=True):
            # Each part becomes a separate parameter, which needs its own memory.
            result[f"{match[1]}.blocks.{match[2]}.{target}{rest}"] = part if len(targets) == 1 else part.clone()
    return result


def to_public(state_dict: Mapping[str, Tensor], config: OpenVLAConfig) -> dict[str, Tensor]:
    """Undo ``from_public``; the result has exactly the names and shapes of a public file (plus our additions)."""
    tables = _names_by_tower(config)
    result: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        match = _BLOCK.fullmatch(name)
        table = tables[match[1]] if match else {}
        entry = next(
            (
                (public, targets, target)
                for public, targets in table.items()
                for target in targets
                if match and (match[3] == target or match[3].startswith(target + "."))
            ),
            None,
        )
        if match is None or entry is None:
            result[name] = tensor
            continue
        public, targets, target = entry
        if target != targets[0]:
            continue
        stem, rest = f"{match[1]}.blocks.{match[2]}.", match[3][len(target) :]
        parts = [state_dict[f"{stem}{part}{rest}"] for part in targets]
        result[f"{stem}{public}{rest}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result
