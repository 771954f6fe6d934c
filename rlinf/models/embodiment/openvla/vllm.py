"""The adapter that runs an OpenVLA policy in vLLM; importing it does not import vLLM."""

import copy
from typing import Any

import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.embodiment.openvla.config import OpenVLAConfig


class OpenVLAVllmAdapter:
    """Run an OpenVLA policy in vLLM (see ``ActionModel.vllm_adapter``); ``excluded`` modules are not sent to the engine."""

    model_class = "rlinf.models.embodiment.openvla.vllm_model:OpenVLAForVllm"
    excluded = ("value_head", "readout_token")

    @staticmethod
    def check(config: OpenVLAConfig) -> None:
        """Reject parallel decoding, whose bidirectional attention vLLM does not support."""
        if config.action_decoding != "autoregressive":
            raise ConfigError(
                f"rollout.backend=vllm decodes token by token, but the model has action_decoding={config.action_decoding}. "
                "Set model.init_config.action_decoding=autoregressive, or rollout.backend=torch"
            )

    @staticmethod
    def engine_config(model: Any) -> OpenVLAConfig:
        config = copy.deepcopy(model.config)
        config.pixel_statistics = pixel_statistics(model)
        return config

    @staticmethod
    def prompts(model: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Convert the result of ``preprocess`` to prompts of BOS, image token and text, without padding."""
        # Images are sent as bytes, which need a quarter of the size; the engine normalises them again.
        token = image_token(model.config)
        pixels = to_bytes(inputs["pixel_values"], pixel_statistics(model)).cpu().numpy()
        tokens, masks = inputs["input_ids"].cpu(), inputs.get("attention_mask")
        masks = torch.ones_like(tokens).bool() if masks is None else masks.bool().cpu()
        prompts = []
        for row, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
            text = ids[mask]
            image = {"pixel_values": pixels[row : row + 1], "text_ids": text[None].numpy()}
            prompts.append({"prompt_token_ids": [int(text[0]), token, *text[1:].tolist()], "image": image})
        return prompts


def pixel_statistics(model: Any) -> list[list[float]]:
    """Return the mean and std of each channel in ``pixel_values``, for images in [0, 1]."""
    towers = model.processor.image_processor.normalization
    return [[x for tower in towers for x in tower[part]] * model.config.num_images_in_input for part in (0, 1)]


def to_bytes(pixel_values: Tensor, statistics: list[list[float]]) -> Tensor:
    """Return the uint8 images ``[B, channels, H, W]`` from which ``normalized`` computes ``pixel_values``."""
    mean, std = _per_channel(pixel_values, statistics)
    return ((pixel_values.float() * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)


def normalized(pixels: Tensor, statistics: list[list[float]]) -> Tensor:
    """Return float32 ``pixel_values`` for uint8 images, with the same arithmetic as the policy's processor."""
    mean, std = _per_channel(pixels, statistics)
    return pixels.float().div_(mean.new_tensor(255.0)).sub_(mean).div_(std)


def _per_channel(pixels: Tensor, statistics: list[list[float]]) -> Tensor:
    """Return ``statistics`` as float32 ``[2, channels, 1, 1]``, broadcastable to ``pixels [B, channels, H, W]``."""
    return torch.tensor(statistics, dtype=torch.float32, device=pixels.device)[..., None, None]


def image_token(config: OpenVLAConfig) -> int:
    """Return the id of the image placeholder in a prompt: an action token, only whose first occurrence is replaced."""
    return config.action_vocab_size - config.n_action_bins


def num_image_tokens(config: OpenVLAConfig) -> int:
    grid_size = config.vision_towers()[0].grid_size
    return grid_size**2 // config.patches_per_token * config.num_images_in_input
