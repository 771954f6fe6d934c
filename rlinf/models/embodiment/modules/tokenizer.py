"""Tokenizers of text, and of continuous actions: the last ``num_bins`` ids of the language model's vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.loading import check_choice, field_error

TINY_TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny_tokenizer"


def load_tokenizer(path: str | None, vocab_size: int) -> Any:
    """Load a folder's tokenizer, or the packaged tiny one if ``path`` is None; it pads on the left."""
    folder = str(TINY_TOKENIZER) if path is None else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{folder}' contains no tokenizer that can be loaded ({str(error).splitlines()[0]}); many public checkpoints "
            "lack one and only name the language model whose tokenizer they use. Set tokenizer.tokenizer_model=<its folder>"
        ) from error
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"The tokenizer in '{folder}' has {len(tokenizer)} tokens, but the model's vocabulary has {vocab_size}. "
            "Set tokenizer.tokenizer_model=<the model's own tokenizer>"
        )
    return tokenizer


BIN_RULES = ("midpoints", "grid")


class ActionTokenizer:
    """Divide [-1, 1] into bins with one token each (OpenVLA, Kim et al. 2024, section 3.2); ``vocab_size`` excludes padding.

    Token ``vocab_size - d`` represents bin ``d`` in ``1..num_bins``, so the lowest action has the highest id.

    With ``midpoints`` (public checkpoints), the edges are ``linspace(-1, 1, num_bins)``; ``x`` is in bin ``digitize(x, edges)``
    and decodes to the midpoint between two edges. The two lowest ids both decode to the last of the ``num_bins - 1``
    midpoints. Neither -1 nor 1 can be represented, and 0 only if ``num_bins`` is even.

    With ``grid``, the bin values *are* ``linspace(-1, 1, num_bins)``: -1, 1 and, for odd ``num_bins``, 0 are exact.
    """

    def __init__(self, num_bins: int, vocab_size: int, rule: str = "midpoints") -> None:
        check_choice("action_bin_rule", rule, BIN_RULES)
        if not 2 <= num_bins <= vocab_size:
            problem = f"n_action_bins is {num_bins}; expected between 2 and the vocabulary size {vocab_size}"
            raise field_error(problem, f"n_action_bins={min(256, vocab_size)}")
        self.num_bins, self.vocab_size, self.rule = num_bins, vocab_size, rule
        self.first_token = vocab_size - num_bins
        self.edges = np.linspace(-1.0, 1.0, num_bins)
        middles = (self.edges[:-1] + self.edges[1:]) / 2.0
        ascending = self.edges if rule == "grid" else np.append(middles, middles[-1])
        self.values = np.ascontiguousarray(ascending[::-1])
        self._by_device: dict[tuple[torch.device, bool], Tensor] = {}

    def encode(self, actions: Tensor | np.ndarray) -> Tensor:
        """Clip normalised actions of any shape to [-1, 1] and return their int64 token ids."""
        numbers = actions.detach() if isinstance(actions, Tensor) else torch.from_numpy(np.asarray(actions, np.float64))
        clipped = numbers.double().clamp(-1.0, 1.0)
        if self.rule == "grid":
            bins = ((clipped + 1.0) / 2.0 * (self.num_bins - 1)).round().long() + 1
        else:
            bins = torch.bucketize(clipped, self._on(clipped.device, self.edges), right=True)
        return self.vocab_size - bins

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the normalised float64 actions for token ids; ids outside the bins decode as the nearest bin."""
        values = self._on(tokens.device, self.values)
        return values[(tokens - self.first_token).clamp(0, self.num_bins - 1)]

    def _on(self, device: torch.device, array: np.ndarray) -> Tensor:
        """Return ``edges`` or ``values`` on a device, and cache the copy."""
        key = (device, array is self.edges)
        if key not in self._by_device:
            self._by_device[key] = to_device(torch.from_numpy(array), device)
        return self._by_device[key]
