"""Episodes of a policy on a robot, in real time."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from rlinf.errors import ConfigError, NonFiniteError, RLinfError
from rlinf.evaluation.evaluator import BatchedPolicy, Video
from rlinf.robot.clocks import Answer, RealTime, SimulatedTime
from rlinf.robot.config import RobotConfig
from rlinf.robot.recorder import EpisodeRecorder
from rlinf.robot.robot import LOST, EpisodeVoidError, EpisodicRobot, check_fits, numbers_of, row_of
from rlinf.robot.schedule import ChunkSchedule, lead_steps
from rlinf.robot.teleoperator import TakeOver, Teleoperator
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec, Observation

logger = logging.getLogger("rlinf")

GRACE = 0.5
"""Fraction of its time for which a step without an action waits for an answer."""
NUM_LATENCIES = 20
"""Newest answers by whose slowest one the next question is timed."""
COUNTS = ("missed", "held", "stale", "lost", "limited", "failures", "corrected", "helped", "gone")


@dataclass
class Timing:
    """Numbers of the clock, over all episodes.

    Attributes:
        lateness_s: Of each step, how much after its time it started.
        latencies_s: Of each answer of the policy.
        missed: Steps that were left out, because their time was over when they could start.
        held: Steps without an action for their time.
        stale: Actions that were dropped, because others had been executed in their places when their chunk came.
        lost: Observations that did not come, and actions that did not reach the robot or were answered without numbers.
        limited: Actions that ``max_relative_target`` has changed.
        failures: Calls of the policy that failed.
        corrected: Actions of a person who has taken over.
        helped: Episodes with such actions.
        gone: Steps without the teleoperator.
    """

    lateness_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    missed: int = 0
    held: int = 0
    stale: int = 0
    lost: int = 0
    limited: int = 0
    failures: int = 0
    corrected: int = 0
    helped: int = 0
    gone: int = 0

    def as_dict(self) -> dict[str, Any]:
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
        counts = "".join(f", {name} {values[name]}" for name in COUNTS if values[name])
        spread = "; ".join(
            f"{label} {values[key]['median']:.1f} ms (99 %: {values[key]['p99']:.1f}, most: {values[key]['max']:.1f})"
            for key, label in (("lateness_ms", "late by"), ("latency_ms", "the policy takes"))
            if key in values
        )
        return f"robot: {values['steps']} steps, {values['calls']} calls of the policy{counts}\n{spread}"


class RobotEpisodes:
    """Plays the episodes of an evaluation on a robot (an ``Episodes``), one after the other.

    Args:
        policy: SupportsAct on one row.
        robot: Executes the actions.
        spec: The env that the policy was made for.
        settings: Rate, overlap, limits.
        computes: Returns the context in which the policy computes; contexts of torch do not reach another thread by themselves.
        teleoperator: Lets a person take over; None: nobody can.
        recorder: Keeps the episodes; None: they are not kept.

    Attributes:
        thinking: Who is asked before each episode, in this order; the answers of others are dropped.

    Raise ConfigError if policy or robot does not fit, before anything moves.
    """

    def __init__(
        self,
        policy: BatchedPolicy,
        robot: EpisodicRobot,
        spec: EnvSpec,
        settings: RobotConfig,
        computes: Callable[[], AbstractContextManager] = nullcontext,
        teleoperator: Teleoperator | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> None:
        num_observations = getattr(policy.model, "num_observations", 1)
        if num_observations > 1:
            raise ConfigError(
                f"{type(policy.model).__name__} reads {num_observations} observations, so it acts step by step; required: a policy of one "
                "observation, whose chunks can overlap. Use rlinf evaluate"
            )
        check_fits(robot, spec, policy.model.action_dim)
        num_joints, given = len(robot.action_features), settings.displacements
        wrong = [number for number in given or () if not 0 <= number < num_joints]
        if wrong:
            raise ConfigError(
                f"displacements={given}, and an action has {num_joints} numbers, from 0; required: some of them. Leave out {wrong}"
            )
        self.policy, self.robot, self.cameras, self.settings = policy, robot, list(spec.cameras), settings
        self.computes = computes
        self.displaces = np.isin(np.arange(num_joints), np.arange(num_joints) if given is None else given)
        self.take_over = TakeOver(teleoperator, robot, self.displaces, settings.handover_max_step)
        self.recorder = recorder
        self.timing = Timing()
        kind = RealTime if settings.real_time else SimulatedTime
        self.time = kind(self._act, settings.latency_s)
        self._latencies: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._failures = 0
        self._warn = cache(partial(logger.warning, "The robot does not answer (%s); it holds if this continues"))
        self._is_warm = False
        self.thinking: Sequence[RobotEpisodes] = [self]

    @property
    def num_restarts(self) -> int:
        return self.robot.num_restarts

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        results: list[EpisodeResult] = []
        with _quick_threads():
            while len(results) < len(specs):
                try:
                    results.append(self._episode(specs[len(results)]))
                except EpisodeVoidError:
                    continue  # it starts again
                if self.recorder is not None:
                    self.recorder.end(results[-1])
                on_result(results[-1])
        return results

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return []  # an episode of a robot cannot be played again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread of the policy."""
        self.time.close()

    def _act(self, row: Observation) -> np.ndarray:
        with torch.no_grad(), self.computes():
            return self.policy.act(row, [self._stream])[0]

    def _episode(self, spec: EpisodeSpec) -> EpisodeResult:
        settings, robot, time, timing = self.settings, self.robot, self.time, self.timing
        instruction = robot.begin(spec)
        schedule, period = ChunkSchedule(settings.execution == "overlap", self.displaces), 1 / settings.rate
        row: Observation | None = None
        step = due = seen_at = seen_step = 0
        # Positions are limited, and held, from where the robot is: 0 may be far away.
        last = np.where(self.displaces, np.float32(0), self._position())
        self._asked_step = -1
        self._begin_episode()
        time.begin()
        self._first_chunk(schedule, spec, instruction)
        time.begin()
        try:
            while robot.result is None:
                time.sleep_until(step * period)
                late = time.now() - step * period
                timing.lateness_s.append(late)
                missed = int(late / period)
                timing.missed += missed
                step += missed
                due += 0 if self.displaces.any() else missed
                if (seen := self._see(instruction)) is not None:
                    row, seen_at, seen_step = seen, due, step
                timing.lost += seen is None
                action, is_fresh = (
                    None,
                    row is not None and (step - seen_step) * period < settings.max_observation_age_s,
                )
                self.take_over.look(last)
                if not self.take_over.policy_acts:
                    schedule.clear()
                    time.drop()
                elif is_fresh:
                    self._ask(schedule, row, seen_at, seen_step, due)
                    action = schedule.action(due)
                wanted = action if self.take_over.policy_acts else self.take_over.action
                last, arrived, is_known = self._send(wanted, last)
                self._note(row if is_fresh and is_known else None, last, arrived)
                if is_done := action is not None and arrived:
                    schedule.execute(action, last)
                step += 1
                due += is_done or not self.displaces.any()  # a lost displacement is still to be made, as after a hold
        except EpisodeVoidError:
            raise
        except BaseException:
            if robot.result is None:
                self._send(None, last)
            raise
        return robot.result

    def _position(self) -> np.ndarray:
        """Return where the robot is, float32 ``[D]``; raise RLinfError if it does not answer in ``max_failures`` tries."""
        lost: BaseException | None = None
        for _ in range(self.settings.max_failures):
            try:
                return numbers_of(self.robot.position(), self.robot.action_features)
            except LOST as error:
                lost = error
                self.timing.lost += 1
        raise RLinfError(f"The robot does not say where it is ({type(lost).__name__}: {lost})") from lost

    def _begin_episode(self) -> None:
        self.take_over.begin()
        self._is_helped = False
        if self.recorder is not None:
            self.recorder.begin()

    def _see(self, instruction: str) -> Observation | None:
        """Return what the robot sees now; None: nothing came."""
        try:
            return row_of(self.robot, self.robot.get_observation(), self.cameras, instruction)
        except LOST as error:
            self._warn(repr(error))  # once for each error
            return None

    def _note(self, row: Observation | None, sent: np.ndarray, arrived: bool) -> None:
        """Count and record an action as it was executed, and show it to the person who watches."""
        who, timing = self.take_over, self.timing
        is_persons = who.action is not None
        timing.corrected += is_persons
        timing.helped += is_persons and not self._is_helped
        timing.gone += not is_persons and not who.policy_acts
        self._is_helped |= is_persons
        if self.recorder is not None:
            self.recorder.add(row, sent, who.is_correction and arrived)
        who.tell(sent)

    def _first_chunk(self, schedule: ChunkSchedule, spec: EpisodeSpec, instruction: str) -> None:
        """Let the policy think before the clock starts: a robot that stands still waits for its first chunk.

        Without an observation, the clock starts without a chunk.
        """
        for each in self.thinking:
            each._stream = each.policy.start_episode(spec)
        if (row := self._see(instruction)) is None:
            return
        for each in self.thinking:
            answer = each._think(row, spec)
            if each is self:
                self._take(answer, schedule, 0)

    def _think(self, row: Observation, spec: EpisodeSpec) -> Answer:
        """Start the random stream of an episode; return the first chunk."""
        # The very first call also makes things that stay, so its time says nothing.
        for _ in range(1 if self._is_warm else 2):
            self._stream = self.policy.start_episode(spec)
            self.time.ask(row, 0)
            while (answer := self.time.answer(1.0)) is None:
                self.time.sleep_until(self.time.now() + 1.0)
        self._is_warm = True
        return answer

    def _ask(self, schedule: ChunkSchedule, row: Observation, seen_at: int, seen_step: int, due: int) -> None:
        """Take an answer that is there, and ask for the next chunk when it is time; without an action, wait for half a period."""
        time, grace_s = self.time, GRACE / self.settings.rate
        if time.is_asked and (answer := time.answer(0.0)) is not None:
            self._take(answer, schedule, due)
        lead = lead_steps(max(self._latencies, default=0.0), grace_s, self.settings.rate)
        if not time.is_asked and seen_step > self._asked_step and schedule.asks(due, lead):
            time.ask(row, seen_at)
            self._asked_step = seen_step
        if schedule.action(due) is None and time.is_asked and (answer := time.answer(grace_s)) is not None:
            self._take(answer, schedule, due)

    def _take(self, answer: Answer, schedule: ChunkSchedule, due: int) -> None:
        """Execute the chunk of an answer, or count its failure; raise RLinfError after ``max_failures`` of them in a row."""
        if not isinstance(answer.chunk, BaseException) and not np.isfinite(answer.chunk).all():
            answer = answer._replace(chunk=NonFiniteError("the chunk has numbers that are not finite"))
        if isinstance(answer.chunk, BaseException):
            self.timing.failures += 1
            self._failures += 1
            if self._failures >= self.settings.max_failures:
                raise RLinfError(
                    f"The policy has failed in {self._failures} calls in a row (max_failures), and the robot holds: "
                    f"{type(answer.chunk).__name__}: {answer.chunk}"
                ) from answer.chunk
            return
        self._failures = 0
        self._latencies.append(answer.latency_s)
        self.timing.latencies_s.append(answer.latency_s)
        self.timing.stale += schedule.offer(answer.chunk, answer.seen_at, due)

    def _send(self, action: np.ndarray | None, last: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        """Send an action, or hold without one; ``last [D]`` was executed before.

        Return the executed action ``[D]``, whether it arrived (else the robot held), and whether the robot has said so.
        """
        hold, limit, answer = np.where(self.displaces, np.float32(0), last), self.settings.max_relative_target, None
        if action is not None and limit is not None:
            bounded = np.clip(action, last - limit, last + limit)
            self.timing.limited += int(not np.array_equal(bounded, action))
            action = bounded
        if action is None or not np.isfinite(action).all():
            self.timing.held += 1
            action = hold
        names = list(self.robot.action_features)
        try:
            answer = self.robot.send_action(dict(zip(names, action.tolist(), strict=True)))
            return numbers_of(answer, names), True, True
        except LOST as error:
            self.timing.lost += 1
            self._warn(repr(error))
        if answer is None:
            return hold, False, True
        # To make a displacement twice would be worse than not at all; positions continue from where they were last known.
        return np.where(self.displaces, action, last), True, False


@contextmanager
def _quick_threads() -> Iterator[None]:
    """Let the thread of the clock in after at most a millisecond; Python's own interval is five."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
