"""GR00T N1.7 in lerobot: checks of its folder, and its model, whose sizes are in the ``config.json`` of a base folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf.files import Json
from rlinf.models.embodiment.lerobot.chunks import FlowPrefix
from rlinf.models.embodiment.lerobot.contents import CODE, PACK, Finding, groot_base, local_tokenizer
from rlinf.models.loading import read_json

BACKBONE = "nvidia/Cosmos-Reason2-2B"
"""The backbone whose configuration is part of lerobot."""
PER_IMAGE, PER_TOKEN = ("pixel_values", "image_grid_thw"), ("input_ids", "attention_mask", "mm_token_type_ids")


def other_format(values: Mapping[str, Any]) -> Finding | None:
    """Return a finding if a folder's ``config.json`` is of GR00T N1.5 or N1.6, or in NVIDIA's own format."""
    model_type = str(values.get("model_type")).lower()
    if values.get("type") is None and model_type.startswith("gr00t"):
        fix = "load it by lerobot's GrootPolicy and make_pre_post_processors, and save both by save_pretrained"
        return Finding("config.json", "is in NVIDIA's own format", fix)
    if values.get("type") != "groot":
        return None
    named = re.search(r"n1[._d]?(\d)", f"{values.get('base_model_path')}".lower())
    version = "5" if values.get("tokenizer_assets_repo") else named[1] if named else "7"
    fix = "train again from nvidia/GR00T-N1.7-3B (lerobot 0.6.1 or later)"
    return Finding("config.json", f"is of GR00T N1.{version}; only N1.7 is supported", fix) if version != "7" else None


def groot_findings(folder: Path, values: Mapping[str, Any], base: str | None, images: list[str]) -> Iterator[Finding]:
    """Check a GR00T folder's base, embodiment and cameras; ``base`` overrides the base folder."""
    sizes = groot_base(folder, base or values.get("base_model_path"))
    fix = "set model.override_config.vlm=<the folder of nvidia/GR00T-N1.7-3B>"
    if sizes.get("model_type") != "Gr00tN1d7":
        yield Finding(
            "base_model_path", f"names a model of type {sizes.get('model_type')!r:.60}; expected Gr00tN1d7", fix
        )
    elif CODE.search(str(sizes)):
        yield Finding("base_model_path", "names a base whose config.json contains code", fix)
    elif (backbone := sizes.get("model_name", BACKBONE)) != BACKBONE:
        place = Path(local_tokenizer(folder, str(backbone)) or "")
        if not (place / "config.json").is_file():
            yield Finding("model_name", f"'{backbone!s:.80}' of the base's config.json is not on this machine", fix)
        elif CODE.search(str(read_json(place / "config.json"))):
            yield Finding("model_name", f"'{backbone!s:.80}' of the base's config.json contains code", fix)
    steps = read_json(folder / "policy_preprocessor.json")["steps"]
    packing: Json = next((step.get("config") or {} for step in steps if step.get("registry_name") == PACK), {})
    tag, known = packing.get("embodiment_tag"), packing.get("embodiment_mapping") or {}
    if packing and tag not in known:
        problem = f"'{tag!s:.80}' is not in the embodiment_mapping of policy_preprocessor.json, so embodiment 0 is used"
        yield Finding("embodiment_tag", problem, f"write one of {', '.join(map(str, known))}")
    relative = any(
        step.get("registry_name") == "relative_actions_processor" and (step.get("config") or {}).get("enabled")
        for step in steps
    )
    if relative or values.get("use_relative_actions"):
        yield Finding(
            "use_relative_actions",
            "is true, but actions relative to the state are not supported",
            "set it to false and train again",
        )
    # lerobot reads LIBERO's second camera by either name.
    second = "image2" if "image2" in images else "wrist_image"
    views = [second if x == "wrist_image" else x for x in packing.get("video_modality_keys") or images]
    if sorted(views) != sorted(images):
        problem = f"are {', '.join(images)}, but policy_preprocessor.json reads {', '.join(map(str, views))}"
        yield Finding(
            "input_features", f"{problem}; lerobot would drop or reorder them", "name the images alike in both"
        )


def decode_statistics(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return ``action.min`` and ``action.max`` of the step that decodes an embodiment's groups of actions."""
    groups = settings.get("modality_config", {}).get("action", {}).get("modality_keys", [])
    stored = settings.get("raw_stats", {}).get("action", {})
    names = ("q01", "q99") if settings.get("use_percentiles") else ("min", "max")
    if not groups or any(name not in stored.get(group, {}) for group in groups for name in names):
        return {}
    ends = {"min": names[0], "max": names[1]}
    return {
        f"action.{end}": torch.cat([torch.tensor(stored[group][x]).float() for group in groups])
        for end, x in ends.items()
    }


def load_class(policy_class: Any, folder: Path, sizes: Json) -> Any:
    """Return ``policy_class`` without its reading of the base's weights, which the folder's would replace.

    lerobot would also allow the backbone's configuration to contain code.
    """
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    backbone = str(sizes.get("model_name", BACKBONE))
    if backbone != BACKBONE:
        sizes = {**sizes, "model_name": local_tokenizer(folder, backbone)}

    class WithoutBase(policy_class):
        def _create_groot_model(self) -> Any:
            tuned = (
                "tune_llm",
                "tune_visual",
                "tune_projector",
                "tune_diffusion_model",
                "tune_vlln",
                "tune_top_llm_layers",
            )
            chosen = {name: getattr(self.config, name) for name in (*tuned, "use_flash_attention")}
            if self.config.num_inference_timesteps is not None:
                chosen["num_inference_timesteps"] = self.config.num_inference_timesteps
            options = {"trust_remote_code": False, "local_files_only": True}
            model = GR00TN17(GR00TN17Config(**{**sizes, **chosen}), options, load_backbone_weights=False)
            if not model.config.use_alternate_vl_dit:
                raise ValueError("use_alternate_vl_dit is false, which attends to padding")
            return model.float()

    return WithoutBase


def _precision(policy: Any, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=policy.config.use_bf16)


def groot_prefix(policy: Any, prepared: Mapping[str, Any]) -> FlowPrefix:
    """Encode images and prompt, with gradients; rows with equally many tokens together.

    lerobot encodes all rows together, so their left padding changes the result: its last attention has no mask.
    """
    model, inputs = policy._groot_model, policy._filter_groot_inputs(prepared, include_action=False)
    rows, width = inputs["attention_mask"].shape
    lengths, parts, order = inputs["attention_mask"].sum(1), [], []
    for length in lengths.unique().tolist():
        chosen = (lengths == length).nonzero()[:, 0]
        part = {name: values[chosen] for name, values in inputs.items() if name not in PER_IMAGE}
        part |= {name: values[:, -length:] for name, values in part.items() if name in PER_TOKEN}
        part |= {name: inputs[name].unflatten(0, (rows, -1))[chosen].flatten(0, 1) for name in PER_IMAGE}
        observed, acting = model.prepare_input(part)
        with _precision(policy, chosen.device):
            encoded = model.backbone(observed)
            features = model.action_head._encode_features(encoded, acting)
        left = width - length
        parts.append(
            (
                pad(encoded.backbone_attention_mask, (left, 0)),
                pad(encoded.image_mask, (left, 0)),
                acting.embodiment_id,
                features.state_features,
                acting.state,
                pad(features.backbone_features, (0, 0, left, 0)),
            )
        )
        order.append(chosen)
    mask, *cache, states = (torch.cat(values)[torch.cat(order).argsort()] for values in zip(*parts, strict=True))
    return FlowPrefix(mask, tuple(cache), states)


def groot_velocity(policy: Any, prefix: FlowPrefix, x: Tensor, t: Tensor) -> Tensor:
    """Return ``noise - action`` at ``x [B, H, D]`` and ``t [B]`` (1 is noise), with gradients."""
    head, (images, embodiment, state, _) = policy._groot_model.action_head, prefix.cache
    # lerobot's time is 0 at noise; t is a multiple of 1 / n up to rounding.
    bucket = ((1 - t.double()) * head.num_timestep_buckets + 1e-3).long()
    with _precision(policy, x.device):
        tokens = head.action_encoder(x.to(prefix.states.dtype), bucket, embodiment)
        if head.config.add_pos_embed:
            tokens = tokens + head.position_embedding.weight[: tokens.shape[1]]
        output = head.model(
            hidden_states=torch.cat((state, tokens), 1), encoder_hidden_states=prefix.states, timestep=bucket,
            image_mask=images, backbone_attention_mask=prefix.mask,
        )  # fmt: skip
        return -head.action_decoder(output, embodiment)[:, -head.action_horizon :]


def groot_chunk(policy: Any, prepared: Mapping[str, Any], noise: Tensor, count: int) -> Tensor:
    """Return the chunks from ``noise [B * count, H, D]``, which lerobot would draw itself."""
    head, prefix = policy._groot_model.action_head, groot_prefix(policy, prepared).repeated(count)
    if noise.shape[1:] != (head.action_horizon, head.action_dim):
        actual = f"{head.action_horizon} x {head.action_dim}"
        raise ValueError(
            f"noise_shape is {list(noise.shape[1:])}, but the base's action_horizon x max_action_dim is {actual}"
        )
    num_steps, x = head.num_inference_timesteps, noise.to(prefix.states.dtype)
    for step in range(num_steps):
        t = x.new_full((len(x),), 1 - step / num_steps, dtype=torch.float64)
        x = x - groot_velocity(policy, prefix, x, t) * (1 / num_steps)
    return x[:, : policy.config.chunk_size, : policy.config.output_features["action"].shape[0]]
