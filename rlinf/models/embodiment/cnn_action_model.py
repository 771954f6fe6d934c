"""A small Gaussian policy with images and instruction text as input; a baseline that a VLA should beat."""

import copy
import math
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.embodiment.mlp_action_model import MLPConfig, MLPForRLActionPrediction
from rlinf.models.precision import without_autocast
from rlinf.types import EnvSpec, Observation

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride of the convolutions (Mnih et al. 2015)."""

MAX_WORDS = 32
"""Maximum number of tokens per instruction that a replay buffer stores."""


@dataclass
class CNNConfig(MLPConfig):
    """Configuration of the image policy; see ``MLPConfig`` for inherited fields.

    Args:
        image_size: Side of the square images in pixels, at least 36.
        num_images_in_input: Number of cameras that the policy reads, in the observation's order.
        num_words: Number of rows in the embedding table; a word's row is its CRC-32 modulo this number.
        state_dim: Width of ``Observation.state``, read in addition to the images; 0 ignores it.
        image_mean, image_std: Mean and std used to normalise images in [0, 1].
    """

    model_type: ClassVar[str] = "cnn"
    manifest_fields: ClassVar[tuple[str, ...]] = ("image_mean", "image_std")

    image_size: int = 64
    num_images_in_input: int = 1
    feature_dim: int = 256
    num_words: int = 1024
    state_dim: int = 0
    image_mean: float = 0.5
    image_std: float = 0.5


class CNNForRLActionPrediction(MLPForRLActionPrediction):
    """Policy and critic on top of three convolutions and a linear layer, modulated by the instruction.

    The image features are multiplied by ``1 + w`` (the scale in FiLM, Perez et al. 2018), where ``w`` is the mean embedding
    of the instruction's words, regardless of order.
    """

    config_class = CNNConfig
    needs_state, without_state = False, "model.init_config.state_dim=0"
    base_model_prefix = "cnn"
    main_input_name = "images"
    # log_std is not listed: it is a bare parameter, which FSDP cannot store in a different number format.
    float32_modules: ClassVar[tuple[str, ...]] = ("policy", "value_head")

    @classmethod
    def check_env(cls, config: CNNConfig, env: EnvSpec) -> None:
        super().check_env(config, env)
        if env.image_size != config.image_size:
            raise ConfigError(
                f"The policy expects images of {config.image_size} x {config.image_size} pixels, but the environment provides "
                f"{env.image_size} x {env.image_size}. Set env.image_size={config.image_size}"
            )

    def _add_encoder(self, config: CNNConfig) -> int:
        channels, side, layers = 3 * config.num_images_in_input, config.image_size, []
        for width, kernel, stride in LAYERS:
            layers += [nn.Conv2d(channels, width, kernel, stride), nn.ReLU()]
            channels, side = width, (side - kernel) // stride + 1
        if side < 1:
            problem = f"image_size is {config.image_size}; expected at least 36 pixels"
            raise ConfigError(f"{problem}. Set model.init_config.image_size=64")
        layers += [nn.Flatten(), nn.Linear(channels * side**2, config.feature_dim), nn.ReLU()]
        self.encoder = nn.Sequential(*layers)
        self.word_embedding = nn.EmbeddingBag(config.num_words, config.feature_dim, mode="mean", padding_idx=0)
        return config.feature_dim + config.state_dim

    def _values(self, features: Tensor) -> Tensor:
        return super()._values(features.detach() if self.detach_value else features)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight, math.sqrt(2.0))
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.EmbeddingBag):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.weight[0])

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Send uint8 images, token ids (and the state, if used) to the model's device."""
        config = self.config
        cameras = self._camera_images(observation, config.num_images_in_input)
        images = torch.cat([torch.from_numpy(camera) for camera in cameras], dim=-1)
        if images.shape[1:3] != (config.image_size, config.image_size):
            raise ConfigError(
                f"The policy expects images of {config.image_size} x {config.image_size} pixels, but the environment provides "
                f"{images.shape[1]} x {images.shape[2]}. Set env.image_size={config.image_size}"
            )
        # Row 0 of the embedding table is padding.
        rows = config.num_words - 1
        texts = [text.lower().split() for text in self.instructions(observation)]
        words = [[1 + zlib.crc32(word.encode()) % rows for word in text] for text in texts]
        longest = max(1, *(len(text) for text in words))
        token_ids = torch.tensor([text + [0] * (longest - len(text)) for text in words])
        inputs = {"images": to_device(images, self.device), "token_ids": to_device(token_ids, self.device)}
        return inputs | (super().preprocess(observation) if config.state_dim else {})

    @property
    def feature_dim(self) -> int:
        """Number of feature dimensions, as for ``mlp``; for ``inputs``, the number of bytes of images, tokens and state."""
        config = self.config
        if self.feature_kind != "inputs":
            return super().feature_dim
        return config.image_size**2 * 3 * config.num_images_in_input + 4 * (MAX_WORDS + config.state_dim)

    @property
    def feature_dtype(self) -> torch.dtype:
        return torch.uint8 if self.feature_kind == "inputs" else torch.float32

    def make_encoder(self) -> tuple[nn.Module, int]:
        """Return a trainable copy of the encoder that reads the output of ``_as_numbers``."""
        return _Encoder(self), self.config.feature_dim + self.config.state_dim

    def _as_numbers(self, images: Tensor, token_ids: Tensor, state: Tensor | None = None) -> Tensor:
        if token_ids.shape[1] > MAX_WORDS:
            raise ConfigError(
                f"An instruction has {token_ids.shape[1]} words; expected at most {MAX_WORDS} for SAC or TD3 from scratch. "
                "Set env.instruction='do the task', or algorithm=ppo"
            )
        rows = nn.functional.pad(token_ids, (0, MAX_WORDS - token_ids.shape[1])).to(torch.int32)
        parts = [images.flatten(1), rows.view(torch.uint8)] + ([] if state is None else [state.view(torch.uint8)])
        return torch.cat(parts, 1)

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        return [len(text.split()) for text in self.instructions(observation)]

    def _features(self, images: Tensor, token_ids: Tensor, state: Tensor | None = None) -> Tensor:
        return _encoded(self, images, token_ids, self._normalized(state))


class _Encoder(nn.Module):
    """A copy of a policy's encoder that reads the byte vectors returned by ``_as_numbers``."""

    def __init__(self, policy: CNNForRLActionPrediction) -> None:
        super().__init__()
        self.config = policy.config
        self.encoder, self.word_embedding = copy.deepcopy(policy.encoder), copy.deepcopy(policy.word_embedding)
        self.requires_grad_(True)

    def forward(self, numbers: Tensor) -> Tensor:
        side, state_dim = self.config.image_size, self.config.state_dim
        sizes = [numbers.shape[1] - 4 * (MAX_WORDS + state_dim), 4 * MAX_WORDS, 4 * state_dim]
        images, token_ids, state = numbers.split(sizes, 1)
        # Copied, because a view with a different dtype needs aligned memory.
        rows = token_ids.clone().view(torch.int32).long()
        state = state.clone().view(torch.float32) if state_dim else None
        with without_autocast(images):
            return _encoded(self, images.unflatten(1, (side, side, -1)), rows, state).float()


def _encoded(parts: Any, images: Tensor, token_ids: Tensor, state: Tensor | None) -> Tensor:
    """Encode images, instruction tokens and state with the modules of ``parts``."""
    config = parts.config
    pixels = images.permute(0, 3, 1, 2).to(parts.encoder[0].weight.dtype).contiguous()
    features = parts.encoder((pixels / 255.0 - config.image_mean) / config.image_std)
    features = features * (1.0 + parts.word_embedding(token_ids))
    return features if state is None else torch.cat([features.float(), state], dim=1)
