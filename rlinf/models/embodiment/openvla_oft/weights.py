"""Read weights from public OpenVLA-OFT folders: OpenVLA's safetensors, and separate files for additional parts."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rlinf.distributed.deferred import Weight
from rlinf.errors import CheckpointError
from rlinf.models.embodiment.folder_policy import open_safetensors
from rlinf.models.embodiment.openvla_oft.action_head import L1ActionHead, ProprioProjector
from rlinf.models.embodiment.openvla_oft.config import NEW_PARTS, OpenVLAOFTConfig

logger = logging.getLogger("rlinf")

MAX_LORA_ALPHA = 16
"""Maximum alpha: the public fine-tuning scales adapters by min(rank, 16) / rank."""


def read_oft_weights(folder: Path, config: OpenVLAOFTConfig) -> dict[str, Weight]:
    """Read ``model*.safetensors`` and the files ``<part>--<step>_checkpoint.pt`` of the same folder."""
    wanted = {
        "action_head": (config.action_head == "l1", "action_head=l1"),
        "proprio_projector": (config.use_proprio, "use_proprio=true"),
        "vision_backbone": (config.use_film, "use_film=true"),
        "value_head": (True, ""),
    }
    state_dict: dict[str, Weight] = dict(open_safetensors(folder))
    chosen = {part: path for part in wanted if (path := _newest(folder, part)) is not None}
    steps = {part: _step(path) for part, path in chosen.items()}
    if len(set(steps.values())) > 1:
        names = ", ".join(path.name for path in chosen.values())
        raise CheckpointError(
            f"The newest parts in '{folder}' are from different steps: {names}. Move the files of the remaining steps away, or set "
            "model.model_path=<a different folder>"
        )
    for part, path in chosen.items():
        is_wanted, override = wanted[part]
        if not is_wanted:
            problem = f"'{folder}' contains {path.name}, which the model would not use"
            raise CheckpointError(f"{problem}. Set model.override_config.{override}, or move the file away")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if part == "vision_backbone":
            state_dict = {name: weight for name, weight in state_dict.items() if name.split(".")[0] != part}
            state_dict |= {_film_name(name): tensor for name, tensor in merge_adapters(tensors).items()}
        else:
            state_dict |= {f"{part}.{name}": tensor for name, tensor in tensors.items()}
    return state_dict


def absent_parts(folder: Path, config: OpenVLAOFTConfig, names: Iterable[str]) -> list[str]:
    """Return the ``config.new_parts`` that have no tensor in ``names``; reject folders that lack any different part."""
    present = {"film" if ".film." in name else name.split(".")[0] for name in names}
    absent = [part for part in config.optional_parts if part not in present]
    rejected = [part for part in absent if part not in config.new_parts]
    if rejected:
        raise CheckpointError(
            f"The weights in '{folder}' do not fit the model: {rejected} is missing, but required by "
            f"{', '.join(NEW_PARTS[part] for part in rejected)}. Set model.model_path=<a folder with them>, or initialise them: "
            f"model.override_config.new_parts=[{','.join([*config.new_parts, *rejected])}]"
        )
    if absent:
        listed = ", ".join(absent)
        logger.info("'%s' lacks %s, which is newly initialised (model.override_config.new_parts).", folder, listed)
    return absent


def draw_parts(
    parts: Iterable[str], config: OpenVLAOFTConfig, action_dim: int, num_tokens: int, state_dim: int
) -> dict[str, Tensor]:
    """Return new tensors for ``parts``: layers with torch's defaults, FiLM as the identity, normal placeholders."""
    # FiLM starts as the identity: a random one would disturb the base features and is not saved with LoRA adapters.
    width = config.text_config.hidden_size
    drawn: dict[str, Tensor] = {}
    modules = {
        "action_head": (L1ActionHead, width, action_dim),
        "proprio_projector": (ProprioProjector, state_dim, width),
    }
    for part, (module_class, *sizes) in modules.items():
        if part in parts:
            drawn |= {f"{part}.{name}": tensor for name, tensor in module_class(*sizes).state_dict().items()}
    if "film" in parts:
        for tower, spec in zip(("featurizer", "fused_featurizer"), config.vision_towers(), strict=False):
            for block in range(spec.depth):
                for layer in ("scale", "shift"):
                    stem = f"vision_backbone.{tower}.blocks.{block}.film.{layer}"
                    drawn[f"{stem}.weight"] = torch.zeros(spec.embed_dim, width)
                    drawn[f"{stem}.bias"] = torch.zeros(spec.embed_dim)
    if "placeholders" in parts:
        drawn["placeholders"] = torch.randn(num_tokens, width) * config.text_config.initializer_range
    return drawn


def merge_adapters(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the low-rank updates of PEFT's layers into their weights: ``W + min(r, 16) / r * B A``, in the dtype of ``W``.

    Affects ``X.base_layer.{weight,bias}``, ``X.lora_A.<adapter>.weight`` and ``X.lora_B...``; the rest is unchanged.
    """
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in state_dict.items() if ".lora_" not in name}
    for name, down in state_dict.items():
        if ".lora_A." in name:
            up, target = state_dict[name.replace(".lora_A.", ".lora_B.")], f"{name.split('.lora_A.')[0]}.weight"
            scale = min(len(down), MAX_LORA_ALPHA) / len(down)
            weight = merged[target]
            merged[target] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return merged


def _film_name(name: str) -> str:
    """Return our name for a FiLM backbone's tensor, which has no wrapper but a ``film`` module inside the layer."""
    name = re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", name)
    return re.sub(r"(\.blocks\.\d+)\.(scale|shift)\.", r"\1.film.\2.", name)


def _newest(folder: Path, part: str) -> Path | None:
    files = sorted(folder.glob(f"{part}--*_checkpoint.pt"))
    if len(files) > 1 and any(not _step(path).isdigit() for path in files):
        raise CheckpointError(
            f"'{folder}' contains several files for {part}: {', '.join(path.name for path in files)}. The one with the highest "
            "step would be used, but not all have a step number. Move the remaining ones away"
        )
    return max(files, key=lambda path: int(_step(path))) if len(files) > 1 else next(iter(files), None)


def _step(path: Path) -> str:
    return path.name.partition("--")[2].removesuffix("_checkpoint.pt")
