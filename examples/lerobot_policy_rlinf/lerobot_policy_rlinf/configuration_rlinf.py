"""The policy type `rlinf` of lerobot, and the configuration in `config.json` of its folders."""

from dataclasses import dataclass, field

from lerobot.configs import PreTrainedConfig

TRAIN_THERE = "a policy of rlinf is trained by rlinf. Type rlinf train init_from=<export>"


@PreTrainedConfig.register_subclass("rlinf")
@dataclass
class RLinfConfig(PreTrainedConfig):
    """A policy that ``rlinf export`` wrote.

    Attributes:
        export: Folder of the export; a relative path starts at the folder of this ``config.json``.
        overrides: Changes to its configuration, as on rlinf's command line: ``["model.precision=fp32"]``.
    """

    export: str = "export"
    overrides: list[str] = field(default_factory=list)

    @property
    def observation_delta_indices(self) -> None:
        """Return None: a batch holds only the present observation."""
        return None

    @property
    def action_delta_indices(self) -> None:
        """Return None: a batch holds no actions."""
        return None

    @property
    def reward_delta_indices(self) -> None:
        """Return None: a batch holds no rewards."""
        return None

    def get_optimizer_preset(self) -> None:
        """Reject."""
        raise NotImplementedError(TRAIN_THERE)

    def get_scheduler_preset(self) -> None:
        """Reject."""
        raise NotImplementedError(TRAIN_THERE)

    def validate_features(self) -> None:
        """Accept all: the policy checks each observation."""
