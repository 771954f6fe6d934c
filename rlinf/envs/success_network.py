"""The networks of a success classifier: an image and the sentence of the task to one number."""

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
"""Rows of every call: other numbers of rows may round differently, and an episode must not depend on its neighbours."""


def _layer(channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, WIDTH, kernel, stride, kernel // 2), nn.GroupNorm(GROUPS, WIDTH)]


class SuccessNetwork(nn.Module):
    """Convolutions whose channels the sentence scales and shifts (Perez et al. 2018, FiLM), and their maximum over the image."""

    def __init__(self, num_sentences: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_layer(3, 5, 2), nn.ReLU(), *_layer(WIDTH, 3, 2), nn.ReLU(), *_layer(WIDTH, 3, 1))
        self.sentences = nn.Embedding(num_sentences, 2 * WIDTH)
        self.decoder = nn.Sequential(*_layer(WIDTH, 3, 1), nn.ReLU(), *_layer(WIDTH, 3, 1), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, images: Tensor, sentences: Tensor) -> Tensor:
        """Return logits ``[B]`` of images ``[B, H, W, 3]`` in 0 to 255, and sentences, int64 ``[B]``."""
        found = self.encoder(images.permute(0, 3, 1, 2).float() / 127.5 - 0.5)
        scale, shift = self.sentences(sentences)[:, :, None, None].chunk(2, 1)
        found = self.decoder(torch.relu(found * (1 + scale) + shift))
        return self.head(found.amax((2, 3)))[:, 0]


class SuccessClassifier:
    """Trained networks, with what ``classifier.json`` says: ``networks``, ``camera``, ``image_shape``, ``instructions``, ``threshold``."""

    def __init__(self, networks: Sequence[SuccessNetwork], about: dict[str, Any]) -> None:
        self.networks, self.about = nn.ModuleList(networks).eval(), about

    @classmethod
    def load(cls, folder: str) -> SuccessClassifier:
        """Read the folder of ``save``; the process's random numbers are not used."""
        about = read_classifier(folder)
        with torch.device("meta"):
            networks = [SuccessNetwork(len(about["instructions"])) for _ in range(about["networks"])]
        found = cls(networks, about)
        found.networks.load_state_dict(load_file(Path(folder).expanduser() / CLASSIFIER_WEIGHTS), assign=True)
        return found

    def save(self, folder: Path) -> None:
        """Write weights and description; the description comes last."""
        write_bytes(folder / CLASSIFIER_WEIGHTS, save(self.networks.state_dict()))
        write_text(folder / CLASSIFIER_FILE, json.dumps(self.about, indent=1))

    @torch.no_grad()
    def logits(self, images: np.ndarray, sentences: np.ndarray) -> np.ndarray:
        """Return the networks' mean logit, float32 ``[N]``, for images ``[N, H, W, 3]`` and numbers of sentences, int64 ``[N]``."""
        found = []
        with torch.autocast("cpu", enabled=False):  # an env may step inside the policy's autocast
            for first in range(0, len(images), NUM_ROWS):
                rows = np.minimum(first + np.arange(NUM_ROWS), len(images) - 1)
                shown, said = torch.from_numpy(images[rows]), torch.from_numpy(sentences[rows])
                found.append(torch.stack([network(shown, said) for network in self.networks]).mean(0).numpy())
        return np.concatenate(found)[: len(images)]

    def sees_success(self, observation: Observation) -> np.ndarray:
        """Return bool ``[B]``: the logit is at least the threshold. Raise ConfigError for a sentence that was not in training."""
        known = self.about["instructions"]
        for sentence in observation.instruction:
            if sentence not in known:
                raise ConfigError(
                    f"The success classifier does not know the instruction '{sentence}'; required: one of its {len(known)}, such as "
                    f"'{known[0]}'. Train it on episodes with this instruction, or set env.success_classifier=null"
                )
        sentences = np.array([known.index(sentence) for sentence in observation.instruction])
        return self.logits(observation.images[self.about["camera"]], sentences) >= self.about["threshold"]
