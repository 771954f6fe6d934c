"""Command-line front ends of the robot and the classifier, which parse the arguments."""

from argparse import Namespace
from collections.abc import Sequence

from rlinf.commands.hydra_app import (
    configure,
    given_value,
    own_config,
    own_settings,
    require_policy,
    with_checkpoint,
)
from rlinf.config.overrides import parse_overrides
from rlinf.errors import ConfigError
from rlinf.robot.config import DemonstrationConfig, RobotConfig


def robot(arguments: Sequence[str]) -> int:
    """Run a policy in real time, one action every 1 / fps seconds, on a simulated robot (a single env) or a physical arm.

    Runs the same episodes as `rlinf evaluate`, one after the other, with the same keys, files and comparisons, and also writes
    timing.json (docs/robot.md).
    """
    arguments = with_checkpoint(arguments)
    args, settings = own_settings(arguments, RobotConfig)
    require_policy(arguments, "robot")
    baseline_args = None if settings.blind is None else _blind_baseline(args, settings.blind)
    config = configure(args, "evaluate")
    if config is not None:
        baseline = None if baseline_args is None else configure(baseline_args, "evaluate")
        from rlinf.robot import command

        command.robot(config, settings, baseline)
    return 0


def _blind_baseline(args: Namespace, policy: str) -> Namespace:
    """Make ``policy`` the baseline of a comparison, and return the arguments that evaluate it."""
    if (compare := given_value(args.overrides, "evaluation.compare")) is not None:
        raise ConfigError(
            f"evaluation.compare={compare} with blind={policy}, which already sets the baseline; expected only one of them. "
            "Remove evaluation.compare"
        )
    args.overrides = [*args.overrides, f"evaluation.compare={policy}"]
    key = "model.url" if "://" in policy else "checkpoint"
    policy_keys = ("checkpoint", "model.url")
    rest = [item.input_line for item in parse_overrides(args.overrides) if item.key_or_group not in policy_keys]
    return Namespace(**{**vars(args), "overrides": [*rest, f"{key}={policy}"]})


def demonstrate(arguments: Sequence[str]) -> int:
    """Record episodes in which an operator acts from a browser, with the keys and the dataset of `rlinf collect` (docs/robot.md)."""
    args, settings = own_settings(arguments, DemonstrationConfig)
    config = configure(args, "demonstrate")
    if config is not None:
        from rlinf.robot import demonstrate as command

        command.demonstrate(config, settings)
    return 0


def classifier(arguments: Sequence[str]) -> int:
    """Train a success classifier on frames of labelled episodes, and measure its errors on held-out episodes.

    Then set `env.success_classifier=<output_dir>` to use it for success and reward (docs/robot.md).
    """
    from rlinf.robot.classifier import ClassifierConfig, classifier

    classifier(own_config(arguments, ClassifierConfig))
    return 0
