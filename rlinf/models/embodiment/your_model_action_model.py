"""Template for a policy based on a Hugging Face vision-language model. Copy this file, then rename and adapt it.

It works unchanged: the base model is transformers' LLaVA, an action consists of ``action_dim`` tokens from the vocabulary's
last ``n_action_bins`` ids, and ``generate`` decodes them. ``docs/adding_a_model.md`` explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BatchFeature,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)
from transformers.image_processing_utils import BaseImageProcessor

from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer
from rlinf.models.embodiment.modules.tokenizer import ActionTokenizer, load_tokenizer
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.token_action_model import TokenActionModel
from rlinf.models.precision import LinearInFloat32, linear_in_float32
from rlinf.models.sampling import sample_tokens, token_logprobs
from rlinf.types import ActionPrediction, Observation


class YourModelConfig(LlavaConfig):
    """The base model's configuration plus the number of action tokens and the action statistics."""

    model_type = "your_model"
    n_action_bins: int = 256
    norm_stats: dict | None = None


class YourImageProcessor(BaseImageProcessor):
    """Convert uint8 images to ``pixel_values``: bicubic resize to ``image_size`` pixels, then scale to [-1, 1]."""

    model_input_names = ["pixel_values"]

    def __init__(self, image_size: int = 224, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Process an array ``[H, W, 3]``, a PIL image, or a sequence of these."""
        batch = [images] if isinstance(images, Image.Image) or np.ndim(images) == 3 else images
        size = (self.image_size, self.image_size)
        pixels = [
            np.asarray(Image.fromarray(np.asarray(image)).resize(size, Image.Resampling.BICUBIC)) for image in batch
        ]
        scaled = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return BatchFeature({"pixel_values": scaled})


class YourProcessor:
    """Convert prompts and images to the model's keyword arguments."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_processor: YourImageProcessor, **_: object) -> None:
        tokenizer.padding_side = "left"
        self.tokenizer, self.image_processor = tokenizer, image_processor

    @classmethod
    def from_pretrained(
        cls, path: str, tokenizer: PreTrainedTokenizerBase | None = None, image_processor: Any = None, **kwargs: Any
    ) -> YourProcessor:
        """Load from a folder any parts that were not passed in."""
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path, padding_side="left")
        return cls(tokenizer, image_processor or YourImageProcessor.from_pretrained(path))

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        """Save both parts to a folder."""
        self.tokenizer.save_pretrained(str(save_directory))
        self.image_processor.save_pretrained(str(save_directory))

    def __call__(self, text: str | Sequence[str], images: Any, **_: object) -> BatchFeature:
        """Tokenise (padding on the left) and process images."""
        prompts = [text] if isinstance(text, str) else list(text)
        tokens = self.tokenizer(prompts, padding=True, return_tensors="pt")
        data = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        return BatchFeature({**data, **self.image_processor(images)})


def load_processor(tokenizer_config: TokenizerConfig, model_config: YourModelConfig, path: str | None) -> YourProcessor:
    """Load a folder's processor; without a folder, build one for the small model in ``model/your_model.yaml``."""
    if path is not None:
        return YourProcessor.from_pretrained(path)
    tokenizer = load_tokenizer(None, model_config.text_config.vocab_size)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return YourProcessor(tokenizer, YourImageProcessor(model_config.vision_config.image_size))


class YourLogitsProcessor(LogitsProcessor):
    """Restrict sampling to the last ``n_action_bins`` ids of the vocabulary."""

    def __init__(self, n_action_bins: int) -> None:
        self.n_action_bins = n_action_bins

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask ``scores [B, V]`` outside the action tokens."""
        masked = torch.full_like(scores, -torch.inf)
        masked[:, -self.n_action_bins :] = scores[:, -self.n_action_bins :]
        return masked


class DrawLogitsProcessor(LogitsProcessor):
    """Sample the token with ``sample_tokens``, like all policies, so that ``generate`` has only one choice left.

    Sampling inside ``generate`` would apply ``top_k`` and ``top_p`` from ``generation_config.json``, which the
    log-probabilities used in training do not account for.
    """

    def __init__(self, prompt_len: int, do_sample: bool, temperature: float, uniforms: Tensor | None) -> None:
        self.prompt_len, self.do_sample, self.temperature, self.uniforms = prompt_len, do_sample, temperature, uniforms

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask all but the sampled token in each row of ``scores [B, V]``."""
        uniforms = None if self.uniforms is None else self.uniforms[:, input_ids.shape[1] - self.prompt_len]
        chosen = sample_tokens(scores, self.do_sample, self.temperature, uniforms)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)


class YourModelForRLActionPrediction(TokenActionModel, LlavaForConditionalGeneration):
    """The policy; it maps images and an instruction to action tokens with the base model's ``generate``."""

    config_class = YourModelConfig
    fsdp_wrap_modules: ClassVar[tuple[str, ...]] = ("LlamaDecoderLayer", "CLIPEncoderLayer")
    lora_target_modules: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip

    def __init__(
        self,
        config: YourModelConfig,
        hidden_size: int | None,
        unnorm_key: str | None,
        action_dim: int,
        value_head: bool = True,
        detach_value: bool = True,
    ) -> None:
        super().__init__(config)
        # 16-bit logits would be too coarse to sample from.
        self.lm_head.__class__ = LinearInFloat32
        self._init_logits_processor()
        action_norm_stats = self.get_action_stats(unnorm_key)
        self.action_normalizer = ActionNormalizer(action_norm_stats, action_dim)
        self.min_action = np.array(action_norm_stats["q01"])
        self.max_action = np.array(action_norm_stats["q99"])
        self.action_tokenizer = ActionTokenizer(config.n_action_bins, config.text_config.vocab_size)
        self.value_head = ValueHead(hidden_size or config.text_config.hidden_size) if value_head else None
        self.detach_value = detach_value
        self.action_dim = action_dim
        self.post_init()

    def _init_logits_processor(self) -> None:
        self.logits_processors = LogitsProcessorList()
        self.logits_processors.append(YourLogitsProcessor(self.config.n_action_bins))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ValueHead):
            module.reset_parameters()

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Put the first camera's image tokens before the instruction."""
        image_tokens = (
            self.processor.tokenizer.convert_ids_to_tokens(self.config.image_token_id) * self.config.image_seq_length
        )
        prompts = [f"{image_tokens}{instruction.lower()}" for instruction in self.instructions(observation)]
        inputs = self.processor(prompts, next(iter(observation.images.values())))
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
        **kwargs: Any,
    ) -> ActionPrediction:
        """Generate ``A`` action tokens (see ``ActionModel``); ``logits [B, A, V]`` are unprocessed."""
        draw = DrawLogitsProcessor(input_ids.shape[1], do_sample, temperature, uniforms)
        generated = self.generate(
            input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values.to(self.dtype),
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
            do_sample=False,
            logits_processor=LogitsProcessorList([*self.logits_processors, draw]),
            min_new_tokens=self.num_logprobs,
            max_new_tokens=self.num_logprobs,
            **kwargs,
        )
        sequences = generated.sequences
        actions = self.decode_actions(sequences)
        logits = torch.stack(generated.logits, dim=1)
        values = self._values(generated.hidden_states[0][-1][:, -1])
        return ActionPrediction(actions, sequences, logits, values)

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        """Return log-probabilities float32 ``[B, A]`` of the sampled tokens, over action tokens only."""
        tokens = prediction.sequences[:, -self.num_logprobs :] - self.action_tokenizer.first_token
        return token_logprobs(prediction.logits[..., -self.config.n_action_bins :], tokens, temperature)[0]

    def _score(self, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, A, n_action_bins]``, and the hidden state ``[B, H]`` at the end of the prompt."""
        prompt_mask = inputs["attention_mask"]
        mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(tokens), self.num_logprobs - 1)], dim=1)
        outputs = self.model(
            input_ids=torch.cat([inputs["input_ids"], tokens[:, :-1]], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            pixel_values=inputs["pixel_values"].to(self.dtype),
            use_cache=False,
        )
        hidden_states = outputs.last_hidden_state[:, -self.num_logprobs :]
        action_rows = self.lm_head.weight[-self.config.n_action_bins :]
        return linear_in_float32(hidden_states, action_rows), hidden_states[:, 0]
