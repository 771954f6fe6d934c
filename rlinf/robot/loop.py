"""Episodes of a policy on a robot, in real time."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from rlinf.errors import ConfigError, NonFiniteError, RLinfError
from rlinf.evaluation.evaluator import BatchedPolicy, Video
from rlinf.files import Json
from rlinf.robot.clocks import ChunkReply, RealTime, SimulatedTime
from rlinf.robot.config import RobotConfig
from rlinf.robot.recorder import EpisodeRecorder
from rlinf.robot.robot import LOST, EpisodeVoidError, EpisodicRobot, check_fits, observation_of, to_vector
from rlinf.robot.schedule import ChunkSchedule, lead_steps
from rlinf.robot.teleoperator import TakeOver, Teleoperator
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec, Observation

logger = logging.getLogger("rlinf")

GRACE = 0.5
"""Fraction of a control period to wait for the policy if no action is available."""
NUM_LATENCIES = 20
"""Number of recent policy calls; their maximum duration determines when the next chunk is requested."""
COUNTS = (
    "overrun_steps", "idle_steps", "stale", "lost", "clipped_steps", "failures", "intervention_steps", "intervened_episodes",
    "teleop_lost_steps",
)  # fmt: skip


@dataclass
class Timing:
    """Timing statistics and event counts over all episodes."""

    lateness_s: list[float] = field(default_factory=list)  # delay of each step's start
    latencies_s: list[float] = field(default_factory=list)  # duration of each policy call
    overrun_steps: int = 0  # steps skipped because their period had passed before they could start
    idle_steps: int = 0  # steps without an action, in which the robot held
    stale: int = 0  # actions dropped because their steps passed while the policy computed
    lost: int = 0  # missing observations, undelivered actions, replies without numbers
    clipped_steps: int = 0  # actions clipped by `max_relative_target`
    failures: int = 0  # failed policy calls
    intervention_steps: int = 0  # actions by the operator
    intervened_episodes: int = 0  # episodes with operator actions
    teleop_lost_steps: int = 0  # steps without a reachable teleoperator

    def as_dict(self) -> Json:
        """Return counts, and medians, 99th percentiles and maxima in milliseconds, as JSON values."""
        counts = {name: getattr(self, name) for name in COUNTS}
        spread = {"lateness_ms": self.lateness_s, "latency_ms": self.latencies_s}
        return {"steps": len(self.lateness_s), "calls": len(self.latencies_s), **counts} | {
            name: dict(zip(("median", "p99", "max"), (1e3 * np.quantile(values, (0.5, 0.99, 1.0))).round(3).tolist(), strict=True))
            for name, values in spread.items()
            if values
        }  # fmt: skip

    def __str__(self) -> str:
        values = self.as_dict()
        counts = "".join(f", {values[name]} {name.replace('_', ' ')}" for name in COUNTS if values[name])
        spread = "; ".join(
            f"{label} {values[key]['median']:.1f} ms (p99 {values[key]['p99']:.1f}, max {values[key]['max']:.1f})"
            for key, label in (("lateness_ms", "lateness"), ("latency_ms", "policy latency"))
            if key in values
        )
        return f"robot: {values['steps']} steps, {values['calls']} policy calls{counts}\n{spread}"


@dataclass
class EpisodeProgress:
    """How far an episode is, and its newest observation.

    Attributes:
        waits: Whether an action that was not executed stays due, as a displacement does; absolute positions belong to a point in time.
        step: The current control period.
        due: Chunk position to execute next, counted from the start of the episode; equal to ``step`` unless ``waits``.
        observed_step, observed_due: ``step`` and ``due`` at the newest observation.
    """

    waits: bool
    step: int = 0
    due: int = 0
    observation: Observation | None = None
    observed_step: int = 0
    observed_due: int = 0

    @property
    def age(self) -> int:
        """Number of control periods since the newest observation."""
        return self.step - self.observed_step

    def observe(self, observation: Observation) -> None:
        """Set the newest observation."""
        self.observation, self.observed_step, self.observed_due = observation, self.step, self.due

    def skip(self, periods: int) -> None:
        """Skip control periods that are over already; the positions of that time are obsolete."""
        self.step += periods
        self.due += 0 if self.waits else periods

    def finish_step(self, was_executed: bool) -> None:
        """End a control period. After a hold or a lost action, positions advance with the clock; displacements wait."""
        self.step += 1
        self.due += was_executed or not self.waits


class RobotEpisodes:
    """Runs the episodes of an evaluation on a robot (an ``Episodes``), one after the other.

    Args:
        spec: The env for which the policy was trained.
        context: Returns the context for policy calls, because torch's contexts do not apply to other threads.
        teleoperator: Lets an operator take over; None: no interventions.
        recorder: Saves the episodes; None: they are not saved.

    Attributes:
        warmed_up: Policies that compute a chunk before each episode, in this order; only the chunk of ``self`` is used.

    Raise ConfigError if the policy or the robot is unsuitable, before anything moves.
    """

    def __init__(
        self,
        policy: BatchedPolicy,
        robot: EpisodicRobot,
        spec: EnvSpec,
        settings: RobotConfig,
        context: Callable[[], AbstractContextManager] = nullcontext,
        teleoperator: Teleoperator | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> None:
        num_observations = getattr(policy.model, "num_observations", 1)
        if num_observations > 1:
            raise ConfigError(
                f"{type(policy.model).__name__} reads {num_observations} observations (n_obs_steps); `rlinf robot` needs a "
                "single-observation policy, whose chunks can overlap. Use rlinf evaluate"
            )
        check_fits(robot, spec, policy.model.action_dim)
        action_dim, relative_dims = len(robot.action_features), settings.relative_dims
        invalid = [dim for dim in relative_dims or () if not 0 <= dim < action_dim]
        if invalid:
            raise ConfigError(
                f"relative_dims={relative_dims}, but actions have {action_dim} dimensions; expected dimensions from 0 to "
                f"{action_dim - 1}. Remove {invalid}"
            )
        self.policy, self.robot, self.cameras, self.settings = policy, robot, list(spec.cameras), settings
        self.context = context
        self.is_relative = np.array(settings.is_relative(action_dim))
        self.take_over = TakeOver(teleoperator, robot, self.is_relative, settings.handover_max_step)
        self.recorder = recorder
        self.timing = Timing()
        self.time = (RealTime if settings.real_time else SimulatedTime)(self._act, settings.latency_s)
        self._latencies: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._failures = 0
        # `cache` warns once per error text, not once per step.
        self._warn = cache(partial(logger.warning, "The robot does not respond (%s); it holds while this continues"))
        self._is_warm = False
        self.warmed_up: Sequence[RobotEpisodes] = [self]

    @property
    def num_restarts(self) -> int:
        return self.robot.num_restarts

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        results: list[EpisodeResult] = []
        with _short_switch_interval():
            while len(results) < len(specs):
                try:
                    results.append(self._episode(specs[len(results)]))
                except EpisodeVoidError:
                    continue  # run it again
                if self.recorder is not None:
                    self.recorder.end(results[-1])
                on_result(results[-1])
        return results

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return []  # a robot's episodes cannot be repeated for a video

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the policy thread."""
        self.time.close()

    def _act(self, observation: Observation) -> np.ndarray:
        with torch.no_grad(), self.context():
            return self.policy.act(observation, [self._stream])[0]

    def _episode(self, spec: EpisodeSpec) -> EpisodeResult:
        settings, robot, time, timing = self.settings, self.robot, self.time, self.timing
        instruction = robot.begin(spec)
        schedule, period = ChunkSchedule(settings.execution == "async", self.is_relative), 1 / settings.rate
        progress = EpisodeProgress(waits=bool(self.is_relative.any()))
        # Positions are clipped, and held, relative to the robot's current pose, because 0 may be far away.
        last = np.where(self.is_relative, np.float32(0), self._position())
        self._requested_step = -1
        self._start_episode()
        time.begin()
        # Compute the first chunk before resetting the clock, while the robot stands still.
        self._first_chunk(schedule, spec, instruction)
        time.begin()
        try:
            while robot.result is None:
                time.sleep_until(progress.step * period)
                late = time.now() - progress.step * period
                timing.lateness_s.append(late)
                # Skip complete periods instead of catching up: faster steps would exceed the planned speed.
                overrun = int(late / period)
                timing.overrun_steps += overrun
                progress.skip(overrun)
                latest = self._observe(instruction)
                timing.lost += latest is None
                if latest is not None:
                    progress.observe(latest)
                # Replace a lost frame with the last one, but only while that is recent enough to act on.
                is_fresh = progress.observation is not None and progress.age * period < settings.max_observation_age_s
                action = None
                self.take_over.update(last)
                if not self.take_over.policy_acts:
                    # The chunk was planned for a state that the operator is now changing.
                    schedule.clear()
                    time.drop()
                elif is_fresh:
                    self._request(schedule, progress)
                    action = schedule.action(progress.due)
                target = action if self.take_over.policy_acts else self.take_over.action
                last, arrived, is_known = self._send(target, last)
                self._note(progress.observation if is_fresh and is_known else None, last, arrived)
                was_executed = action is not None and arrived
                if was_executed:
                    schedule.execute(action, last)
                progress.finish_step(was_executed)
        except EpisodeVoidError:
            raise
        except BaseException:
            # After Ctrl-C or an error, the robot must not repeat the last displacement: send a hold before the command ends.
            if robot.result is None:
                self._send(None, last)
            raise
        return robot.result

    def _position(self) -> np.ndarray:
        """Return the robot's pose, float32 ``[D]``; raise RLinfError after ``max_failures`` failed reads."""
        last_error: BaseException | None = None
        for _ in range(self.settings.max_failures):
            try:
                return to_vector(self.robot.position(), self.robot.action_features)
            except LOST as error:
                last_error = error
                self.timing.lost += 1
        raise RLinfError(
            f"The robot does not report its pose ({type(last_error).__name__}: {last_error})"
        ) from last_error

    def _start_episode(self) -> None:
        self.take_over.begin()
        self._is_intervened = False
        if self.recorder is not None:
            self.recorder.begin()

    def _observe(self, instruction: str) -> Observation | None:
        """Return the current observation, or None if none arrived."""
        try:
            return observation_of(self.robot, self.robot.get_observation(), self.cameras, instruction)
        except LOST as error:
            self._warn(repr(error))
            return None

    def _note(self, observation: Observation | None, sent: np.ndarray, arrived: bool) -> None:
        """Count and record an executed action, and show it to the teleoperator."""
        take_over, timing = self.take_over, self.timing
        is_intervention = take_over.action is not None
        timing.intervention_steps += is_intervention
        timing.intervened_episodes += is_intervention and not self._is_intervened
        timing.teleop_lost_steps += not is_intervention and not take_over.policy_acts
        self._is_intervened |= is_intervention
        if self.recorder is not None:
            self.recorder.add(observation, sent, take_over.is_correction and arrived)
        take_over.show(sent)

    def _first_chunk(self, schedule: ChunkSchedule, spec: EpisodeSpec, instruction: str) -> None:
        """Compute the first chunk before the clock starts; without an observation, start without a chunk."""
        for episodes in self.warmed_up:
            episodes._stream = episodes.policy.start_episode(spec)
        if (observation := self._observe(instruction)) is None:
            return
        for episodes in self.warmed_up:
            reply = episodes._compute_first(observation, spec)
            if episodes is self:
                self._take(reply, schedule, 0)

    def _compute_first(self, observation: Observation, spec: EpisodeSpec) -> ChunkReply:
        """Start an episode's random stream, and return the first chunk."""
        # The very first call also allocates caches and kernels, so its duration is not representative: call twice.
        for _ in range(1 if self._is_warm else 2):
            self._stream = self.policy.start_episode(spec)
            self.time.submit(observation, 0)
            while (reply := self.time.poll(1.0)) is None:
                self.time.sleep_until(self.time.now() + 1.0)
        self._is_warm = True
        return reply

    def _request(self, schedule: ChunkSchedule, progress: EpisodeProgress) -> None:
        """Take a finished chunk, and request the next one when due; if no action is available, wait for half a period."""
        time, grace_s, due = self.time, GRACE / self.settings.rate, progress.due
        if time.is_pending and (reply := time.poll(0.0)) is not None:
            self._take(reply, schedule, due)
        lead = lead_steps(max(self._latencies, default=0.0), grace_s, self.settings.rate)
        # Each observation is submitted at most once: a second chunk from the same frame would equal the first.
        if not time.is_pending and progress.observed_step > self._requested_step and schedule.needs_chunk(due, lead):
            time.submit(progress.observation, progress.observed_due)
            self._requested_step = progress.observed_step
        if schedule.action(due) is None and time.is_pending and (reply := time.poll(grace_s)) is not None:
            self._take(reply, schedule, due)

    def _take(self, reply: ChunkReply, schedule: ChunkSchedule, due: int) -> None:
        """Schedule a reply's chunk, or count its failure; raise RLinfError after ``max_failures`` consecutive failures."""
        if not isinstance(reply.chunk, BaseException) and not np.isfinite(reply.chunk).all():
            reply = reply._replace(chunk=NonFiniteError("the chunk contains non-finite values"))
        if isinstance(reply.chunk, BaseException):
            self.timing.failures += 1
            self._failures += 1
            if self._failures >= self.settings.max_failures:
                raise RLinfError(
                    f"The policy has failed in {self._failures} consecutive calls (max_failures), so the robot holds: "
                    f"{type(reply.chunk).__name__}: {reply.chunk}"
                ) from reply.chunk
            return
        self._failures = 0
        self._latencies.append(reply.latency_s)
        self.timing.latencies_s.append(reply.latency_s)
        self.timing.stale += schedule.offer(reply.chunk, reply.seen_at, due)

    def _send(self, action: np.ndarray | None, last: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        """Send an action, or hold; return the executed action ``[D]``, whether it arrived, and whether the robot confirmed it."""
        hold, limit, reply = np.where(self.is_relative, np.float32(0), last), self.settings.max_relative_target, None
        if action is not None and limit is not None:
            clipped = np.clip(action, last - limit, last + limit)
            self.timing.clipped_steps += int(not np.array_equal(clipped, action))
            action = clipped
        # A non-finite value must never reach a motor, whatever its origin.
        if action is None or not np.isfinite(action).all():
            self.timing.idle_steps += 1
            action = hold
        names = list(self.robot.action_features)
        try:
            reply = self.robot.send_action(dict(zip(names, action.tolist(), strict=True)))
            return to_vector(reply, names), True, True
        except LOST as error:
            self.timing.lost += 1
            self._warn(repr(error))
        if reply is None:
            return hold, False, True
        # Sent but unconfirmed. Repeating a displacement is worse than losing it; positions resume from the last known one.
        return np.where(self.is_relative, action, last), True, False


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Switch Python threads after at most one millisecond (default: five), so that the control loop is not delayed."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
