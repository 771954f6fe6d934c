"""Configuration of OpenVLA-OFT; constants in its public training scripts are stored as fields of the checkpoint."""

from pathlib import Path
from typing import Any, ClassVar

from rlinf.errors import ConfigError
from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.loading import check_choice, field_error
from rlinf.options import closest

NEW_PARTS = {
    "action_head": "action_head=l1",
    "proprio_projector": "use_proprio=true",
    "film": "use_film=true",
    "placeholders": "learned_placeholders=true",
}
"""Parts that the base OpenVLA lacks, and the option that enables each one."""
ACTION_BOUNDS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}


class OpenVLAOFTConfig(OpenVLAConfig):
    """Configuration of OpenVLA-OFT (Kim et al. 2025), which decodes action chunks in parallel with bidirectional attention.

    Public folders contain OpenVLA's ``config.json`` without these fields, so set them in ``model.override_config``. See
    ``OpenVLAConfig`` for inherited fields.

    Args:
        use_proprio: Read the robot's state as an additional token.
        state_dim: Width of the state; None uses the width of its statistics.
        action_head: ``discrete`` (action tokens) or ``l1`` (a continuous head on the same hidden states).
        action_normalization: Statistics used for actions and state: ``bounds_q99`` (LIBERO, BRIDGE) or ``bounds`` (ALOHA).
        stop_token_in_input: End the input with ``</s>``, as in public models, instead of the placeholders.
        greedy_over_vocabulary: Choose greedy tokens among the complete vocabulary, as in the public evaluation (ids outside
            the bins decode as the nearest bin); if false, among the action bins, as in sampling.
        greedy_decoding: ``mode`` (public), the most likely bin of each action value, or ``median``, the median of its bins.
            After cloning sampled actions, the mode follows the noise of single labels (docs/results.md).
        new_parts: Parts that are newly initialised if a folder lacks them, as in the public fine-tuning:
            ``action_head``, ``proprio_projector`` and ``placeholders`` at random, ``film`` as the identity. This list is
            cleared when the model is built.
    """

    model_type = "openvla_oft"
    accepted_model_types: ClassVar[tuple[str, ...]] = ("openvla", "openvla_oft")
    unnormalize_epsilon: ClassVar[float] = 1e-8
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "action_head", "action_normalization", "stop_token_in_input", "greedy_over_vocabulary", "greedy_decoding", "use_proprio",
        "use_film",
    )  # fmt: skip

    use_proprio: bool = False
    state_dim: int | None = None
    action_head: str = "discrete"
    action_normalization: str = "bounds_q99"
    stop_token_in_input: bool = True
    greedy_over_vocabulary: bool = False
    greedy_decoding: str = "mode"
    action_decoding: str = "parallel"
    new_parts: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.new_parts = list(self.new_parts or [])
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> tuple[dict, dict]:
        """Read ``config.json``, ignoring the decoding setting in public folders (``model_type`` ``openvla``)."""
        values, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if values.pop("model_type", None) != cls.model_type:
            values.pop("action_decoding", None)
        return values, rest

    def _check(self) -> None:
        check_choice("action_head", self.action_head, ("discrete", "l1"))
        check_choice("action_normalization", self.action_normalization, tuple(ACTION_BOUNDS))
        check_choice("action_decoding", self.action_decoding, ("parallel",))
        check_choice("greedy_decoding", self.greedy_decoding, ("mode", "median"))
        super()._check()
        if self.greedy_decoding == "median" and (self.greedy_over_vocabulary or self.action_head == "l1"):
            other = "action_head=l1" if self.action_head == "l1" else "greedy_over_vocabulary=true"
            raise field_error(f"greedy_decoding is 'median' with {other}; expected action bins", "greedy_decoding=mode")
        if self.state_dim is not None and not self.use_proprio:
            raise ConfigError(
                f"state_dim is {self.state_dim}, but no state is read because use_proprio is false. "
                "Set model.init_config.use_proprio=true or model.init_config.state_dim=null"
            )
        for part in self.new_parts:
            if part not in self.optional_parts:
                fix = NEW_PARTS.get(part, f"new_parts=[{closest(part, NEW_PARTS) or 'action_head'}]")
                known = f"parts of the model among {', '.join(NEW_PARTS)}"
                raise ConfigError(f"new_parts contains '{part}'; expected {known}. Set model.override_config.{fix}")

    @property
    def optional_parts(self) -> list[str]:
        """Names from ``NEW_PARTS`` of the parts that this model has."""
        has = {
            "action_head": self.action_head == "l1",
            "proprio_projector": self.use_proprio,
            "film": self.use_film,
            "placeholders": self.learned_placeholders,
        }
        return [part for part in NEW_PARTS if has[part]]

    @property
    def action_bounds(self) -> tuple[str, str]:
        """Names of the statistics used to normalise actions and states."""
        return ACTION_BOUNDS[self.action_normalization]
