"""lerobot's SmolVLA (Shukor et al. 2025) and GR00T N1.7, trained by policy gradients on their denoising steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.files import Json
from rlinf.models.embodiment.flow_policy import FlowPolicy
from rlinf.models.embodiment.folder_policy import write_safetensors
from rlinf.models.embodiment.lerobot.chunks import FlowPrefix
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.contents import groot_base
from rlinf.models.embodiment.lerobot.policy import LerobotPolicy, batch_of, numbers
from rlinf.models.embodiment.modules.readout_token import masked_mean
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.loading import check_choice, field_error, read_json

VALUES = "value_head.safetensors"
"""Name of the file with the value head, stored next to lerobot's files."""


@dataclass
class SmolVLAConfig(LerobotConfig):
    """``LerobotConfig`` for SmolVLA, with settings for the density of its flow.

    Args:
        num_steps: ``n``, the number of denoising steps; by default the folder's.
        noise_method: Distribution of a step (``step_moments``): flow_sde, flow_cps, or flow_ode without log-probabilities.
        noise_level: ``a`` in flow_sde and flow_cps.
        joint_logprob: Sample and score all steps instead of one random step per call.
        freeze_vlm: Freeze the VLM's weights, as in lerobot's fine-tuning.
    """

    model_type: ClassVar[str] = "smolvla"
    steps_field: ClassVar[str] = "num_steps"
    manifest_fields: ClassVar[tuple[str, ...]] = (
        *LerobotConfig.manifest_fields, "num_steps", "noise_method", "noise_level",
    )  # fmt: skip

    policy_type: str = "smolvla"
    trained: bool = True
    num_steps: int = 10
    noise_method: str = "flow_sde"
    noise_level: float = 0.5
    joint_logprob: bool = False
    freeze_vlm: bool = True

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Self:
        result = super().from_pretrained(folder, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        values = read_json(Path(folder) / "config.json")
        config.num_steps = values.get(config.steps_field) or config._default_steps(Path(folder), values)
        return result

    def _default_steps(self, folder: Path, values: Json) -> int:
        """Return the number of denoising steps of a folder whose ``config.json`` has none."""
        return self.num_steps

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.model_type
        if self.policy_type != name:
            raise ConfigError(
                f"The folder contains a policy of type {self.policy_type}; required for model={name}: {name}. Set model=lerobot to "
                "train an actor on top of it (algorithm=sac algorithm.actor.name=residual)"
            )
        check_choice("noise_method", self.noise_method, ("flow_sde", "flow_cps", "flow_ode"))
        if self.num_steps < 1:
            raise field_error(f"num_steps is {self.num_steps}; expected at least 1", "num_steps=10")


@dataclass
class GrootConfig(SmolVLAConfig):
    """``SmolVLAConfig`` for GR00T N1.7, whose base folder states ``num_steps`` (4)."""

    model_type: ClassVar[str] = "groot"
    steps_field: ClassVar[str] = "num_inference_timesteps"

    policy_type: str = "groot"
    num_steps: int = 4

    def _default_steps(self, folder: Path, values: Json) -> int:
        return groot_base(folder, values.get("base_model_path")).get(self.steps_field, self.num_steps)


class SmolVLAPolicy(FlowPolicy, LerobotPolicy):
    """A SmolVLA in this process: lerobot computes prefix and velocity, ``FlowPolicy`` samples and scores.

    The value head reads the mean prefix state, so there is one value per observation, not per denoising step. Its weights
    are stored in a separate file, which lerobot does not read.
    """

    config_class = SmolVLAConfig
    vlm_name: ClassVar[str] = "model.vlm_with_expert.vlm"
    predicts_values: ClassVar[bool] = True  # type: ignore[assignment]
    has_logprobs: ClassVar[bool] = True
    noise_head = None

    @classmethod
    def values_in_rollouts(cls, config: Any) -> bool:
        return True

    @classmethod
    def check_rl(cls, config: SmolVLAConfig) -> None:
        """Reject a flow without noise, and weights in a different process."""
        super().check_rl(config)
        cls.check_sft(config)

    @classmethod
    def from_pretrained(cls, folder: str | Path, config: SmolVLAConfig, **arguments: Any) -> SmolVLAPolicy:
        """Load a folder, and its value head if present."""
        model = super().from_pretrained(folder, config, **arguments)
        model.detach_value = arguments.get("detach_value", True)
        if model.policy is not None and config.freeze_vlm:
            model.policy.get_submodule(cls.vlm_name).requires_grad_(False)
        if arguments.get("value_head", True):
            model.value_head = ValueHead(model.feature_dim)
            if (Path(model.folder) / VALUES).is_file():
                model.value_head.load_state_dict(load_file(Path(model.folder) / VALUES))
        return model

    @property
    def flow_shape(self) -> tuple[int, int]:
        horizon, width = self.config.noise_shape
        return horizon, width

    def encode_prefix(self, **inputs: Tensor) -> FlowPrefix:
        return self.runner.prefix(batch_of(inputs))

    def velocity(self, prefix: FlowPrefix, state: Tensor | None, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return lerobot's velocity at ``x [B, H, D]``; ``state`` is already part of the prefix."""
        velocity = self.runner.velocity(prefix, x, t)
        return velocity, velocity

    def _step_values(self, prefix: FlowPrefix, output: Tensor) -> Tensor:
        return self._values(masked_mean(prefix.states, prefix.mask))

    def _chunk(self, x: Tensor) -> Tensor:
        actions = self.runner.unnormalized(x[:, : self.action_chunks_len])
        return actions / numbers(self.config.action_scale).to(actions.device)

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        super().save_pretrained(folder, state_dict, **kwargs)
        state = self.state_dict() if state_dict is None else state_dict
        head = {name.removeprefix("value_head."): x for name, x in state.items() if name.startswith("value_head.")}
        if head:
            write_safetensors(Path(folder) / VALUES, head)


class GrootPolicy(SmolVLAPolicy):
    """A GR00T N1.7 in this process. Its folder's ``tune_...`` settings freeze further weights."""

    config_class = GrootConfig
    vlm_name = "_groot_model.backbone"

    def _step_values(self, prefix: FlowPrefix, output: Tensor) -> Tensor:
        *_, state = prefix.cache
        return self._values(torch.cat((masked_mean(prefix.states, prefix.mask), state.flatten(1)), 1))
