"""Configuration of OpenVLA-OFT: constants of its public training scripts, as fields of the checkpoint."""

from pathlib import Path
from typing import Any, ClassVar

from rlinf.errors import ConfigError
from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.loading import check_choice
from rlinf.options import closest

NEW_PARTS = {
    "action_head": "action_head=l1",
    "proprio_projector": "use_proprio=true",
    "film": "use_film=true",
    "placeholders": "learned_placeholders=true",
}
"""Parts that a base OpenVLA does not have, and the option of each."""
ACTION_BOUNDS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}


class OpenVLAOFTConfig(OpenVLAConfig):
    """OpenVLA-OFT (Kim et al. 2025): parallel decoding of action chunks with bidirectional attention.

    Public folders have OpenVLA's ``config.json`` without these fields: set them by ``model.override_config``. See
    ``OpenVLAConfig`` for inherited fields.

    Args:
        use_proprio: Read the robot's state as an additional token.
        state_dim: Dimensions of the state; None: those of its statistics.
        action_head: ``discrete`` (action tokens) or ``l1`` (a continuous head on the same hidden states).
        action_normalization: Statistics of actions and state: ``bounds_q99`` (LIBERO, BRIDGE) or ``bounds`` (ALOHA).
        stop_token_in_input: End the input with ``</s>``, as the public models; false: with the placeholders.
        greedy_over_vocabulary: Greedy tokens are the argmax over the complete vocabulary, as in the public evaluation
            (ids outside the bins decode as the nearest bin); false: over the action bins, as for sampling.
        new_parts: Parts that a folder may lack and that are then newly initialised, as in the public fine-tuning:
            ``action_head``, ``proprio_projector`` and ``placeholders`` at random, ``film`` as the identity. Building the
            model empties this list.
    """

    model_type = "openvla_oft"
    accepted_model_types: ClassVar[tuple[str, ...]] = ("openvla", "openvla_oft")
    unnormalize_epsilon: ClassVar[float] = 1e-8
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "action_head", "action_normalization", "stop_token_in_input", "greedy_over_vocabulary", "use_proprio", "use_film",
    )  # fmt: skip

    use_proprio: bool = False
    state_dim: int | None = None
    action_head: str = "discrete"
    action_normalization: str = "bounds_q99"
    stop_token_in_input: bool = True
    greedy_over_vocabulary: bool = False
    action_decoding: str = "parallel"
    new_parts: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.new_parts = list(self.new_parts or [])
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> tuple[dict, dict]:
        """Read ``config.json``, ignoring the decoding of public folders (``model_type`` ``openvla``)."""
        values, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if values.pop("model_type", None) != cls.model_type:
            values.pop("action_decoding", None)
        return values, rest

    def _check(self) -> None:
        check_choice("action_head", self.action_head, ("discrete", "l1"))
        check_choice("action_normalization", self.action_normalization, tuple(ACTION_BOUNDS))
        check_choice("action_decoding", self.action_decoding, ("parallel",))
        super()._check()
        if self.state_dim is not None and not self.use_proprio:
            raise ConfigError(
                f"state_dim is {self.state_dim}, but use_proprio is false: no state is read. "
                "Set model.init_config.use_proprio=true or model.init_config.state_dim=null"
            )
        for part in self.new_parts:
            if part not in NEW_PARTS:
                raise ConfigError(
                    f"new_parts names '{part}'; required: of {', '.join(NEW_PARTS)}. "
                    f"Set model.override_config.new_parts=[{closest(part, NEW_PARTS) or 'action_head'}]"
                )
            if part not in self.optional_parts:
                raise ConfigError(
                    f"new_parts names '{part}', which the model does not have. "
                    f"Set model.override_config.{NEW_PARTS[part]}, or leave '{part}' out of model.override_config.new_parts"
                )

    @property
    def optional_parts(self) -> list[str]:
        """Names in ``NEW_PARTS`` of parts that the model has."""
        has = {
            "action_head": self.action_head == "l1",
            "proprio_projector": self.use_proprio,
            "film": self.use_film,
            "placeholders": self.learned_placeholders,
        }
        return [part for part in NEW_PARTS if has[part]]

    @property
    def action_bounds(self) -> tuple[str, str]:
        """Names of the statistics that normalise actions and states."""
        return ACTION_BOUNDS[self.action_normalization]
