"""Networks of a success classifier, which compute a logit from an image and an instruction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rlinf.envs.success_override import read_classifier
from rlinf.errors import ConfigError
from rlinf.files import write_bytes, write_text
from rlinf.run_folder import CLASSIFIER_FILE, CLASSIFIER_WEIGHTS
from rlinf.types import Observation

WIDTH, GROUPS = 32, 4
NUM_ROWS = 16
"""Fixed batch size of every call: different sizes may round differently, and an episode must not depend on other envs."""


def _layer(channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, WIDTH, kernel, stride, kernel // 2), nn.GroupNorm(GROUPS, WIDTH)]


class SuccessNetwork(nn.Module):
    """A CNN with FiLM conditioning on the instruction (Perez et al. 2018), and max pooling over the image."""

    def __init__(self, num_instructions: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_layer(3, 5, 2), nn.ReLU(), *_layer(WIDTH, 3, 2), nn.ReLU(), *_layer(WIDTH, 3, 1))
        self.instructions = nn.Embedding(num_instructions, 2 * WIDTH)
        self.decoder = nn.Sequential(*_layer(WIDTH, 3, 1), nn.ReLU(), *_layer(WIDTH, 3, 1), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, images: Tensor, instructions: Tensor) -> Tensor:
        """Return logits ``[B]`` for images ``[B, H, W, 3]`` from 0 to 255 and instruction ids, int64 ``[B]``."""
        features = self.encoder(images.permute(0, 3, 1, 2).float() / 127.5 - 0.5)
        scale, shift = self.instructions(instructions)[:, :, None, None].chunk(2, 1)
        features = self.decoder(torch.relu(features * (1 + scale) + shift))
        return self.head(features.amax((2, 3)))[:, 0]


class SuccessClassifier:
    """Trained networks and ``classifier.json``: ``networks``, ``camera``, ``image_shape``, ``instructions``, ``threshold``."""

    def __init__(self, networks: Sequence[SuccessNetwork], about: dict[str, Any]) -> None:
        self.networks, self.about = nn.ModuleList(networks).eval(), about

    @classmethod
    def load(cls, folder: str) -> SuccessClassifier:
        """Load from a folder written by ``save``, without consuming the process's random numbers."""
        about = read_classifier(folder)
        with torch.device("meta"):
            networks = [SuccessNetwork(len(about["instructions"])) for _ in range(about["networks"])]
        classifier = cls(networks, about)
        classifier.networks.load_state_dict(load_file(Path(folder).expanduser() / CLASSIFIER_WEIGHTS), assign=True)
        return classifier

    def save(self, folder: Path) -> None:
        """Write weights, then the description."""
        write_bytes(folder / CLASSIFIER_WEIGHTS, save(self.networks.state_dict()))
        write_text(folder / CLASSIFIER_FILE, json.dumps(self.about, indent=1))

    @torch.no_grad()
    def logits(self, images: np.ndarray, instructions: np.ndarray) -> np.ndarray:
        """Return the networks' mean logit, float32 ``[N]``, for images ``[N, H, W, 3]`` and instruction ids, int64 ``[N]``."""
        logits = []
        # Disable autocast, because an env may step inside the policy's autocast, which would change the logits.
        with torch.autocast("cpu", enabled=False):
            for first in range(0, len(images), NUM_ROWS):
                rows = np.minimum(first + np.arange(NUM_ROWS), len(images) - 1)
                inputs = torch.from_numpy(images[rows]), torch.from_numpy(instructions[rows])
                logits.append(torch.stack([network(*inputs) for network in self.networks]).mean(0).numpy())
        return np.concatenate(logits)[: len(images)]

    def sees_success(self, observation: Observation) -> np.ndarray:
        """Return bool ``[B]``: whether the logit reaches the threshold. Raise ConfigError for an instruction not seen in training."""
        known = self.about["instructions"]
        for instruction in observation.instruction:
            if instruction not in known:
                raise ConfigError(
                    f"The success classifier was not trained on instruction '{instruction}'; expected one of its {len(known)}, such as "
                    f"'{known[0]}'. Train it on episodes with this instruction, or set env.success_classifier=null"
                )
        ids = np.array([known.index(instruction) for instruction in observation.instruction])
        return self.logits(observation.images[self.about["camera"]], ids) >= self.about["threshold"]
