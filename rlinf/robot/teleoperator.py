"""A person who takes over from the policy: lerobot's interface of a teleoperator, who acts, and a scripted person."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from rlinf.errors import ConfigError
from rlinf.robot.config import RobotConfig
from rlinf.robot.robot import LOST, EnvRobot, Robot, answer_of, numbers_of

logger = logging.getLogger("rlinf")


class Teleoperator(Protocol):
    """The members of lerobot's ``Teleoperator`` that are used here, and ``get_teleop_events`` of its ``HasTeleopEvents``."""

    @property
    def action_features(self) -> dict[str, Any]:
        """Features of ``get_action``, the robot's."""
        ...

    @property
    def is_calibrated(self) -> bool:
        """Whether its numbers have a meaning."""
        ...

    def get_teleop_events(self) -> dict[Any, Any]:
        """Return events by name, or by an enum with that value; ``is_intervention``: the person wants to act."""
        ...

    def get_action(self) -> dict[str, Any]:
        """Return the person's action; raise TimeoutError or ConnectionError without one."""
        ...

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Take the action that the policy has made, so that a teleoperator with motors can follow."""
        ...


class TakeOver:
    """Who acts: the policy, the person at a teleoperator (None: without one), or nobody, because the teleoperator is gone.

    The positions of a person who takes over may be far from the robot's. From where the robot is they change by at most
    ``handover_max_step`` for each action, until robot and teleoperator have met.

    Args:
        displaces: bool ``[D]``: which numbers of an action are displacements, and need no alignment.

    Attributes:
        policy_acts: Nobody has taken over.
        action: The person's, ``[D]``; None: the policy acts, or nobody.
        is_correction: The action is all the person's, not on the way there.

    Raise ConfigError if the teleoperator does not fit the robot, before anything moves.
    """

    def __init__(
        self, teleoperator: Teleoperator | None, robot: Robot, displaces: np.ndarray, handover_max_step: float | None
    ) -> None:
        if teleoperator is not None:
            _check_teleoperator(teleoperator, robot)
            if handover_max_step is None and not displaces.all():
                raise ConfigError(
                    f"handover_max_step=null with a teleoperator, and the numbers {np.flatnonzero(~displaces).tolist()} of an action are "
                    "positions; required: how much of them may change for each action until robot and teleoperator have met, or the robot "
                    "would jump. Set handover_max_step=<number>, in the env's units"
                )
        self.teleoperator, self.displaces, self.handover_max_step = teleoperator, displaces, handover_max_step
        self._names, self._is_gone = list(robot.action_features), False
        self.begin()

    def begin(self) -> None:
        """Start an episode: the policy acts."""
        self.policy_acts, self.is_correction = True, False
        self.action: np.ndarray | None = None

    def _wants(self) -> Any:
        """Return whether the person takes over, as the teleoperator says it."""
        events = self.teleoperator.get_teleop_events()
        return {getattr(name, "value", name): value for name, value in events.items()}.get("is_intervention", False)

    def look(self, last: np.ndarray) -> None:
        """Ask who acts now; ``last [D]`` is the last action, or where the robot is."""
        if self.teleoperator is None:
            return
        try:
            wants = answer_of(self._wants)
            if np.ndim(wants) or wants not in (0, 1):
                raise ConnectionError(f"is_intervention is {wants!r}; required: true or false")
            wanted = numbers_of(answer_of(self.teleoperator.get_action), self._names) if wants else None
        except LOST as error:
            self._lose(error)
            return
        if self._is_gone:
            logger.warning("The teleoperator is back")
        self._is_gone, self.policy_acts = False, wanted is None
        if wanted is None:
            self.action, self.is_correction = None, False
            return
        self.action = wanted if self.is_correction else self._near(wanted, last)
        self.is_correction = np.array_equal(self.action, wanted)

    def tell(self, sent: np.ndarray) -> None:
        """Show the teleoperator the action ``[D]`` that the policy has made."""
        if self.teleoperator is None or not self.policy_acts:
            return
        try:
            answer_of(self.teleoperator.send_feedback, dict(zip(self._names, sent.tolist(), strict=True)))
        except LOST as error:
            self._lose(error)

    def _near(self, wanted: np.ndarray, last: np.ndarray) -> np.ndarray:
        if self.handover_max_step is None:
            return wanted
        near = np.clip(wanted, last - self.handover_max_step, last + self.handover_max_step)
        return np.where(self.displaces, wanted, near).astype(np.float32)

    def _lose(self, error: BaseException) -> None:
        if not self._is_gone:
            logger.warning(
                "The teleoperator is gone (%s: %s); the robot holds until it is back", type(error).__name__, error
            )
        self._is_gone, self.policy_acts = True, False
        self.action, self.is_correction = None, False


def _check_teleoperator(teleoperator: Teleoperator, robot: Robot) -> None:
    """Raise ConfigError unless a teleoperator gives the actions of the robot."""
    given, needed = set(teleoperator.action_features), set(robot.action_features)
    if given != needed:
        raise ConfigError(
            f"The teleoperator gives the numbers {', '.join(sorted(given))}; required: {', '.join(sorted(needed))}, the robot's (missing: "
            f"{', '.join(sorted(needed - given)) or 'none'}). Take the teleoperator that was made for the robot"
        )
    if not callable(getattr(teleoperator, "get_teleop_events", None)):
        raise ConfigError(
            f"{type(teleoperator).__name__} has no get_teleop_events; required: it, to say when the person acts. Set success=page, "
            "whose page has a button for it, or add that method to a subclass"
        )
    if not teleoperator.is_calibrated:
        raise ConfigError("The teleoperator is not calibrated; required: a calibration. Run lerobot-calibrate")


class ScriptedPerson:
    """The env's scripted expert, without its planted faults, as a person who watches and corrects (a ``Teleoperator``).

    An action is an error if it is more than ``expert_threshold`` from the expert's action for the same state. This discrepancy
    is the rule of SafeDAgger (Zhang and Cho 2016, arXiv:1605.06450), here over ``expert_patience`` actions in a row. The
    person then makes ``expert_steps`` actions and hands back.
    """

    is_calibrated = True

    def __init__(self, robot: EnvRobot, settings: RobotConfig) -> None:
        self.robot, self.settings = robot, settings
        self.action_features = robot.action_features
        self._half_range = (robot.env.action_high - robot.env.action_low) / 2
        self._episode = self._errors = self._left = 0

    def get_teleop_events(self) -> dict[str, bool]:
        if self._episode != self.robot.num_begun:
            self._episode, self._errors, self._left = self.robot.num_begun, 0, 0
        self._wanted = self.robot.env.expert_actions()[0]
        return {"is_intervention": self._left > 0}

    def get_action(self) -> dict[str, float]:
        self._left -= 1
        return dict(zip(self.action_features, self._wanted.tolist(), strict=True))

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        sent = np.array([feedback[name] for name in self.action_features])
        is_error = np.mean(np.abs(sent - self._wanted) / self._half_range) > self.settings.expert_threshold
        self._errors = self._errors + 1 if is_error else 0
        if self._errors == self.settings.expert_patience:
            self._errors, self._left = 0, self.settings.expert_steps
