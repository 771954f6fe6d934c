"""Convert images and prompts to OpenVLA's input tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.modules.image_resize import (
    crop_and_resize,
    jpeg_round_trip,
    resize_bicubic,
    resize_lanczos3,
)
from rlinf.models.embodiment.modules.tokenizer import load_tokenizer
from rlinf.models.embodiment.openvla.config import CROP_AREA, OPENVLA_PROMPT, OpenVLAConfig
from rlinf.models.loading import field_error

STRATEGIES = ("resize-naive", "letterbox", "resize-crop")


class PrismaticImageProcessor(BaseImageProcessor):
    """Resize and normalise images for each tower, and concatenate the towers' channels.

    Public ``preprocessor_config.json`` files contain settings twice. The ``tvf_*`` ones take precedence, because
    checkpoints were trained with them (``tvf_normalize_params`` rounded to bfloat16).

    Args:
        use_fused_vision_backbone: Whether there are two towers.
        image_resize_strategy: ``resize-naive`` (ignore the aspect ratio), ``resize-crop`` (resize the shorter side, crop
            the centre) or ``letterbox`` (first pad to a centred square with the last tower's mean colour, then ``resize-crop``).
        input_sizes: Input shape ``[3, H, W]`` for each tower.
        interpolations: Must be ``bicubic``.
        means, stds: Values per tower, used if ``tvf_normalize_params`` is absent.
        image_preparation, do_center_crop: See ``OpenVLAConfig``; done first, with the first tower's size as target.
        **kwargs: ``tvf_*`` settings; all further entries are only stored for saving.
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self,
        use_fused_vision_backbone: bool = False,
        image_resize_strategy: str = "resize-naive",
        input_sizes: Sequence[Sequence[int]] | None = None,
        interpolations: Sequence[str] | None = None,
        means: Sequence[Sequence[float]] | None = None,
        stds: Sequence[Sequence[float]] | None = None,
        image_preparation: str = "none",
        do_center_crop: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.image_resize_strategy = image_resize_strategy
        self.input_sizes = [list(size) for size in input_sizes or [(3, 224, 224)]]
        self.interpolations = list(interpolations or ["bicubic"] * len(self.input_sizes))
        self.means = [list(mean) for mean in means or [[0.5] * 3] * len(self.input_sizes)]
        self.stds = [list(std) for std in stds or [[0.5] * 3] * len(self.input_sizes)]
        self.image_preparation = image_preparation
        self.do_center_crop = do_center_crop
        if image_resize_strategy not in STRATEGIES:
            problem = f"image_resize_strategy is '{image_resize_strategy}'; expected {' or '.join(STRATEGIES)}"
            raise ConfigError(problem)
        if set(self.interpolations) != {"bicubic"}:
            raise ConfigError(f"interpolations are {self.interpolations}; only bicubic is supported.")

    @property
    def normalization(self) -> list[tuple[list[float], list[float]]]:
        """(mean, std) used for each tower."""
        params = getattr(self, "tvf_normalize_params", None)
        if params is not None:
            return [(list(tower["mean"]), list(tower["std"])) for tower in params]
        return list(zip(self.means, self.stds, strict=True))

    @classmethod
    def for_config(cls, config: OpenVLAConfig) -> PrismaticImageProcessor:
        """Build the processor for a model without a ``preprocessor_config.json``."""
        imagenet = {"mean": [0.484375, 0.455078125, 0.40625], "std": [0.228515625, 0.2236328125, 0.224609375]}
        half = {"mean": [0.5] * 3, "std": [0.5] * 3}
        params = [dict(imagenet if spec.kind == "dinov2" else half) for spec in config.vision_towers()]
        for tower in params:
            tower["mean"], tower["std"] = config.image_mean or tower["mean"], config.image_std or tower["std"]
        return cls(
            config.use_fused_vision_backbone,
            config.image_resize_strategy,
            input_sizes=[[3, size, size] for size in config.image_sizes],
            means=[tower["mean"] for tower in params],
            stds=[tower["std"] for tower in params],
            tvf_normalize_params=params,
        )

    def apply_transform(self, image: Image.Image) -> Tensor:
        """Convert a PIL image to float32 ``[3 * towers, H, W]``."""
        pixels = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.uint8))
        return self.preprocess_tensors(pixels.permute(2, 0, 1)[None])[0]

    def _geometry(self, tower: int) -> tuple[int | tuple[int, int], tuple[int, int]]:
        """Return the resize size (an int for the shorter side) and the crop height and width, preferring ``tvf_*``."""
        _, height, width = self.input_sizes[tower]
        size: Any = (height, width) if self.image_resize_strategy == "resize-naive" else height
        crop: Any = (height, width)
        if getattr(self, "tvf_resize_params", None) is not None:
            size = self.tvf_resize_params[tower]["size"]
        if getattr(self, "tvf_crop_params", None) is not None:
            crop = self.tvf_crop_params[tower]["output_size"]
        size = size if isinstance(size, int) else tuple(size)
        size = size[0] if isinstance(size, tuple) and len(size) == 1 else size
        return size, (crop, crop) if isinstance(crop, int) else tuple(crop)

    @property
    def _letterbox_fill(self) -> list[int] | None:
        """Colour used to pad images to a square, or None without padding."""
        letterbox = getattr(self, "tvf_do_letterbox", None)
        if not (self.image_resize_strategy == "letterbox" if letterbox is None else letterbox):
            return None
        fill = getattr(self, "tvf_letterbox_fill", None)
        return list(fill) if fill is not None else [int(255 * value) for value in self.normalization[-1][0]]

    def preprocess_tensors(self, images: Tensor, is_resized: bool = False, is_cropped: bool = False) -> Tensor:
        """Convert uint8 ``[B, 3, H, W]`` to float32 ``[B, 3 * towers, H', W']`` on its device, as the public processor bit for bit.

        Set ``is_resized`` for images from ``resize_once``, and ``is_cropped`` to skip ``do_center_crop``.
        """
        num_towers = len(self.normalization)
        resized = [images] * num_towers if is_resized else self._resize_for_towers(images, is_cropped)
        towers = [_normalize(batch, *statistics) for batch, statistics in zip(resized, self.normalization, strict=True)]
        return towers[0] if num_towers == 1 else torch.cat(towers, dim=1)

    def resize_once(self, images: Tensor) -> Tensor | None:
        """Resize uint8 ``[B, 3, H, W]``; return None if the towers need different sizes, or larger images than these."""
        geometries = {self._geometry(tower) for tower in range(len(self.normalization))}
        _, (height, width) = next(iter(geometries))
        fits = len(geometries) == 1 and height * width <= images.shape[-2] * images.shape[-1]
        return self._resize_for_towers(images)[0] if fits else None

    def _resize_for_towers(self, images: Tensor, is_cropped: bool = False) -> list[Tensor]:
        size = tuple(self.input_sizes[0][1:])
        if self.image_preparation == "rlds":
            images = resize_lanczos3(jpeg_round_trip(images), size)
        if self.do_center_crop and not is_cropped:
            images = crop_and_resize(images, CROP_AREA, size)
        geometries = [self._geometry(tower) for tower in range(len(self.normalization))]
        resized = {geometry: self._resize(images, *geometry) for geometry in dict.fromkeys(geometries)}
        return [resized[geometry] for geometry in geometries]

    def _resize(self, images: Tensor, size: int | tuple[int, int], crop: tuple[int, int]) -> Tensor:
        if self._letterbox_fill is not None:
            height, width = images.shape[-2:]
            side = max(height, width)
            # If the difference is odd, the result is one pixel short of a square, as in the public code.
            left, top = (side - width) // 2, (side - height) // 2
            colour = to_device(torch.tensor(self._letterbox_fill, dtype=images.dtype), images.device).view(1, 3, 1, 1)
            square = colour.repeat(len(images), 1, height + 2 * top, width + 2 * left)
            square[..., top : top + height, left : left + width] = images
            images = square
        target = size
        if isinstance(size, int):  # the shorter side; the longer one is scaled equally and rounded down
            height, width = images.shape[-2:]
            target = (size, int(size * width / height)) if height <= width else (int(size * height / width), size)
        images = resize_bicubic(images, target)
        if target == crop:
            return images
        top, left = (round((full - part) / 2.0) for full, part in zip(target, crop, strict=True))
        # Negative values crop; if the crop is larger than the image, the border is black.
        return pad(images, (-left, left + crop[1] - target[1], -top, top + crop[0] - target[0]))

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **_: object) -> BatchFeature:
        """Process one PIL image or array ``[H, W, 3]``, or a list of them."""
        batch = images if isinstance(images, (list, tuple)) else [images]
        pil_images = [img if isinstance(img, Image.Image) else Image.fromarray(np.asarray(img)) for img in batch]
        pixels = torch.stack([self.apply_transform(pil_image) for pil_image in pil_images])
        return BatchFeature({"pixel_values": pixels.float().numpy()}, tensor_type=return_tensors)


def _normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return ``(x / 255 - mean) / std`` for uint8 images."""
    # Divide by a tensor to match the CPU's result: for a Python number, CUDA multiplies by the inverse. The channels of a
    # pixel are adjacent in camera images, and processing complete rows is several times faster than three values at a time.
    rows = images.permute(0, 2, 3, 1).flatten(2).float()  # [B, H, W * 3]
    width = images.shape[-1]
    white, mean, std = (to_device(torch.tensor(values), rows.device) for values in ([255.0], mean, std))
    rows.div_(white).sub_(mean.repeat(width)).div_(std.repeat(width))
    return rows.unflatten(2, (width, -1)).permute(0, 3, 1, 2)


class PrismaticProcessor:
    """A model's image processor and tokenizer; ``processor(text, images)`` returns the input tensors for a forward pass.

    Args:
        tokenizer: Tokenizer with a padding and a BOS token; its padding side is set to the left.
        prompt_template: Text that contains ``{instruction}``, used by ``encode_instructions``.
        prompt_suffix_token_id: Token appended to prompts that do not end with it, or None.
        max_prompt_len: Length to which prompts are padded; None uses the longest prompt in the batch.
    """

    def __init__(
        self,
        image_processor: PrismaticImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        prompt_template: str = OPENVLA_PROMPT,
        prompt_suffix_token_id: int | None = None,
        max_prompt_len: int | None = None,
        **_: object,
    ) -> None:
        tokenizer.padding_side = "left"
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.prompt_template, self.prompt_suffix_token_id = prompt_template, prompt_suffix_token_id
        self.max_prompt_len = max_prompt_len
        self._prompt_ids: dict[str, list[int]] = {}

    @classmethod
    def from_pretrained(
        cls, path: str, tokenizer: PreTrainedTokenizerBase | None = None, image_processor: Any = None, **kwargs: Any
    ) -> PrismaticProcessor:
        remote = {"trust_remote_code": kwargs.pop("trust_remote_code", False)}
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path, padding_side="left", **remote)
        return cls(image_processor or PrismaticImageProcessor.from_pretrained(path), tokenizer, **kwargs)

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        self.tokenizer.save_pretrained(str(save_directory))
        self.image_processor.save_pretrained(str(save_directory))

    def __call__(
        self, text: str | Sequence[str], images: Any, return_tensors: str | None = "pt", **_: object
    ) -> BatchFeature:
        """Tokenise complete prompts (see ``encode``) and process images."""
        input_ids, attention_mask = self.encode([text] if isinstance(text, str) else list(text))
        pixel_values = self.image_processor.preprocess(images, return_tensors="pt")["pixel_values"]
        data = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
        return BatchFeature(data, tensor_type=return_tensors)

    def encode_instructions(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.encode([self.prompt_template.format(instruction=text.lower()) for text in instructions])

    def prompt_lengths(self, instructions: Sequence[str]) -> list[int]:
        if self.max_prompt_len is not None:
            return [self.max_prompt_len] * len(instructions)
        return [len(self._ids(self.prompt_template.format(instruction=text.lower()))) for text in instructions]

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return int64 ``input_ids`` and ``attention_mask`` ``[B, L]``: BOS, padding, then the text."""
        rows = [self._ids(prompt) for prompt in prompts]
        longest = max(len(row) for row in rows)
        if self.max_prompt_len is not None:
            if longest > self.max_prompt_len:
                problem = f"A prompt has {longest} tokens, but max_prompt_len is {self.max_prompt_len}"
                raise field_error(problem, f"max_prompt_len={longest}")
            longest = self.max_prompt_len
        pad = self.tokenizer.pad_token_id
        pads = [longest - len(row) for row in rows]
        ids = [row[:1] + [pad] * n + row[1:] for row, n in zip(rows, pads, strict=True)]
        mask = [[1] + [0] * n + [1] * (longest - n - 1) for n in pads]
        return torch.tensor(ids), torch.tensor(mask)

    def _ids(self, prompt: str) -> list[int]:
        ids = self._prompt_ids.get(prompt)
        if ids is None:
            ids = list(self.tokenizer(prompt, add_special_tokens=True)["input_ids"])
            if not ids or ids[0] != self.tokenizer.bos_token_id:
                ids = [self.tokenizer.bos_token_id, *ids]
            if self.prompt_suffix_token_id is not None and ids[-1] != self.prompt_suffix_token_id:
                ids.append(self.prompt_suffix_token_id)
            # A server's clients can send arbitrary prompts, so limit the size of the cache.
            if len(self._prompt_ids) >= 4096:
                self._prompt_ids.clear()
            self._prompt_ids[prompt] = ids
        return ids


def load_processor(
    tokenizer_config: TokenizerConfig, model_config: OpenVLAConfig, path: str | None
) -> PrismaticProcessor:
    """Load tokenizer and image processor from ``path``, or use the packaged tiny tokenizer without one."""
    tokenizer = load_tokenizer(path, model_config.text_config.vocab_size)
    if path is not None and (Path(path) / "preprocessor_config.json").is_file():
        images = PrismaticImageProcessor.from_pretrained(path)
    else:
        images = PrismaticImageProcessor.for_config(model_config)
    # These steps, which are applied first, are not part of public preprocessor files.
    images.image_preparation, images.do_center_crop = model_config.image_preparation, model_config.center_crop
    names = ("prompt_template", "prompt_suffix_token_id", "max_prompt_len")
    return PrismaticProcessor(images, tokenizer, **{name: getattr(model_config, name) for name in names})
