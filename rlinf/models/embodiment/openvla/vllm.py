"""The adapter through which vLLM runs an OpenVLA policy; importing it does not need vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.embodiment.openvla.config import OpenVLAConfig


class OpenVLAVllmAdapter:
    """Let vLLM run an OpenVLA policy (``ActionModel.vllm_adapter``).

    Attributes:
        model_class: ``module:Class`` of the model that the engine registers.
        excluded: First parts of the names of tensors that only the trainer needs.
    """

    model_class = "rlinf.models.embodiment.openvla.vllm_model:OpenVLAForVllm"
    excluded = ("value_head", "readout_token")

    @staticmethod
    def check(config: OpenVLAConfig) -> None:
        """Refuse parallel decoding, whose attention in both directions vLLM does not have."""
        if config.action_decoding != "autoregressive":
            raise ConfigError(
                f"rollout.backend=vllm decodes token by token, and the model has action_decoding={config.action_decoding}. "
                "Set model.init_config.action_decoding=autoregressive, or rollout.backend=torch"
            )

    @staticmethod
    def prompts(config: OpenVLAConfig, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Turn the result of ``preprocess`` into prompts: BOS, the image's token, text; padding left out."""
        token = image_token(config)
        pixel_values = inputs["pixel_values"].float().cpu().numpy()
        tokens, masks = inputs["input_ids"].cpu(), inputs.get("attention_mask")
        masks = torch.ones_like(tokens).bool() if masks is None else masks.bool().cpu()
        prompts = []
        for row, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
            text = ids[mask]
            image = {"pixel_values": pixel_values[row : row + 1], "text_ids": text[None].numpy()}
            prompts.append({"prompt_token_ids": [int(text[0]), token, *text[1:].tolist()], "image": image})
        return prompts


def image_token(config: OpenVLAConfig) -> int:
    """Return the id of the image's placeholder in a prompt: an action token. Only the first one in a prompt counts."""
    return config.action_vocab_size - config.n_action_bins


def num_image_tokens(config: OpenVLAConfig) -> int:
    """Return the positions that the images take."""
    grid_size = config.vision_towers()[0].grid_size
    return grid_size**2 // config.patches_per_token * config.num_images_in_input
