"""Convert observations to the inputs of a Hugging Face VLM with the VLM's own processor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoImageProcessor, AutoTokenizer, BatchFeature, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER
from rlinf.types import Observation

if TYPE_CHECKING:
    from rlinf.models.embodiment.hf_vla.config import HfVlaConfig

DEFAULT_TEMPLATE = "{image}{instruction}"
_USED_PARTS = {"image_processor", "tokenizer", "video_processor"}


def load_vlm_processor(folder: str | Path, vlm_config: PreTrainedConfig) -> Any:
    """Load the VLM's processor without its video part, which would require additional packages."""
    processor_class = PROCESSOR_MAPPING.get(type(vlm_config), None)
    parts = set() if processor_class is None else set(processor_class.get_attributes())
    if not {"image_processor", "tokenizer"} <= parts <= _USED_PARTS:
        raise ConfigError(
            f"The processor of a '{vlm_config.model_type}' has the parts {sorted(parts) or '(no processor)'}; model=hf_vla needs "
            "exactly an image processor and a tokenizer. Set model.model_path=<folder of a different VLM>"
        )

    def get_attributes(cls: type) -> list[str]:
        return [name for name in processor_class.get_attributes() if name != "video_processor"]

    members = {"get_attributes": classmethod(get_attributes)}
    # Not renamed, because transformers looks the class up by name.
    still_class = type(processor_class.__name__, (processor_class,), members)
    try:
        fields, _ = still_class.get_processor_dict(str(folder))
        # With PIL, results do not depend on whether torchvision is installed.
        image_processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
        processor = still_class.from_args_and_dict([image_processor, tokenizer], fields)
    except ImportError as error:
        raise MissingDependencyError(f"The processor in '{folder}' needs a package: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"'{folder}' contains no {processor_class.__name__} that can be loaded ({error}). "
            "Set tokenizer.tokenizer_model=<folder with the model's processor files>"
        ) from error
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def new_vlm_processor(config: HfVlaConfig) -> Any:
    """Build a processor for a model without a folder from ``config.processor_config`` and the packaged tiny tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        special = dict(config.special_tokens or {})
        tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER, extra_special_tokens=special)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "processor_config.json").write_text(json.dumps(config.processor_config), encoding="utf-8")
        return load_vlm_processor(folder, config.vlm_config)


def reserved_ranges(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of special and added tokens as sorted ranges ``[first, end)``."""
    ranges: list[list[int]] = []
    for token in sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}):
        if ranges and ranges[-1][1] == token:
            ranges[-1][1] = token + 1
        else:
            ranges.append([token, token + 1])
    return ranges


class HfVlaProcessor:
    """Prepare prompts and images with the VLM's own processor, padding on the left."""

    def __init__(self, processor: Any, prompt_template: str | None = None) -> None:
        self.processor = processor
        self.prompt_template = prompt_template

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def image_processor(self) -> Any:
        return self.processor.image_processor

    def prompt(self, instruction: str, num_images: int) -> str:
        """Return a row's prompt, with one image token per camera, which the processor expands."""
        if self.prompt_template is None and self.processor.chat_template:
            content = [{"type": "image"}] * num_images + [{"type": "text", "text": instruction}]
            messages = [{"role": "user", "content": content}]
            return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        template = self.prompt_template or DEFAULT_TEMPLATE
        return template.format(image=self.processor.image_token * num_images, instruction=instruction)

    def prompt_lengths(self, observation: Observation) -> list[int]:
        text, options = self._prompts(observation)
        lengths = {prompt: len(self.tokenizer(prompt, **options)["input_ids"]) for prompt in set(text)}
        return [lengths[prompt] for prompt in text]

    def _prompts(self, observation: Observation) -> tuple[list[str], dict[str, bool]]:
        """Return each row's prompt, and options for the tokenizer."""
        num_images = len(observation.images)
        prompts = {text: self.prompt(text, num_images) for text in set(observation.instruction)}
        text = [prompts[instruction] for instruction in observation.instruction]
        bos = self.tokenizer.bos_token
        # The chat template may already have added the BOS token.
        has_bos = bos is not None and text[0].startswith(bos)
        return text, {"add_special_tokens": False} if has_bos else {}

    def __call__(self, observation: Observation) -> BatchFeature:
        """Convert an observation's rows, with all cameras, to the VLM's inputs."""
        cameras = list(observation.images.values())
        text, options = self._prompts(observation)
        images = [[camera[row] for camera in cameras] for row in range(len(observation))]
        return self.processor(text=text, images=images, padding=True, return_tensors="pt", **options)

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        self.processor.save_pretrained(str(save_directory))


def load_processor(tokenizer_config: TokenizerConfig, model_config: HfVlaConfig, path: str | None) -> HfVlaProcessor:
    """Load the VLM's processor from ``path``, or build it from ``model_config.processor_config`` without a path."""
    model_config.vlm_class()
    if path is None and model_config.processor_config is None:
        raise ConfigError(
            "model.init_config has no processor_config, and no folder is set from which to load a processor. "
            "Set tokenizer.tokenizer_model=<folder>, or model=hf_vla_tiny"
        )
    processor = new_vlm_processor(model_config) if path is None else load_vlm_processor(path, model_config.vlm_config)
    vocab_size, num_tokens = model_config.text_config.vocab_size, len(processor.tokenizer)
    if num_tokens > vocab_size:
        raise ConfigError(
            f"The tokenizer has {num_tokens} tokens; expected at most {vocab_size}, the size of the model's vocabulary. "
            "Set tokenizer.tokenizer_model=<the model's own tokenizer>"
        )
    end = model_config.action_tokens_end
    first = end - model_config.n_action_bins
    for low, past in reserved_ranges(processor.tokenizer):
        if low < end and past > first:
            raise ConfigError(
                f"The tokenizer in '{path}' has special tokens {low}..{past - 1}, but the action tokens are {first}..{end - 1}; expected "
                "the tokenizer used to train the policy. Set tokenizer.tokenizer_model=null"
            )
    result = HfVlaProcessor(processor, model_config.prompt_template)
    # Detect processors that do not work by a trial run on a grey image.
    grey = Observation({"camera": np.full((1, 64, 64, 3), 128, dtype=np.uint8)}, None, ["reach"])
    try:
        result(grey)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"The {type(processor).__name__} in '{path}' cannot process an image and a text ({type(error).__name__}: {error}). "
            "Set tokenizer.tokenizer_model=<folder with the model's processor files>"
        ) from error
    return result
