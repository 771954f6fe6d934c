"""pi0 (Black et al. 2024) and pi0.5 (Black et al. 2025) as policies for reinforcement learning."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.embodiment.base import Inputs, check_hidden_size
from rlinf.models.embodiment.flow_policy import FlowPolicy
from rlinf.models.embodiment.modules.flow import noisy_actions, training_times
from rlinf.models.embodiment.modules.normalizer import select_action_stats, select_stats
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.embodiment.modules.readout_token import TOKEN_WIDTH
from rlinf.models.embodiment.pi0.config import NUM_CAMERA_SLOTS, Pi0Config, check_attention, check_sizes
from rlinf.models.embodiment.pi0.network import Pi0Network, Prefix
from rlinf.models.embodiment.pi0.processing import StatisticsNormalizer, resize_with_pad
from rlinf.models.loading import field_error
from rlinf.models.sampling import draw_uniforms, standard_normal
from rlinf.options import override_text
from rlinf.types import BaseActions, EnvSpec, Observation

PROMPT_BLOCK = 64
"""For CUDA graphs, prompts are padded to a multiple of this number of tokens."""


class Pi0ForRLActionPrediction(Pi0Network, FlowPolicy):
    """A ``FlowPolicy`` that maps images, instruction and state to a chunk of actions.

    The value head reads the expert's mean output at each denoising step. Rollouts return the mean over all ``n`` steps,
    and ``evaluate_actions`` the mean over the scored steps: all of them with ``joint_logprob``, otherwise the chosen one.
    """

    fsdp_wrap_modules: ClassVar[tuple[str, ...]] = ("GemmaActionLayer", "SiglipEncoderLayer")
    lora_target_modules: ClassVar[str] = r"(vision_tower\..*\.(\w_proj|out_proj|fc\d)|(language_model|expert)\..*_proj)"
    trained_in_full: ClassVar[tuple[str, ...]] = ("value_head", "noise_head", "readout_token")
    float32_modules: ClassVar[tuple[str, ...]] = (
        "value_head", "noise_head", "readout_token", "state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in",
        "action_time_mlp_out", "time_mlp_in", "time_mlp_out",
    )  # fmt: skip

    def __init__(
        self,
        config: Pi0Config,
        hidden_size: int | None = None,
        unnorm_key: str | None = None,
        action_dim: int = 7,
        action_chunks_len: int = 1,
        value_head: bool = True,
        detach_value: bool = True,
        features: str = "hidden",
    ) -> None:
        settings = {"hidden_size": hidden_size, "unnorm_key": unnorm_key, "action_dim": action_dim}
        self.check_settings(config, **settings, action_chunks_len=action_chunks_len)
        super().__init__(config, value_head, features, action_dim)
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        self.detach_value, self.unnorm_key = detach_value, unnorm_key
        self.action_normalizer = _action_normalizer(config, unnorm_key, action_dim)
        stats = select_stats(config.norm_stats, unnorm_key).get("proprio")
        if stats is not None and config.reads_state:
            names = ("q01", "q99") if config.by_quantiles else ("mean", "std")
            self.state_range = Range.of(stats, names, "proprio")

    @classmethod
    def check_settings(
        cls,
        config: Pi0Config,
        *,
        hidden_size: int | None,
        unnorm_key: str | None,
        action_dim: int,
        action_chunks_len: int,
        attn_implementation: str | None = None,
        **_: object,
    ) -> None:
        check_attention(attn_implementation or config._attn_implementation)
        check_hidden_size(hidden_size, config.hidden_size)
        check_sizes(config, action_dim, action_chunks_len)
        _action_normalizer(config, unnorm_key, action_dim)

    @classmethod
    def reads_state(cls, config: Pi0Config) -> bool:
        # False for pi0.5 without the state in its prompt.
        return config.reads_state

    @classmethod
    def check_env(cls, config: Pi0Config, env: EnvSpec) -> None:
        """Check that the env has the policy's cameras and a state that fits its input."""
        given = list(env.cameras)
        names = given if config.cameras is None else [name for name in config.cameras if name is not None]
        if not given:
            raise ConfigError(
                f"The model reads images, but env.cameras of env.name={env.name} is []; expected at least one camera. Set "
                f"env.cameras={override_text(names or ['<camera>'])}, or use model=mlp, which reads none"
            )
        if not names or not set(names) <= set(given):
            raise field_error(
                f"The model reads the cameras {override_text(config.cameras)}, but env.cameras is {override_text(given)}; "
                f"expected at least one, all of them rendered{f' (env.cameras={override_text(names)})' if names else ''}",
                f"cameras={override_text(given)}",
            )
        if config.reads_state and env.state_dim is not None and not 0 < env.state_dim <= config.action_dim:
            fix = env.override_for_state(1, config.action_dim) or "env.name=<one with such a state>"
            raise ConfigError(
                f"The model reads the robot's state, of width at most {config.action_dim}, but env.name={env.name} provides "
                f"{f'one of width {env.state_dim}' if env.state_dim else 'none'} with the current settings. Set {fix}"
            )

    @classmethod
    def check_cuda_graph(cls, config: Pi0Config, attn_implementation: str) -> None:
        """Accept all settings, because no kernel depends on values on the CPU."""

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def steering_dim(self) -> int:
        """Number of noise dimensions per action, including padding."""
        # As in DSRL for pi0, an actor sets equal noise for all actions of the horizon.
        return self.config.action_dim

    def steering_uniforms(self, noise: Tensor) -> Tensor:
        """Repeat an action's noise ``[B, steering_dim]`` over the horizon."""
        return super().steering_uniforms(noise.repeat(1, self.config.action_horizon))

    @property
    def feature_dim(self) -> int:
        """Width of the expert's outputs for the executed actions, or of a prefix feature followed by the state."""
        if self.feature_kind == "hidden":
            return self.action_chunks_len * self.config.expert["width"]
        width = TOKEN_WIDTH if self.feature_kind == "token" else self.config.hidden_size
        return width if self.config.pi05 else width + self.config.action_dim

    @property
    def num_sft_uniforms(self) -> int:
        # One for each noise value, and one for the time.
        return self._chunk_size + 1

    @property
    def sft_chunk_len(self) -> int:
        return max(super().sft_chunk_len, self.config.action_horizon)

    # -- inputs --------------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation, image_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Tokenise prompts, normalise states, resize images, and send everything to the model's device.

        ``image_mask`` is bool ``[B, cameras]``, False for absent cameras; None means that all are present.
        """
        processor = self._ready_processor()
        images = [self._resized(observation.images[name]) for name in self._cameras(observation)]
        pixel_values = torch.stack(images, dim=1).float() / 255.0
        statistics = (self.config.image_mean, self.config.image_std)
        mean, std = (to_device(torch.tensor(x, dtype=torch.float32), self.device).view(3, 1, 1) for x in statistics)
        pixel_values = pixel_values.sub_(mean).div_(std)
        state = self._state(observation) if self.config.reads_state else None
        in_prompt = state.numpy() if self.config.state_in_prompt else None
        input_ids, attention_mask = processor.encode(self.instructions(observation), in_prompt)
        present = torch.ones(pixel_values.shape[:2], dtype=torch.bool) if image_mask is None else image_mask.bool()
        if present.shape != pixel_values.shape[:2]:
            shapes = f"{list(present.shape)}; expected {list(pixel_values.shape[:2])}"
            raise ConfigError(f"image_mask has the shape {shapes} (rows, cameras)")
        inputs = {
            "pixel_values": pixel_values,
            "image_mask": to_device(present, self.device),
            "input_ids": to_device(input_ids, self.device),
            "attention_mask": to_device(attention_mask, self.device),
        }
        if not self.config.pi05:
            padding = self.config.action_dim - state.shape[1]
            inputs["state"] = to_device(nn.functional.pad(state, (0, padding)).float(), self.device)
        return inputs

    def resize_images(self, observation: Observation) -> Observation:
        """Resize the images that the policy reads, unless an image would grow."""
        size, images = self.config.vision["image_size"], dict(observation.images)
        for name in self._cameras(observation):
            if images[name].shape[1] * images[name].shape[2] > size * size:
                images[name] = self._resized(images[name]).permute(0, 2, 3, 1).contiguous().cpu().numpy()
        return replace(observation, images=images)

    def _resized(self, image: np.ndarray) -> Tensor:
        """Send images ``[B, H, W, 3]`` to the model's device and resize them there, ``[B, 3, size, size]``."""
        frames = to_device(torch.from_numpy(image), self.device).permute(0, 3, 1, 2)
        return resize_with_pad(frames, self.config.vision["image_size"])

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        in_prompt = self._state(observation).numpy() if self.config.state_in_prompt else None
        return self._ready_processor().encode(self.instructions(observation), in_prompt)[1].sum(1).tolist()

    def _cameras(self, observation: Observation) -> list[str]:
        wanted = self.config.cameras
        slots = list(observation.images)[:NUM_CAMERA_SLOTS] if wanted is None else wanted
        names = [name for name in slots if name is not None]
        missing = [name for name in names if name not in observation.images]
        if missing or not names:
            problem = f"The policy reads the cameras {wanted}, but the environment provides {list(observation.images)}"
            raise field_error(problem, f"cameras=[{','.join(observation.images)}]")
        return names

    def _state(self, observation: Observation) -> Tensor:
        """Return the state in the network's units, as float64 ``[B, S]`` on the CPU."""
        if observation.state is None:
            raise ConfigError("The policy reads the robot's state, but the env provides none. Set env.state=proprio")
        width = observation.state.shape[1]
        if width > self.config.action_dim:
            problem = f"The environment's state has {width} dimensions, but the policy supports {self.config.action_dim} (action_dim)"
            raise ConfigError(f"{problem}. Set env.state=proprio")
        stats = select_stats(self.config.norm_stats, self.unnorm_key).get("proprio")
        if stats is None:
            key = self.unnorm_key or next(iter(self.config.norm_stats))
            problem = f"The policy reads the robot's state, but the statistics of '{key}' only cover actions"
            raise ConfigError(f"{problem}. Set model.unnorm_key=<data set with 'proprio' statistics>")
        normalizer = StatisticsNormalizer(stats, width, self.config.by_quantiles, "proprio")
        return normalizer.normalize(torch.from_numpy(observation.state))

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        prefix, state = self.encode_prefix(**inputs), inputs.get("state")
        chain, output = self._euler(prefix, state, self._greedy_noise(len(inputs["input_ids"])))
        if self.feature_kind == "hidden":
            features = output[:, : self.action_chunks_len].flatten(1).float()
        else:
            features = self._prefix_features(self.language_model.norm(prefix.states), prefix.mask)
            features = features if state is None else torch.cat([features, state], 1)  # pi0's prefix lacks the state

        def sample(uniforms: Tensor) -> Tensor:
            times, noise = uniforms.shape[1], standard_normal(uniforms.flatten(0, 1)).view(-1, *chain.shape[1:])
            states = None if state is None else state.repeat_interleave(times, dim=0)
            drawn = self._euler(prefix.repeated(times), states, noise)[0]
            return self._chunk(drawn).unflatten(0, uniforms.shape[:2])

        return BaseActions(self._chunk(chain).unsqueeze(1), features, sample if samples else None)

    def _graph_inputs(self, inputs: Inputs) -> Inputs:
        """Pad prompts to a multiple of 64 tokens."""
        # If prompts include the state, their length differs in nearly every call.
        length = inputs["input_ids"].shape[1]
        padding = min(-(-length // PROMPT_BLOCK) * PROMPT_BLOCK, self.config.longest_prompt) - length
        names = ("input_ids", "attention_mask")
        return inputs | {name: nn.functional.pad(inputs[name], (0, padding)) for name in names}

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the flow-matching loss: the velocity's mean squared error at a random time (Black et al. 2024, section IV).

        The first ``horizon`` of ``actions [B, sft_chunk_len, D]`` are padded with zeros to ``config.action_dim``; the loss
        includes the padding. ``uniforms [B, num_sft_uniforms]`` are used for the noise and, in the last column, the time.
        """
        chunk = self.action_normalizer.normalize(actions[:, : self.config.action_horizon])
        chunk = to_device(chunk.float(), self.device)
        chunk = nn.functional.pad(chunk, (0, self.config.action_dim - chunk.shape[-1]))
        if uniforms is None:
            uniforms = draw_uniforms(len(chunk), self.num_sft_uniforms)
        uniforms = to_device(uniforms, self.device)
        noise = standard_normal(uniforms[:, :-1]).view_as(chunk)
        prefix = self.encode_prefix(**inputs)
        losses = self.flow_loss(inputs, chunk, noise, training_times(uniforms[:, -1]), prefix).mean((1, 2))
        if self.readout_token is None:
            return losses
        return losses + self.readout_token.loss(
            self.language_model.norm(prefix.states), prefix.mask, self._motion(actions), inputs.get("state")
        )

    def flow_loss(
        self, inputs: Inputs, actions: Tensor, noise: Tensor, t: Tensor, prefix: Prefix | None = None
    ) -> Tensor:
        """Return the velocity's squared errors ``[B, horizon, action_dim]`` for normalised ``actions`` at ``t [B]``."""
        x, target = noisy_actions(actions, noise, t[:, None, None])
        prefix = self.encode_prefix(**inputs) if prefix is None else prefix
        velocity, _ = self.velocity(prefix, inputs.get("state"), x, t)
        return (velocity - target).square()

    def _chunk(self, x: Tensor) -> Tensor:
        return self.action_normalizer.unnormalize(x[:, : self.action_chunks_len, : self.action_dim]).float()


def _action_normalizer(config: Pi0Config, unnorm_key: str | None, action_dim: int) -> StatisticsNormalizer:
    stats = select_action_stats(config.norm_stats, unnorm_key)
    return StatisticsNormalizer(stats, action_dim, config.by_quantiles, "action")
