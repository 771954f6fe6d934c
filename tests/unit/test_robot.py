"""A policy that acts in real time: the order of its actions, losses and holds."""

import json
import signal
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_results import run_config

from rlinf.commands.evaluate import evaluate
from rlinf.envs import make_env
from rlinf.errors import ConfigError, RLinfError
from rlinf.robot.clocks import RealTime
from rlinf.robot.command import robot
from rlinf.robot.config import RobotConfig
from rlinf.robot.loop import RobotEpisodes
from rlinf.robot.robot import EnvRobot, EpisodeVoidError, check_fits
from rlinf.robot.schedule import ChunkSchedule, lead_steps
from rlinf.training.stop_signal import ctrl_c_waits, sigterm_is_ctrl_c
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec

SPEC = EpisodeSpec("clock", 0, 0, 0)
ENV = EnvSpec("clock", [], [], 64, 1)


class Clock:
    """A robot whose state is the number of its actions so far."""

    is_calibrated, num_restarts = True, 0
    observation_features, action_features = {"now": float}, {"joint": float}

    def __init__(self, num_steps=20, lost=(), at=0.0):
        self.num_steps, self.lost, self.at = num_steps, lost, at

    def position(self):
        return {"joint": self.at}

    def begin(self, spec):
        self.sent, self.result, self.asked = [], None, 0
        return "tell the time"

    def get_observation(self):
        if len(self.sent) in self.lost:
            raise TimeoutError("no frame")
        return {"now": float(len(self.sent))}

    def send_action(self, action):
        self.sent.append(action["joint"])
        if len(self.sent) == self.num_steps:
            self.result = EpisodeResult(SPEC, "clock", True, 1.0, self.num_steps)
        return action


class Foretell:
    """A policy whose action for each step is the number of the step, 1 for the first."""

    def __init__(self, chunk_len=8, fails=()):
        self.model = SimpleNamespace(action_dim=1, num_observations=1)
        self.chunk_len, self.fails, self.calls, self.seen = chunk_len, fails, 0, []

    def start_episode(self, spec):
        return None

    def act(self, row, streams):
        self.calls += 1
        self.seen.append(row.state[0, 0])
        if self.calls in self.fails:
            raise ConnectionError("the server is gone")
        return (row.state[0, 0] + 1 + np.arange(self.chunk_len, dtype=np.float32))[None, :, None]


def played(clock=None, policy=None, **settings):
    clock, policy = clock or Clock(), policy or Foretell()
    with RobotEpisodes(policy, clock, ENV, RobotConfig(**{"real_time": False} | settings)) as episodes:
        episodes.run([SPEC], lambda result: None)
    return clock.sent, episodes.timing


@pytest.mark.parametrize("relative_dims", [[], [0]])
def test_the_next_chunk_is_asked_for_in_time(relative_dims):
    """0.15 s are three steps of 20 Hz. A step waits 0.025 s, so an answer to step t is used at t + 3."""
    sent, timing = played(latency_s=0.15, relative_dims=relative_dims)
    assert sent == list(range(1, 21)), "every action is the one for its step"
    assert (timing.idle_steps, timing.lost, timing.overrun_steps) == (0, 0, 0)
    assert "overrun" not in str(timing) and "3 overrun steps" in str(replace(timing, overrun_steps=3))
    assert timing.stale == 3 * (timing.as_dict()["calls"] - 1), "three of each chunk came too late, but for the first"


def test_waiting_holds_the_robot():
    sent, timing = played(latency_s=0.15, execution="sync")
    assert sent == [*range(1, 9), 0, 0, 0, *range(9, 17), 0], "the chunk of step 8 starts three steps later"
    assert (timing.idle_steps, timing.stale) == (4, 0)


@pytest.mark.parametrize(
    ("relative_dims", "expected"),
    [
        ([], [1, 2, 3, 4, 5, 5, 5, 8, 8, 8, 11, 11, 11]),
        ([0], [1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 11 + 6, 0, 0, 12 - 6]),
    ],
)
def test_a_chunk_that_is_shorter_than_the_latency_leaves_gaps(relative_dims, expected):
    """Four actions. A hold makes positions late, and keeps displacements for later.

    The question of step 1 is answered at step 4 and gives the action 5 alone; the question of step 4, at step 7, the action
    for step 7 (8), or the one after 5 (6). The question of step 7 was planned with 8 + 9 + 10 in place of 6 + 7 + 8, the next
    one with 11 in place of 17: displacements make up for these 6.
    """
    sent, timing = played(policy=Foretell(chunk_len=4), latency_s=0.15, relative_dims=relative_dims)
    assert sent[: len(expected)] == expected and timing.idle_steps > 0


@pytest.mark.parametrize("execution", ["async", "sync"])
def test_a_quick_policy_acts_as_without_a_clock(execution):
    sent, timing = played(latency_s=0.02, execution=execution)
    assert sent == list(range(1, 21)) and (timing.idle_steps, timing.stale) == (0, 0)


def test_control_actions_of_another_time_are_noticed(monkeypatch):
    monkeypatch.setattr(
        ChunkSchedule, "offer", lambda self, chunk, seen_at, due: self.__dict__.update(_chunk=chunk, _first=due) or 0
    )
    assert played(latency_s=0.15, relative_dims=[])[0] != list(range(1, 21))


def test_a_displacement_that_was_not_made_is_made_next():
    """A gripper's command, the second number, is no displacement. One of two planned units is executed, in two places."""
    schedule = ChunkSchedule(overlaps=True, is_relative=np.array([True, False]))
    plan = np.array([[2.0, 5.0], [2.0, 6.0], [2.0, 7.0], [2.0, 8.0]], np.float32)
    for _ in range(2):
        schedule.execute(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert schedule.offer(plan, seen_at=0, due=2) == 2
    assert schedule.action(2).tolist() == [4, 7], "2, and the 2 that are missing"
    schedule.execute(schedule.action(2), np.array([3.0, 7.0]))
    assert schedule.action(3).tolist() == [3, 8], "one is missing still"
    schedule.execute(schedule.action(3), np.array([3.0, 8.0]))
    assert schedule.action(3).tolist() == [2, 8], "nothing is missing, and a later cut is not made up for"
    schedule.execute(schedule.action(3), np.array([1.0, 8.0]))
    assert schedule.action(3).tolist() == [2, 8]


def test_schedule_by_hand():
    schedule = ChunkSchedule(overlaps=True, is_relative=np.array([False]))
    assert schedule.action(0) is None and schedule.needs_chunk(0, 0)
    schedule.offer(np.arange(4.0)[:, None], seen_at=2, due=4)
    assert [schedule.action(step) for step in (1, 6)] == [None, None] and schedule.action(5) == 3
    assert [schedule.needs_chunk(step, 2) for step in (3, 4, 6)] == [False, True, True]
    schedule = ChunkSchedule(overlaps=False, is_relative=np.array([False]))
    schedule.offer(np.arange(4.0)[:, None], seen_at=2, due=4)
    assert schedule.action(4) == 0 and not schedule.needs_chunk(7, 2) and schedule.needs_chunk(8, 2)
    latencies = (0.0, 0.025, 0.026, 0.075, 0.15, 0.3)
    assert [lead_steps(latency, 0.025, 20) for latency in latencies] == [0, 0, 1, 1, 3, 6]


def test_lost_observations_are_survived_until_the_last_one_is_too_old():
    """From step 5 on nothing is seen. 0.2 s are four steps, so steps 5 to 7 continue, and 8 to 11 hold."""
    sent, timing = played(Clock(lost=range(5, 12)), max_observation_age_s=0.2)
    assert sent[:8] == list(range(1, 9)), "an action is still the one for its time"
    assert sent[8:12] == [0] * 4 and sent[12:] == list(range(13, 21))
    assert (timing.lost, timing.idle_steps) == (7, 4)
    policy = Foretell(chunk_len=2)
    sent, _ = played(Clock(lost=range(5, 12)), policy, max_observation_age_s=0.2)
    assert sent[4:8] == [5, 6, 0, 0] and policy.seen.count(4) == 1, "an old observation is not asked about again"


def test_a_camera_that_never_comes_moves_nothing():
    policy = Foretell()
    for relative_dims, held in (([], 5), ([0], 0)):  # a position of 0 would move an arm that stands at 5
        sent, timing = played(Clock(lost=range(100), at=5.0), policy, relative_dims=relative_dims)
        assert set(sent) == {held} and timing.lost == 20 and policy.calls == 0


def test_positions_are_limited_from_where_the_robot_is():
    assert played(Clock(at=5.0), relative_dims=[], max_relative_target=0.5)[0][:3] == [4.5, 4.0, 3.5]
    sent, timing = played(Clock(at=5.0), relative_dims=[0], max_relative_target=0.5)
    assert sent[:3] == [0.5, 1.0, 1.5] and timing.clipped_steps == 20


def test_a_failed_call_costs_a_hold_and_no_episode():
    sent, timing = played(policy=Foretell(chunk_len=1, fails=(4, 5)), relative_dims=[])
    assert sent == [1, 2, 2, 2, *range(5, 21)], "calls 4 and 5 are of steps 2 and 3, which repeat the action before"
    assert (timing.failures, timing.idle_steps) == (2, 2)
    # Six calls fail, never three in a row (`max_failures`).
    sent, timing = played(policy=Foretell(chunk_len=1, fails=(4, 5, 8, 9, 12, 13)), relative_dims=[])
    assert timing.failures == timing.idle_steps == 6 and sent[-1] == 20


def test_a_policy_that_is_gone_ends_the_command_and_the_robot_holds():
    clock = Clock()
    with pytest.raises(RLinfError, match=r"3 consecutive calls.*ConnectionError: the server is gone"):
        played(clock, Foretell(chunk_len=1, fails=range(5, 50)))
    assert clock.sent[:3] == [1, 2, 3] and set(clock.sent[3:]) == {0}


def test_a_chunk_that_is_not_finite_is_a_failed_call():
    """A clip of NaN is NaN, and a hold would repeat it: motors would take it for their lowest position."""
    policy = Foretell(chunk_len=1)
    as_it_was = policy.act
    policy.act = lambda row, streams: as_it_was(row, streams) * (np.nan if policy.calls in (3, 4) else 1)
    sent, timing = played(policy=policy, relative_dims=[], max_relative_target=5.0)
    assert np.isfinite(sent).all() and timing.failures == 2 and sent[-1] == 20


def test_a_bus_that_fails_now_and_then_is_survived():
    """Call 1 of the position, and the actions of steps 3 and 4, do not reach the robot: the next one is limited from the last that did."""
    clock, calls = Clock(), []

    def position():
        calls.append(0)
        if len(calls) == 1:
            raise ConnectionError("no answer")
        return {"joint": 0.0}

    as_it_was = clock.send_action

    def send_action(action):
        calls.append(1)
        if calls.count(1) in (4, 5):
            raise ConnectionError("no answer")
        return as_it_was(action)

    clock.position, clock.send_action = position, send_action
    sent, timing = played(clock, relative_dims=[], max_relative_target=1.0)
    assert timing.lost == 3 and sent[:3] == [1, 2, 3] and max(np.diff(sent)) == 1.0
    clock.position = lambda: (_ for _ in ()).throw(ConnectionError("unplugged"))
    with pytest.raises(RLinfError, match="its pose.*unplugged"):
        played(clock)


class Slide(Clock):
    """A joint that is moved by its action, a displacement or a position; some actions are lost, some answers have no numbers."""

    def __init__(self, is_relative, lost=(), untold=(), **more):
        super().__init__(**more)
        self.is_relative, self.lost_actions, self.untold, self.where, self.calls = (
            is_relative,
            lost,
            untold,
            [self.at],
            0,
        )

    def send_action(self, action):
        self.calls += 1
        if self.calls in self.lost_actions:
            self.where.append(self.where[-1])
            raise OSError(5, "Input/output error")  # a serial port without its cable
        self.where.append(action["joint"] + (self.where[-1] if self.is_relative else 0.0))
        super().send_action(action)
        return {"joint": float("nan")} if self.calls in self.untold else action


class Rows:
    """Keeps what is recorded."""

    def begin(self):
        self.labels = []

    def add(self, seen, action, is_correction):
        self.labels.append(None if seen is None else action.item())

    def end(self, result):
        pass


def recorded(robot, plan, **settings):
    """Return the labels of an episode in which the policy's chunk is always the rest of ``plan``."""
    policy, rows = Foretell(), Rows()
    policy.act = lambda row, streams: np.array(plan, np.float32)[None, :, None]
    with RobotEpisodes(policy, robot, ENV, RobotConfig(real_time=False, **settings), recorder=rows) as episodes:
        episodes.run([SPEC], lambda result: None)
    return rows.labels, episodes.timing


def test_a_lost_displacement_was_not_executed_and_is_still_to_be_made(caplog):
    """The third action does not arrive: the arm stays, which is its label, and is then moved back, not twice."""
    arm = Slide(True, lost=(3,), num_steps=4)
    labels, timing = recorded(arm, [1.0, 1.0, -1.0, 0.5], relative_dims=[0])
    assert arm.where == [0, 1, 2, 2, 1, 1.5] and labels == [1, 1, 0, -1, 0.5] and timing.lost == 1
    assert labels == np.diff(arm.where).tolist() and "Input/output error" in caplog.text


def test_a_lost_position_leaves_the_arm_where_it_was():
    arm = Slide(False, lost=(3,), num_steps=4, at=5.0)
    labels, _ = recorded(arm, [6.0, 7.0, 8.0, 9.0, 10.0], relative_dims=[])
    assert arm.where == [5, 6, 7, 7, 9, 10] and labels == [6, 7, 7, 9, 10], "the time of position 8 is over"


@pytest.mark.parametrize(("relative_dims", "sent"), [([0], [1, 2, 3, 4, 5, 6]), ([], [1, 2, 2.5, 3, 3.5, 4])])
def test_an_answer_without_numbers_is_not_sent_again_and_not_recorded(relative_dims, sent):
    """What was executed of action 3 is not known. A displacement counts as made; positions are limited from 2, the last that is known."""
    arm = Slide(bool(relative_dims), untold=(3,), num_steps=6)
    limit = {"relative_dims": relative_dims} | ({} if relative_dims else {"max_relative_target": 1.0})
    labels, timing = recorded(
        arm, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] if relative_dims else [1.0, 2.0, 2.5, 3.0, 3.5, 4.0], **limit
    )
    assert arm.sent == sent and timing.lost == 1
    assert labels == [*sent[:2], None, *sent[3:]]


@pytest.mark.parametrize("relative_dims", [[], [0]])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_no_number_that_is_not_finite_reaches_a_motor_or_a_dataset(relative_dims, wrong):
    """It comes from the position, three observations and every third answer; the robot acts on what is finite."""
    arm = Slide(bool(relative_dims), untold=range(2, 40, 3), num_steps=12, at=5.0)
    as_it_was, tries = arm.get_observation, []
    arm.get_observation = lambda: as_it_was() if len(arm.sent) not in (4, 5, 6) else {"now": wrong}
    arm.position = lambda: tries.append(0) or {"joint": wrong if len(tries) < 3 else 5.0}
    rows, policy = Rows(), Foretell()
    settings = RobotConfig(real_time=False, relative_dims=relative_dims, max_relative_target=2.0)
    with RobotEpisodes(policy, arm, ENV, settings, recorder=rows) as episodes:
        episodes.run([SPEC], lambda result: None)
    assert np.isfinite(arm.sent).all() and np.isfinite([label for label in rows.labels if label is not None]).all()
    assert np.isfinite(policy.seen).all() and episodes.timing.lost == 2 + 3 + 4
    arm.position = lambda: {"joint": wrong}
    with pytest.raises(RLinfError, match="its pose.*joint is"):
        played(arm)
    assert set(played(Clock(), max_relative_target=float("nan"))[0]) == {0}, "a limit that is not finite, from Python"


@pytest.mark.parametrize("value", [None, "1.5", [1.0, 2.0]])
def test_what_is_no_number_ends_the_command_and_the_robot_holds(value):
    clock = Clock()
    as_it_was = clock.get_observation
    clock.get_observation = lambda: as_it_was() if len(clock.sent) < 3 else {"now": value}
    with pytest.raises(ConfigError, match="now is .*expected a number"):
        played(clock)
    assert clock.sent == [1, 2, 3, 0]
    clock = Clock()
    clock.position = lambda: value  # no reading at all
    with pytest.raises(ConfigError, match="joint is .*expected a number"):
        played(clock)
    assert clock.sent == []


@pytest.mark.parametrize(("wrong", "named"), [
    (np.full((4, 6, 3), 0.5), "float64"), (np.zeros((6, 4, 3), np.uint8), r"\[6, 4, 3\]"), (np.zeros((4, 6), np.uint8), r"\[4, 6\]"),
    (np.zeros((4, 6, 4), np.uint8), r"\[4, 6, 4\]"), (np.zeros((4, 6, 3), np.int64), "int64"), (None, "top"),
])  # fmt: skip
def test_an_image_of_another_kind_ends_the_command_and_the_robot_holds(wrong, named):
    """Floats of 0 to 1 would be black. The fourth observation after the first chunk's is wrong, or lacks its image."""
    clock, policy = Clock(), Foretell()
    clock.observation_features = {"now": float, "top": (4, 6, 3)}
    as_it_was, right = clock.get_observation, np.full((4, 6, 3), 9, np.uint8)
    clock.get_observation = lambda: (
        as_it_was() | ({"top": right} if len(clock.sent) < 3 else {} if wrong is None else {"top": wrong})
    )
    spec = EnvSpec("clock", ["top"], ["top"], 4, 1)
    with RobotEpisodes(policy, clock, spec, RobotConfig(real_time=False)) as episodes:
        with pytest.raises(ConfigError, match=named):
            episodes.run([SPEC], lambda result: None)
    assert clock.sent == [1, 2, 3, 0] and policy.calls == 2


def test_an_episode_begins_again_where_the_robot_was_lost():
    class Lost(Clock):
        def send_action(self, action):
            if len(self.sent) == 5 and not self.num_restarts:
                self.num_restarts = 1
                raise EpisodeVoidError("gone")
            return super().send_action(action)

    clock = Lost()
    with RobotEpisodes(Foretell(), clock, ENV, RobotConfig(real_time=False)) as episodes:
        results = episodes.run([SPEC, SPEC], lambda result: None)
    assert len(results) == 2 and episodes.num_restarts == 1 and clock.sent == list(range(1, 21))


def test_time_that_passes_gives_the_same_actions():
    sent, timing = played(Clock(num_steps=6), real_time=True, fps=20)
    assert len(timing.lateness_s) == 6 and min(timing.lateness_s) >= 0
    assert sent == [1, 2, 3, 4, 5, 6], "however late they are"


def test_a_policy_that_never_answers_does_not_keep_the_command():
    """As a server that is gone: Python would wait for each thread that is not a daemon."""
    asked, gone = threading.Event(), threading.Event()
    clock = RealTime(lambda row: asked.set() or gone.wait(60), 0.0)
    clock.submit(None, 0)
    assert asked.wait(10)
    start = time.monotonic()
    clock.close()
    assert time.monotonic() - start < 4
    threads = [thread for thread in threading.enumerate() if thread.name == "policy"]
    gone.set()
    assert threads and all(thread.daemon for thread in threads)


def test_a_robot_that_does_not_fit_is_refused():
    camera = Clock()
    camera.observation_features = {"now": float, "top": (64, 64, 3)}
    check_fits(camera, ENV, 1)  # more cameras than the policy reads
    for named, fault in {
        "cameras": (camera, EnvSpec("clock", ["front"], ["front"], 64, 1), 1),
        "state dimensions": (Clock(), EnvSpec("clock", [], [], 64, 2), 1),
        "joints": (Clock(), ENV, 2),
    }.items():
        with pytest.raises(ConfigError, match=named):
            check_fits(*fault)
    camera.is_calibrated = False
    with pytest.raises(ConfigError, match="calibrat"):
        check_fits(camera, ENV, 1)


def test_a_policy_that_remembers_is_refused():
    with pytest.raises(ConfigError, match=r"relative_dims=\[1\]"):
        RobotEpisodes(Foretell(), Clock(), ENV, RobotConfig(relative_dims=[1]))
    policy = Foretell()
    policy.model.num_observations = 2
    with pytest.raises(ConfigError, match="2 observations"):
        RobotEpisodes(policy, Clock(), ENV, RobotConfig())


def test_sigterm_ends_a_command_that_was_started_to_ignore_ctrl_c():
    """As a script's ``&`` starts it: the robot must hold, and a block that must not be half done ends first."""
    done, before = [], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c(), ctrl_c_waits():
            signal.raise_signal(signal.SIGTERM)
            done.append("whole")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["whole"]


# -- the command -----------------------------------------------------------------------------------------------------------

WORDS = (
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "model.action_chunks_len=4", "evaluation.num_episodes=6", "evaluation.num_envs=2",
    "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.progress=false", "cluster.num_threads=1",
)  # fmt: skip


def same(left, right):
    """Whether two evaluations are equal but for rounding: a call of one row rounds differently from a call of sixteen."""
    pairs = list(zip(left.results, right.results, strict=True))
    lengths = all((a.spec, a.success, a.num_env_steps) == (b.spec, b.success, b.num_env_steps) for a, b in pairs)
    return lengths and all(abs(a.episode_return - b.episode_return) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("greedy", ["true", "false"])
def test_without_latency_the_episodes_are_those_of_an_evaluation(tmp_path, greedy):
    words = (*WORDS, f"evaluation.greedy={greedy}")
    plain = evaluate(run_config(tmp_path / "plain", *words))
    quick = robot(run_config(tmp_path / "quick", *words), RobotConfig(real_time=False))
    assert same(quick, plain)


def test_an_episode_has_its_own_random_stream_where_its_first_observation_is_lost():
    class Drawn(Foretell):
        def start_episode(self, spec):
            return spec

        def act(self, row, streams):
            self.streams = streams
            return super().act(row, streams)

    policy = Drawn()
    assert played(Clock(lost=(0,)), policy)[1].failures == 0 and policy.streams == [SPEC]


@pytest.mark.parametrize("real_time", [False, True])
def test_the_policy_computes_in_its_context(real_time):
    modes = set()

    class Autocast(Foretell):
        def act(self, row, streams):
            modes.add((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return super().act(row, streams)

    for context in (nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
        settings = RobotConfig(real_time=real_time, fps=100)
        with RobotEpisodes(Autocast(), Clock(num_steps=3), ENV, settings, context) as episodes:
            episodes.run([SPEC], lambda result: None)
    assert modes == {(False, False), (True, False)}


def test_faults_of_the_robot_depend_on_the_episode_alone(tmp_path):
    found = {
        name: robot(run_config(tmp_path / name, *WORDS, "evaluation.greedy=false"), RobotConfig(real_time=False, **values))
        for name, values in {
            "none": {}, "late": {"latency_s": 0.15}, "noise": {"noise": 0.3}, "again": {"noise": 0.3},
            "lost": {"drop_frames": 1.0, "max_observation_age_s": 0.1},
        }.items()
    }  # fmt: skip
    assert same(found["noise"], found["again"])
    assert not any(same(found["none"], found[name]) for name in ("late", "noise", "lost")), "control"
    assert all(one.num_env_steps == 16 and not one.actions_max_abs for one in found["lost"].results), "nothing moves"
    timing = json.loads((tmp_path / "late" / "timing.json").read_text())
    assert (
        timing["latency_ms"]["median"] == 150 and timing["idle_steps"] > 0 and timing["settings"]["latency_s"] == 0.15
    )


def test_observations_are_delayed_by_whole_steps():
    config = run_config("unused", *WORDS).env
    with closing(make_env(config, 1, auto_reset=False)) as env:
        now, late = [], []
        for delay, seen in ((0, now), (2, late)):
            simulated = EnvRobot(env, RobotConfig(delay_steps=delay))
            simulated.begin(env.episode_specs("eval")[0])
            for _ in range(6):
                seen.append(tuple(simulated.get_observation().values()))
                simulated.send_action({"action_0": 1.0, "action_1": 0.5})
    assert late == [now[0], now[0], *now[:4]] and len(set(now)) == 6


def test_one_robot_has_no_ranks_and_no_recordings(tmp_path):
    for words in ("cluster.num_processes=2", "evaluation.record_episodes=1"):
        with pytest.raises(ConfigError, match=words.partition("=")[0]):
            robot(run_config(tmp_path, *WORDS, words), RobotConfig())
