"""Identity processors: the policy itself converts units and images."""

from lerobot.processor import (
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    policy_action_to_transition,
    transition_to_policy_action,
)
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

from lerobot_policy_rlinf.configuration_rlinf import RLinfConfig


def make_rlinf_pre_post_processors(
    config: RLinfConfig, dataset_stats: dict | None = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Return the two steps that lerobot's evaluation overrides, and no steps for actions."""
    before = [RenameObservationsProcessorStep(rename_map={}), DeviceProcessorStep(device=config.device)]
    return PolicyProcessorPipeline(before, name=POLICY_PREPROCESSOR_DEFAULT_NAME), PolicyProcessorPipeline(
        [],
        name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
