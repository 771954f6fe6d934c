"""OpenVLA in vLLM: our vision tower and projector with vLLM's language model. Only imported in the engine's process."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BatchFeature, LlamaForCausalLM
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import DictEmbeddingItems, ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)
from vllm.sequence import IntermediateTensors

from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.embodiment.openvla.vision_tower import Projector, VisionBackbone
from rlinf.models.embodiment.openvla.vllm import image_token, normalized, num_image_tokens

FIELDS = ("pixel_values", "text_ids")
"""Fields of an image: uint8 ``[1, channels, H, W]``, and the prompt ``[1, L]`` (BOS and text), averaged for FiLM."""


class OpenVLAForVllmConfig(OpenVLAConfig):
    """The policy's configuration and pixel statistics, under a separate name because vLLM has a different ``openvla``."""

    model_type = "rlinf_openvla"
    pixel_statistics: list[list[float]] | None = None


AutoConfig.register(OpenVLAForVllmConfig.model_type, OpenVLAForVllmConfig, exist_ok=True)


def _fields(_: Mapping[str, Tensor]) -> dict[str, MultiModalFieldConfig]:
    return {name: MultiModalFieldConfig.batched("image") for name in FIELDS}


class OpenVLADataParser(MultiModalDataParser):
    """Accept tensors that the policy's own processor computed."""

    def _parse_image_data(self, data: dict[str, Tensor]) -> ModalityDataItems[Any, Any]:
        return DictEmbeddingItems(data, modality="image", required_fields=set(FIELDS), fields_factory=_fields)


class OpenVLAProcessingInfo(BaseProcessingInfo):
    """Declare one image item per prompt, and no tokenizer."""

    def get_data_parser(self) -> OpenVLADataParser:
        return OpenVLADataParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": num_image_tokens(self.get_hf_config())}


class OpenVLADummyInputs(BaseDummyInputsBuilder[OpenVLAProcessingInfo]):
    """Build inputs for vLLM's memory profiling run."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        config = self.info.get_hf_config()
        towers = config.vision_towers()
        channels, size = 3 * len(towers) * config.num_images_in_input, towers[0].image_size
        return {
            "image": {
                "pixel_values": torch.zeros(1, channels, size, size, dtype=torch.uint8),
                "text_ids": torch.zeros(1, 1, dtype=torch.int64),
            }
        }


class OpenVLAMultiModalProcessor(BaseMultiModalProcessor[OpenVLAProcessingInfo]):
    """Expand a prompt's image token to one token per image position."""

    requires_tokenizer = False

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return _fields(hf_inputs)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        config = self.info.get_hf_config()
        token = image_token(config)
        return [PromptReplacement(modality="image", target=[token], replacement=[token] * num_image_tokens(config))]


@MULTIMODAL_REGISTRY.register_processor(
    OpenVLAMultiModalProcessor, info=OpenVLAProcessingInfo, dummy_inputs=OpenVLADummyInputs
)
class OpenVLAForVllm(nn.Module, SupportsMultiModal):
    """The autoregressive OpenVLA policy without its value head, under the same tensor names.

    A prompt is BOS, image token and text, without padding. Positions agree with the trainer's, which skip padding.
    """

    # Logits are float32 on all of the engine's GPUs, as with ``linear_in_float32`` in the trainer.
    head_dtype: ClassVar[str] = "float32"

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        config._attn_implementation = "sdpa"
        self.config = config
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_backbone = VisionBackbone(config)
            self.projector = Projector(config, self.vision_backbone.embed_dim, self.vision_backbone.grid_size)
        config.text_config.head_dtype = self.head_dtype
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config, hf_config=config.text_config, prefix=maybe_prefix(prefix, "language_model"),
                architectures=["LlamaForCausalLM"],
            )  # fmt: skip
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    @staticmethod
    def config_of(config: OpenVLAConfig) -> OpenVLAForVllmConfig:
        """Return the policy's configuration under the model type registered with vLLM."""
        values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        return OpenVLAForVllmConfig(**values)

    @staticmethod
    def required_tensors(config: OpenVLAConfig) -> dict[str, Tensor]:
        """Return the tensors that this class loads, under the policy's names and on the meta device."""
        with torch.device("meta"):
            backbone = VisionBackbone(config)
            parts = nn.ModuleDict({
                "vision_backbone": backbone,
                "projector": Projector(config, backbone.embed_dim, backbone.grid_size),
                "language_model": LlamaForCausalLM(config.text_config),
            })  # fmt: skip
        return dict(parts.state_dict(keep_vars=True))

    def embed_multimodal(self, **kwargs: Any) -> MultiModalEmbeddings:
        """Return embeddings ``[P, H]`` for each image in the batch."""
        pixel_values, text_ids = kwargs["pixel_values"], kwargs["text_ids"]
        weight = next(self.projector.parameters())
        images = torch.cat([image.reshape(1, *image.shape[-3:]) for image in pixel_values]).to(weight.device)
        pixels = normalized(images, self.config.pixel_statistics).to(weight.dtype)
        language = None
        if self.config.use_film:
            # The mean is computed in the embedding's number format, as in the trainer.
            means = [self.language_model.embed_input_ids(ids.flatten().to(weight.device)).mean(0) for ids in text_ids]
            language = torch.stack(means)
        return tuple(self.projector(self.vision_backbone(pixels, language)))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **_: object,
    ) -> Tensor | IntermediateTensors:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits for the complete vocabulary; the request's ``allowed_token_ids`` selects the action bins."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)
