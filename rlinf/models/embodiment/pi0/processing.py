"""Convert images, states and prompts to pi0's input tensors, and its actions back to env units."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.modules.image_resize import resize_bilinear
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.embodiment.modules.tokenizer import load_tokenizer
from rlinf.models.embodiment.pi0.config import Pi0Config
from rlinf.models.loading import field_error
from rlinf.number_formats import format_count
from rlinf.types import Statistics

EPSILON = 1e-6
_NUM_STATE_BINS = 256


class StatisticsNormalizer:
    """Convert states or actions between env units and the network's units, in float64 and without clipping.

    With mean and std, ``n = (x - mean) / (std + 1e-6)``; with quantiles, ``n = 2 (x - q01) / (q99 - q01 + 1e-6) - 1``.
    Where ``mask`` is false, ``n = x``.

    Args:
        stats: ``mean`` and ``std``, or ``q01`` and ``q99``; trailing constant padding is removed.
        dim: Width of the states or actions.
        name: ``action`` or ``proprio``, used in messages.
    """

    def __init__(self, stats: Statistics, dim: int, use_quantiles: bool, name: str) -> None:
        wanted = ("q01", "q99") if use_quantiles else ("mean", "std")
        if any(key not in stats for key in wanted):
            raise field_error(
                f"use_quantile_norm={use_quantiles} needs {' and '.join(wanted)} of '{name}', but the statistics contain "
                f"{', '.join(stats)}", f"use_quantile_norm={str(not use_quantiles).lower()}",
            )  # fmt: skip
        self.range = Range.of(stats, wanted, name)
        first, second = (np.array(stats[key], dtype=np.float64) for key in wanted)
        spread = second - first if use_quantiles else second
        described = max(np.flatnonzero(spread).max(initial=-1) + 1, min(len(spread), dim))
        if described != dim:
            given, fix = f"the environment's state has {dim}", "env.state=proprio"
            if name == "action":
                given, fix = f"model.action_token_len={dim}", f"model.action_token_len={described}"
            raise ConfigError(
                f"The statistics of '{name}' have {format_count(described, 'dimension')}, but {given}; expected equal. "
                f"Set {fix}, or model.unnorm_key=<a different data set>"
            )
        first, second = first[:dim], second[:dim]
        mask = np.array(stats.get("mask") or [True] * dim, dtype=bool)[:dim]
        scale = (second - first + EPSILON) / 2 if use_quantiles else second + EPSILON
        centre = first + scale if use_quantiles else first
        self.scale = torch.from_numpy(np.where(mask, scale, 1.0))
        self.centre = torch.from_numpy(np.where(mask, centre, 0.0))

    def normalize(self, x: Tensor) -> Tensor:
        """Map env units ``[..., dim]`` to the network's, float64."""
        return (x.double() - to_device(self.centre, x.device)) / to_device(self.scale, x.device)

    def unnormalize(self, normalized: Tensor) -> Tensor:
        """Map the network's units ``[..., dim]`` to env units, float64."""
        device = normalized.device
        return normalized.double() * to_device(self.scale, device) + to_device(self.centre, device)


def resize_with_pad(images: Tensor, size: int) -> Tensor:
    """Resize uint8 ``[B, 3, H, W]`` to ``size x size`` with black borders, preserving the aspect ratio.

    It is bilinear without antialiasing, on uint8 and with sizes rounded down, and bit-identical to openpi on a CPU.
    """
    # Not in float32, where a fifth of the pixels would differ from openpi's by one grey value.
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    ratio = max(height, width) / size
    new_height, new_width = int(height / ratio), int(width / ratio)
    resized = resize_bilinear(images, (new_height, new_width))
    top, left = (size - new_height) // 2, (size - new_width) // 2
    padding = (left, size - new_width - left, top, size - new_height - top)
    return torch.nn.functional.pad(resized, padding)


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Return bins 0..255 for states in [-1, 1], -1 below this range, and 255 above it."""
    return np.digitize(state, np.linspace(-1.0, 1.0, _NUM_STATE_BINS + 1)[:-1]) - 1


class Pi0Processor:
    """Convert prompts to token ids: the instruction and a newline, or ``Task: <instruction>, State: <bins>;\\nAction: ``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_token_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_token_len = max_token_len
        # The newline is encoded separately, as in the public code.
        self._newline = tokenizer.encode("\n", add_special_tokens=False)

    def encode(self, instructions: Sequence[str], states: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return int64 ids and a bool mask ``[B, L]``, right-padded to the longest prompt.

        Underscores and newlines are replaced by spaces. ``states [B, S]`` are in the network's units; None omits them.
        """
        texts = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        ending = self._newline
        if states is not None:
            bins = [" ".join(map(str, row)) for row in discretize_state(states)]
            texts = [f"Task: {text}, State: {row};\nAction: " for text, row in zip(texts, bins, strict=True)]
            ending = []
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = [[self.tokenizer.bos_token_id, *row, *ending] for row in encoded]
        longest = max(len(row) for row in rows)
        if longest > self.max_token_len:
            problem = f"A prompt has {longest} tokens, but max_token_len is {self.max_token_len}"
            raise field_error(problem, f"max_token_len={longest}")
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), True
        return ids, mask

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        self.tokenizer.save_pretrained(str(save_directory))


def load_processor(tokenizer_config: TokenizerConfig, model_config: Pi0Config, path: str | None) -> Pi0Processor:
    """Load the tokenizer from ``path``, or use the packaged tiny one without a path."""
    tokenizer = load_tokenizer(path, model_config.vocab_size)
    return Pi0Processor(tokenizer, model_config.longest_prompt)
