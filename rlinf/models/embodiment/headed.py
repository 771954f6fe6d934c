"""A frozen policy and the head that learns on top of it, as one policy: it acts, is evaluated, saved and loaded like any other."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import HeadConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import write_text
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.heads import HEADS
from rlinf.models.heads.base import Head
from rlinf.models.sampling import draw_uniforms
from rlinf.options import from_mapping, override_text
from rlinf.types import ActionEvaluation, ActionPrediction, Observation

HEAD_SETTINGS, HEAD_WEIGHTS = "head.json", "head.safetensors"
"""Files of a head, next to those of the policy that it learns on."""


class HeadedPolicy(ActionModel, nn.Module):
    """A frozen policy and a head.

    Args:
        base: The policy; its parameters are frozen.
        head: What learns.
        action_low, action_high: Bounds of an action of the env, float32 ``[D]``.
    """

    predicts_values: ClassVar[bool] = False
    value_head = None

    def __init__(self, base: ActionModel, head: Head, action_low: Tensor, action_high: Tensor) -> None:
        nn.Module.__init__(self)
        if not bool((torch.isfinite(action_low) & torch.isfinite(action_high) & (action_low < action_high)).all()):
            raise ConfigError(
                f"The actions of the env lie between {action_low.tolist()} and {action_high.tolist()}; required: finite bounds, "
                "because a head corrects by shares of this range. Set algorithm=ppo, or give the env bounds"
            )
        self.base, self.head = base.requires_grad_(False), head
        device = next(base.parameters()).device
        self.head.to(device)
        self.register_buffer("action_low", action_low.float().to(device))
        self.register_buffer("action_high", action_high.float().to(device))
        self.action_dim, self.action_chunks_len = base.action_dim, base.action_chunks_len
        self.detach_value = True

    @property
    def config(self) -> Any:
        """Configuration of the frozen policy."""
        return self.base.config

    @property
    def processor(self) -> Any:
        """Input processor of the frozen policy."""
        return self.base.processor

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.action_low.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the frozen policy."""
        return next(self.base.parameters()).dtype

    def num_cameras(self, config: Any) -> int | None:
        return self.base.num_cameras(config)

    def reads_state(self, config: Any) -> bool:
        return self.base.reads_state(config)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return self.base.preprocess(observation)

    def resize_images(self, observation: Observation) -> Observation:
        return self.base.resize_images(observation)

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        return self.base.prompt_lengths(observation)

    def train(self, mode: bool = True) -> HeadedPolicy:
        """Set the mode of the head; the frozen policy stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    @torch.no_grad()
    def propose(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Ask the frozen policy once: features float32 ``[B, F]``, and its chunks in env units, float32 ``[B, N, C, D]``."""
        inputs = self.base.preprocess(observation)
        return self._propose(inputs)

    def _propose(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        proposal = self.base.propose(inputs, self.head.num_candidates, None)
        return proposal.features.float(), proposal.chunks.float()

    def normalize(self, chunks: Tensor) -> Tensor:
        """Turn chunks ``[B, N, C, D]`` in env units into halves of the range of the env, clipped: ``[B, N, C * D]``."""
        middle, half = self._middle_and_half()
        return ((chunks - middle) / half).clamp(-1.0, 1.0).flatten(2)

    def executed(self, chunks: Tensor, actions: Tensor) -> Tensor:
        """Return what the env executes for actions ``[B, C * D]`` of ``compose``: ``[B, C, D]`` in env units, within bounds.

        Where the head changes nothing, this is bit for bit the first chunk of the frozen policy, clipped to the bounds.
        """
        greedy = chunks[:, 0]
        change = (actions - self.normalize(chunks)[:, 0]).unflatten(1, greedy.shape[1:])
        wanted = greedy + self._middle_and_half()[1] * change
        return torch.minimum(torch.maximum(wanted, self.action_low), self.action_high)

    def _middle_and_half(self) -> tuple[Tensor, Tensor]:
        return (self.action_high + self.action_low) / 2, (self.action_high - self.action_low) / 2

    @torch.no_grad()
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        """Act: the head draws from ``uniforms``, or takes its mode, on the greedy chunk of the frozen policy."""
        features, chunks = self._propose(inputs)
        base = self.normalize(chunks)
        if do_sample:
            if uniforms is None:
                uniforms = draw_uniforms(len(features), self.num_uniforms, device=self.device)
            r = self.head.draw(features, base, normal(uniforms.to(self.device)))[0]
        else:
            r = self.head.mode(features, base)
        actions = self.executed(chunks, self.head.compose(base, r))
        mean, log_std = self.head.outputs(features, base)
        logits = torch.stack([mean, torch.zeros_like(mean) if log_std is None else log_std], -1)
        return ActionPrediction(actions, r, logits, features.new_zeros(len(features)))

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        raise NotImplementedError("A policy with a head has no log-probabilities for policy gradients")

    def evaluate_actions(
        self, inputs: dict[str, Tensor], sequences: Tensor, temperature: float = 1.0
    ) -> ActionEvaluation:
        raise NotImplementedError("A policy with a head has no log-probabilities for policy gradients")

    def save_pretrained(self, save_directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the folder of the frozen policy, and the head next to it; ``state_dict``: the weights, if gathered."""
        folder, weights = Path(save_directory), self.state_dict() if state_dict is None else state_dict
        base = {name.removeprefix("base."): tensor for name, tensor in weights.items() if name.startswith("base.")}
        own = {name: tensor.contiguous() for name, tensor in weights.items() if not name.startswith("base.")}
        self.base.save_pretrained(folder, state_dict=base)
        save_file(own, folder / HEAD_WEIGHTS)
        settings = {
            "feature_kind": self.base.feature_kind,
            "feature_dim": self.head.feature_dim,
            "noise_std": self.head.noise_std,
            "head": asdict(self.head.config),
        }
        write_text(folder / HEAD_SETTINGS, json.dumps(settings, indent=1))

    @classmethod
    def on(cls, base: ActionModel, folder: str | Path) -> HeadedPolicy:
        """Put the head of a folder on the policy of the same folder.

        Raises:
            CheckpointError: It does not fit.
        """
        folder = Path(folder)
        try:
            settings = json.loads((folder / HEAD_SETTINGS).read_text(encoding="utf-8"))
            weights = load_file(folder / HEAD_WEIGHTS)
            config = from_mapping(HeadConfig, settings["head"], "head")
            base.feature_kind = settings["feature_kind"]
            head = make_head(config, settings["feature_dim"], base, settings["noise_std"])
            policy = cls(base, head, weights.pop("action_low"), weights.pop("action_high"))
            head.load_state_dict({name.removeprefix("head."): tensor for name, tensor in weights.items()})
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"The head in {folder} cannot be loaded: {error}. Use another checkpoint") from error
        return policy.eval()


def make_head(config: HeadConfig, feature_dim: int, base: ActionModel, noise_std: float | None) -> Head:
    """Build a head with new weights for a policy; ConfigError if its name is not registered."""
    if config.name not in HEADS:
        raise ConfigError(
            f"algorithm.head.name is {override_text(config.name)!r}; required: one of {', '.join(HEADS)}. "
            "Set algorithm.head.name=residual"
        )
    return HEADS.get(config.name)(config, feature_dim, base.action_dim * base.action_chunks_len, noise_std)


def normal(uniforms: Tensor) -> Tensor:
    """Turn numbers in (0, 1) into standard normal ones."""
    return torch.special.ndtri(uniforms.double()).float()


def has_head(folder: str | Path) -> bool:
    """Return whether a folder for ``from_pretrained`` holds a head."""
    return (Path(folder) / HEAD_SETTINGS).is_file()
