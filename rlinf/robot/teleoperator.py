"""Interventions: lerobot's teleoperator interface, the hand-over between policy and operator, and a scripted operator."""

import logging
from typing import Any, Protocol

import numpy as np

from rlinf.errors import ConfigError
from rlinf.robot.config import RobotConfig
from rlinf.robot.robot import LOST, EnvRobot, Robot, call_device, to_vector

logger = logging.getLogger("rlinf")


class Teleoperator(Protocol):
    """The members of lerobot's ``Teleoperator`` used here, and ``get_teleop_events`` of its ``HasTeleopEvents``."""

    @property
    def action_features(self) -> dict[str, Any]:
        """Features of ``get_action``, equal to the robot's."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the teleoperator is calibrated."""

    def get_teleop_events(self) -> dict[Any, Any]:
        """Return events by name, or by an enum with that value; ``is_intervention``: the operator wants to act."""

    def get_action(self) -> dict[str, Any]:
        """Return the operator's action; raise TimeoutError or ConnectionError if it cannot be read."""

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Receive the policy's action, so that a teleoperator with motors can follow."""


class TakeOver:
    """Control state of an episode: the policy acts, the operator acts, or the robot holds because the teleoperator is lost.

    The teleoperator's positions may be far from the robot's at a hand-over. Positions then change by at most
    ``handover_max_step`` per action, until robot and teleoperator have met.

    Args:
        teleoperator: The operator's device; if None, the policy always acts.
        is_relative: Action dimensions that are displacements and need no alignment, bool ``[D]``.

    Attributes:
        action: The operator's action ``[D]``, or None if the policy acts or the robot holds.
        is_correction: Whether the action is entirely the operator's, not an alignment step.

    Raise ConfigError if the teleoperator does not match the robot, before anything moves.
    """

    def __init__(
        self, teleoperator: Teleoperator | None, robot: Robot, is_relative: np.ndarray, handover_max_step: float | None
    ) -> None:
        if teleoperator is not None:
            _check_teleoperator(teleoperator, robot)
            if handover_max_step is None and not is_relative.all():
                raise ConfigError(
                    f"handover_max_step=null with a teleoperator, and the action dimensions {np.flatnonzero(~is_relative).tolist()} are "
                    "positions; expected their maximum change per step until robot and teleoperator have met, or the robot "
                    "would jump. Set handover_max_step=<number>, in the env's units"
                )
        self.teleoperator, self.is_relative, self.handover_max_step = teleoperator, is_relative, handover_max_step
        self._names, self._is_lost = list(robot.action_features), False
        self.begin()

    def begin(self) -> None:
        """Start an episode: the policy acts."""
        self.policy_acts, self.is_correction = True, False
        self.action: np.ndarray | None = None

    def _is_intervention(self) -> Any:
        events = self.teleoperator.get_teleop_events()
        return {getattr(name, "value", name): value for name, value in events.items()}.get("is_intervention", False)

    def update(self, last: np.ndarray) -> None:
        """Read the teleoperator and decide who acts; ``last [D]`` is the last action, or the robot's pose."""
        if self.teleoperator is None:
            return
        try:
            intervenes = call_device(self._is_intervention)
            if np.ndim(intervenes) or intervenes not in (0, 1):
                raise ConnectionError(f"is_intervention is {intervenes!r}; expected true or false")
            target = to_vector(call_device(self.teleoperator.get_action), self._names) if intervenes else None
        except LOST as error:
            self._lose(error)
            return
        if self._is_lost:
            logger.warning("The teleoperator is back")
        self._is_lost, self.policy_acts = False, target is None
        if target is None:
            self.action, self.is_correction = None, False
            return
        # Once aligned, the operator moves without a limit until the hand-back.
        self.action = target if self.is_correction else self._aligned(target, last)
        self.is_correction = np.array_equal(self.action, target)

    def show(self, sent: np.ndarray) -> None:
        """Send the policy's action ``[D]`` to the teleoperator as feedback."""
        # During an intervention, feedback would make a motorised teleoperator fight the operator's hand.
        if self.teleoperator is None or not self.policy_acts:
            return
        try:
            call_device(self.teleoperator.send_feedback, dict(zip(self._names, sent.tolist(), strict=True)))
        except LOST as error:
            self._lose(error)

    def _aligned(self, target: np.ndarray, last: np.ndarray) -> np.ndarray:
        if self.handover_max_step is None:
            return target
        clipped = np.clip(target, last - self.handover_max_step, last + self.handover_max_step)
        return np.where(self.is_relative, target, clipped).astype(np.float32)

    def _lose(self, error: BaseException) -> None:
        if not self._is_lost:
            logger.warning(
                "The teleoperator was lost (%s: %s); the robot holds until it is back", type(error).__name__, error
            )
        # The policy stops too: without a teleoperator nobody could correct it.
        self._is_lost, self.policy_acts = True, False
        self.action, self.is_correction = None, False


def _check_teleoperator(teleoperator: Teleoperator, robot: Robot) -> None:
    """Raise ConfigError unless a teleoperator produces the robot's actions."""
    actual, needed = set(teleoperator.action_features), set(robot.action_features)
    if actual != needed:
        raise ConfigError(
            f"The teleoperator has the action features {', '.join(sorted(actual))}; expected the robot's, {', '.join(sorted(needed))} "
            f"(missing: {', '.join(sorted(needed - actual)) or 'none'}). Use the teleoperator that was made for the robot"
        )
    if not callable(getattr(teleoperator, "get_teleop_events", None)):
        raise ConfigError(
            f"{type(teleoperator).__name__} has no get_teleop_events; expected that method, which reports interventions. Set "
            "success=page, which shows a button for them, or add the method in a subclass"
        )
    if not teleoperator.is_calibrated:
        raise ConfigError("The teleoperator is not calibrated; expected a calibrated one. Run lerobot-calibrate")


class ScriptedOperator:
    """The env's scripted expert, without its planted faults, as a supervising operator (a ``Teleoperator``).

    A policy's action is an error if it differs from the expert's by more than ``expert_threshold``, the discrepancy rule of
    SafeDAgger (Zhang and Cho 2016, arXiv:1605.06450). After ``expert_patience`` consecutive errors the operator executes
    ``expert_steps`` actions and hands back.
    """

    is_calibrated = True

    def __init__(self, robot: EnvRobot, settings: RobotConfig) -> None:
        self.robot, self.settings = robot, settings
        self.action_features = robot.action_features
        self._half_range = (robot.env.action_high - robot.env.action_low) / 2
        self._episode = self._num_errors = self._num_left = 0

    def get_teleop_events(self) -> dict[str, bool]:
        if self._episode != self.robot.num_started:
            self._episode, self._num_errors, self._num_left = self.robot.num_started, 0, 0
        # Called at each step, before the env moves, so that feedback is compared with the expert's action for the same state.
        self._expert_action = self.robot.env.expert_actions()[0]
        return {"is_intervention": self._num_left > 0}

    def get_action(self) -> dict[str, float]:
        self._num_left -= 1
        return dict(zip(self.action_features, self._expert_action.tolist(), strict=True))

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        sent = np.array([feedback[name] for name in self.action_features])
        is_error = np.mean(np.abs(sent - self._expert_action) / self._half_range) > self.settings.expert_threshold
        self._num_errors = self._num_errors + 1 if is_error else 0
        if self._num_errors == self.settings.expert_patience:
            self._num_errors, self._num_left = 0, self.settings.expert_steps
