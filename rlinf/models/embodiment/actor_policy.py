"""Combine a frozen base policy and the actor on top of it into one ordinary policy."""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.distributed.transfers import to_device
from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import write_text
from rlinf.models.actors.base import Actor, Critics
from rlinf.models.actors.kinds import ACTORS
from rlinf.models.base_weights import weights_digest
from rlinf.models.embodiment.base import ActionModel, Inputs
from rlinf.models.sampling import draw_uniforms, standard_normal
from rlinf.options import from_mapping, override_text
from rlinf.run_folder import ACTOR_SETTINGS, ACTOR_WEIGHTS, FROZEN_FOLDER
from rlinf.types import ActionEvaluation, ActionPrediction, BaseActions, Observation


class ActorPolicy(ActionModel, nn.Module):
    """A policy that consists of a frozen base policy and an actor.

    Args:
        base: Base policy; its parameters are frozen.
        action_low, action_high: Action bounds of the env, float32 ``[D]``.
        critics: Critics that choose between the options of an actor with ``critics_choose``; otherwise None.

    Attributes:
        base_sha256: Digest of the base policy's weights (``tensors_digest``), or None if unknown.
        base_store: Digest of the base policy's weight files (``weights_digest``) if they are stored in the run folder;
            ``save_pretrained`` then writes only the actor. If None, it writes both.
    """

    has_logprobs: ClassVar[bool] = False
    predicts_values: ClassVar[bool] = False
    value_head = None

    def __init__(
        self, base: ActionModel, actor: Actor, action_low: Tensor, action_high: Tensor, critics: Critics | None = None
    ) -> None:
        nn.Module.__init__(self)
        check_bounds(action_low, action_high)
        self.base, self.actor, self.critics = base.requires_grad_(False), actor, critics
        device = next(base.parameters()).device
        self.actor.to(device)
        self.register_buffer("action_low", action_low.float().to(device))
        self.register_buffer("action_high", action_high.float().to(device))
        self.action_dim, self.action_chunks_len = base.action_dim, base.action_chunks_len
        self.detach_value = True
        self.base_sha256: str | None = None
        self.base_store: str | None = None

    # Observations are preprocessed by the frozen policy.

    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def processor(self) -> Any:
        return self.base.processor

    @property
    def device(self) -> torch.device:
        return self.action_low.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.base.parameters()).dtype

    @property
    def state_range(self) -> Any:
        return self.base.state_range

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

    def train(self, mode: bool = True) -> ActorPolicy:
        """Set the actor's training mode; the frozen policy stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    @property
    def num_uniforms(self) -> int:
        return self.num_base_uniforms + self.actor.noise_dim

    @property
    def num_base_uniforms(self) -> int:
        """Number of random numbers needed to sample one observation's base candidates."""
        return (self.actor.num_candidates - 1) * self.base.num_candidate_uniforms

    @torch.no_grad()
    def query_base(self, inputs: Inputs, uniforms: Tensor) -> BaseActions:
        """Run the base policy once; return chunks in env units, float32 features, and ``sample`` if the actor sets the noise.

        The candidates are sampled with ``uniforms [B, num_base_uniforms]`` in (0, 1).
        """
        count = self.actor.num_candidates
        shape = (len(uniforms), count - 1, self.base.num_candidate_uniforms)
        outputs = self.base.propose(inputs, count, uniforms.reshape(shape), resumable=self.actor.sets_noise)
        return BaseActions(outputs.chunks.float(), outputs.features.to(self.base.feature_dtype), outputs.sample)

    @torch.no_grad()
    def select_action(self, features: Tensor, base: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the action ``[B, A]`` and the index of its option, int64 ``[B]``.

        Arguments are the features from ``query_base``, ``base_inputs`` of its chunks, and standard normal noise
        ``[B, noise_dim]`` (None returns the mode).
        """
        features = self.actor.encoder(features)
        options = self.actor.options(features, base, noise)
        if self.critics is None:
            return options[:, 0], torch.zeros(len(options), dtype=torch.int64, device=options.device)
        return self.critics.best_option(features, base, options)

    def normalize(self, chunks: Tensor) -> Tensor:
        """Map chunks ``[B, N, C, D]`` from env units to [-1, 1], clipped and flattened: ``[B, N, C * D]``."""
        middle, half = self._middle_and_half()
        return ((chunks - middle) / half).clamp(-1.0, 1.0).flatten(2)

    def base_inputs(self, chunks: Tensor) -> Tensor:
        """Normalise chunks ``[B, N, C, D]`` and return the part that the actor reads."""
        return self.normalize(chunks)[..., : self.actor.base_dim]

    @torch.no_grad()
    def env_actions(self, base_actions: BaseActions, actions: Tensor) -> Tensor:
        """Convert actions ``[B, A]`` from ``compose`` to executed actions ``[B, C, D]`` in env units, within bounds.

        If the actor sets the noise, the base policy resumes after ``query_base`` and samples with ``actions`` as noise.
        """
        if self.actor.sets_noise:
            uniforms = self.base.steering_uniforms(self.actor.config.scale * actions)
            return self._within_bounds(base_actions.sample(uniforms.unsqueeze(1))[:, 0].float())
        # Compute the change relative to the clipped base chunk and add it to that chunk, so that an actor without any
        # effect executes the base chunk bit for bit.
        greedy = self._within_bounds(base_actions.chunks[:, 0])
        change = (actions - self.normalize(base_actions.chunks)[:, 0]).unflatten(1, greedy.shape[1:])
        return self._within_bounds(greedy + self._middle_and_half()[1] * change)

    def _within_bounds(self, actions: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(actions, self.action_low), self.action_high)

    def _middle_and_half(self) -> tuple[Tensor, Tensor]:
        return (self.action_high + self.action_low) / 2, (self.action_high - self.action_low) / 2

    @torch.no_grad()
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        num_rows, split = len(next(iter(inputs.values()))), self.num_base_uniforms
        if not do_sample:
            base_uniforms, noise = to_device(uniforms_from_inputs(inputs, num_rows, split), self.device), None
        else:
            if uniforms is None:
                uniforms = draw_uniforms(num_rows, self.num_uniforms, device=self.device)
            uniforms = to_device(uniforms, self.device)
            base_uniforms, noise = uniforms[:, :split], standard_normal(uniforms[:, split:])
        base_actions = self.query_base(inputs, base_uniforms)
        features, base = base_actions.features, self.base_inputs(base_actions.chunks)
        actions, _ = self.select_action(features, base, noise)
        mean, log_std = self.actor.outputs(self.actor.encoder(features), base)
        logits = torch.stack([mean, torch.zeros_like(mean) if log_std is None else log_std], -1)
        return ActionPrediction(self.env_actions(base_actions, actions), actions, logits, mean.new_zeros(num_rows))

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        raise NotImplementedError("A policy with an actor has no log-probabilities for policy gradients")

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        raise NotImplementedError("A policy with an actor has no log-probabilities for policy gradients")

    def save_pretrained(self, save_directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        folder, weights = Path(save_directory), self.state_dict() if state_dict is None else state_dict
        base = {name.removeprefix("base."): tensor for name, tensor in weights.items() if name.startswith("base.")}
        actor_weights = {name: tensor.contiguous() for name, tensor in weights.items() if not name.startswith("base.")}
        if self.base_store is None:
            self.base.save_pretrained(folder, state_dict=base)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(actor_weights, folder / ACTOR_WEIGHTS)
        settings = {
            "feature_kind": self.base.feature_kind,
            "feature_dim": self.actor.feature_dim,
            "noise_std": self.actor.noise_std,
            "num_critics": 0 if self.critics is None else self.critics.num_critics,
            "base_sha256": self.base_sha256,
            "actor": asdict(self.actor.config),
            **({} if self.base_store is None else {"base_store": self.base_store}),
        }
        write_text(folder / ACTOR_SETTINGS, json.dumps(settings, indent=1))

    @classmethod
    def load(cls, base: ActionModel, folder: str | Path) -> ActorPolicy:
        """Load the actor in ``folder`` and combine it with its base policy; raise CheckpointError if it does not fit."""
        folder = Path(folder)
        try:
            settings = actor_settings(folder)
            weights = load_file(folder / ACTOR_WEIGHTS)
            config = from_mapping(ActorConfig, settings["actor"], "actor")
            base.feature_kind = settings["feature_kind"]
            if base.feature_kind in ("token", "keyframe") and getattr(base, "readout_token", None) is None:
                raise ValueError(
                    f"it needs model.features={base.feature_kind}, but the policy was loaded with different features"
                )
            if settings["feature_dim"] != base.feature_dim:
                raise ValueError(f"it reads {settings['feature_dim']} features, but its policy has {base.feature_dim}")
            actor = make_actor(config, base.feature_dim, base, settings["noise_std"])
            critics = Critics(config, actor.critic_input_dim, count) if (count := settings["num_critics"]) else None
            policy = cls(base, actor, weights["action_low"], weights["action_high"], critics)
            names = {name for name in policy.state_dict() if not name.startswith("base.")}
            if names != weights.keys():
                raise ValueError(f"{ACTOR_WEIGHTS} contains {sorted(weights)}; expected {sorted(names)}")
            policy.load_state_dict(weights, strict=False)
            policy.base_sha256 = settings.get("base_sha256")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"The actor in {folder} cannot be loaded: {error}. Use another checkpoint") from error
        return policy.eval()


def check_bounds(action_low: Tensor, action_high: Tensor) -> None:
    """Raise ConfigError unless an env's action bounds, float32 ``[D]`` each, are finite."""
    if not bool((torch.isfinite(action_low) & torch.isfinite(action_high) & (action_low < action_high)).all()):
        raise ConfigError(
            f"The env's action bounds are {action_low.tolist()} and {action_high.tolist()}; expected finite bounds, "
            "because an actor's actions are scaled to this range. Set algorithm=ppo, or define finite bounds in the env"
        )


def make_actor(config: ActorConfig, feature_dim: int, base: ActionModel, noise_std: float | None) -> Actor:
    """Build an actor with new weights for a base policy; raise ConfigError if its name is not registered."""
    if config.name not in ACTORS:
        raise ConfigError(
            f"algorithm.actor.name is {override_text(config.name)!r}; expected one of {', '.join(ACTORS)}. "
            "Set algorithm.actor.name=residual"
        )
    check_samples_noise(config, base)
    actor, encoder = ACTORS.get(config.name), base.make_encoder() if base.feature_kind == "inputs" else (None, None)
    return actor(config, feature_dim, actor.base_dim_for(base), noise_std, actor.output_dim_for(base), *encoder)


def check_samples_noise(config: ActorConfig, base: ActionModel) -> None:
    """Raise ConfigError if an actor sets noise, but the base policy does not sample any."""
    if ACTORS.get(config.name).sets_noise and base.num_candidate_uniforms == 0:
        raise ConfigError(
            f"algorithm.actor.name={config.name} sets the random numbers of the frozen policy, but {type(base).__name__} as "
            "configured uses none; expected a policy that samples its actions. Set algorithm.actor.name=residual"
        )


def uniforms_from_inputs(inputs: Mapping[str, Tensor], num_rows: int, count: int) -> Tensor:
    """Return random numbers in (0, 1), float32 ``[B, count]``, seeded by the images and states in each row of ``inputs``.

    This makes evaluations reproducible while each observation still has different candidates. If all observations used
    the same quantiles, actions between these would never be tried.
    """
    if not count:
        return torch.empty(num_rows, 0)
    digests = [0] * num_rows
    for name in sorted(inputs):
        # Token ids and masks are excluded, because their padding depends on the remaining rows of the call.
        if inputs[name].is_floating_point() or inputs[name].dtype == torch.uint8:
            rows = inputs[name].detach().cpu().reshape(num_rows, -1).contiguous().view(torch.uint8).numpy()
            digests = [zlib.crc32(row, digest) for row, digest in zip(rows, digests, strict=True)]
    drawn = [torch.rand(count, generator=torch.Generator().manual_seed(digest)) for digest in digests]
    return torch.stack(drawn).clamp_min_(torch.finfo(torch.float32).tiny)


def actor_settings(folder: str | Path) -> dict[str, Any]:
    """Read the actor settings written by ``save_pretrained``; raise CheckpointError if they cannot be read."""
    path = Path(folder) / ACTOR_SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        missing = {"feature_kind", "feature_dim", "noise_std", "num_critics", "actor"} - settings.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Use a different checkpoint") from error
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}. Use a different checkpoint")
    return settings


def base_store_folder(run: str | Path, digest: str) -> Path:
    """Return the folder inside a run folder that stores the base policy with this weight digest."""
    return Path(run) / FROZEN_FOLDER / digest[:16]


def base_folder(folder: str | Path) -> Path:
    """Return the folder of the base policy for the actor in ``folder``: the same folder, or the run's base store."""
    folder = Path(folder)
    digest = actor_settings(folder).get("base_store")
    if digest is None:
        return folder
    above = folder.resolve().parents[:5]  # model, checkpoint, superseded_1, checkpoints, run folder
    stored = next((place for run in above if (place := base_store_folder(run, digest)).is_dir()), None)
    if stored is None:
        raise CheckpointError(
            f"{folder} contains an actor, but the run folder above it does not contain its base policy "
            f"({base_store_folder('', digest)}). Copy the complete run folder, or run `rlinf export checkpoint={folder.parent} "
            "output=<folder>` where it is complete"
        )
    if weights_digest(str(stored)) != digest:
        raise CheckpointError(
            f"The weights in {stored} are damaged or were replaced: their digest differs from that recorded for the actor in "
            f"{folder}. Copy them again, or use a different run"
        )
    return stored


def has_actor(folder: str | Path) -> bool:
    """Return whether a checkpoint folder contains an actor."""
    return (Path(folder) / ACTOR_SETTINGS).is_file()
