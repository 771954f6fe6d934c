"""Inputs and sampling of vLLM's requests. This module needs vLLM and is imported only by the engine's process."""

import hashlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.inputs.engine import DecoderOnlyEngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rlinf.engines.vllm_engine import GREEDY_TEMPERATURE
from rlinf.errors import ConfigError


def engine_input(ids: list[int], tensors: Mapping[str, Tensor], model_config: Any) -> DecoderOnlyEngineInput:
    """Build a prompt as vLLM's renderer does, but with the trainer's patches, which are not resized or normalised again.

    Raise ConfigError if the number of image tokens does not match the images.
    ``tensors`` contains the images' ``pixel_values`` ``[patches, values]`` and ``image_grid_thw`` ``[images, 3]``; it is empty for text.
    """
    if not tensors:
        return tokens_input(ids)
    num_patches = tensors["image_grid_thw"].prod(-1)
    num_tokens = (num_patches // model_config.vision_config.spatial_merge_size**2).tolist()
    positions = [position for position, token in enumerate(ids) if token == model_config.image_token_id]
    if len(positions) != sum(num_tokens):
        raise ConfigError(
            f"A prompt has {len(positions)} image tokens (id {model_config.image_token_id}), but its {len(num_tokens)} images need "
            f"{sum(num_tokens)}. Pass the tokens that the model's processor returns with the images"
        )
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_patches),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)
    # Hash the images, because vLLM encodes images with equal hashes only once, even across prompts.
    parts = zip(tensors["pixel_values"].split(num_patches.tolist()), tensors["image_grid_thw"], strict=True)
    hashes = [hashlib.sha256(patches.numpy().tobytes() + grid.numpy().tobytes()).hexdigest() for patches, grid in parts]
    # An image's placeholders are contiguous, so they occupy the next `count` positions.
    rest = iter(positions)
    ranges = [PlaceholderRange(next(islice(rest, count - 1, None)) - count + 1, count) for count in num_tokens]
    return mm_input(ids, items, {"image": hashes}, {"image": ranges})


class GreedyTemperature(AdapterLogitsProcessor):
    """Logits processor that divides logits by the temperature in greedy requests; vLLM does so only in sampled requests.

    This does not change the tokens, and makes their log-probabilities equal the trainer's at this temperature.
    """

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM applies this processor to greedy requests."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        temperature = (params.extra_args or {}).get(GREEDY_TEMPERATURE)
        return None if temperature is None else lambda _, logits: logits / temperature
