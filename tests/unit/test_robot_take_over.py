"""A person who takes over from a policy, the episodes that are kept of it, and the rows from which a policy learns."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
from run_results import run_config

from rlinf.data import lerobot_dataset
from rlinf.data.config import SFTConfig
from rlinf.data.filters import filtered_rows
from rlinf.data.stored import DatasetInfo, Outcomes
from rlinf.errors import ConfigError
from rlinf.preflight.compatibility import check_chosen_rows
from rlinf.robot import recorder as recording
from rlinf.robot.command import robot
from rlinf.robot.config import RobotConfig
from rlinf.robot.loop import RobotEpisodes
from rlinf.robot.recorder import EpisodeRecorder
from rlinf.robot.teleoperator import ScriptedOperator, TakeOver
from rlinf.types import EpisodeResult, EpisodeSpec
from tests.unit.test_robot import ENV, SPEC, WORDS, Clock, Foretell

Events = Enum("Events", {"IS_INTERVENTION": "is_intervention"})  # as lerobot has them


class Person:
    """Wants to act at some steps, always with one action; is gone at others."""

    is_calibrated = True
    action_features = {"joint": float}

    def __init__(self, steps=(), action=100.0, gone=()):
        self.steps, self.action, self.gone, self.now, self.told = steps, action, gone, -1, []

    def get_teleop_events(self):
        self.now += 1
        if self.now in self.gone:
            raise ConnectionError("unplugged")
        return {Events.IS_INTERVENTION: self.now in self.steps}

    def get_action(self):
        return {"joint": self.action}

    def send_feedback(self, feedback):
        self.told.append(feedback["joint"])


def played(person, clock=None, policy=None, recorder=None, **settings):
    clock, policy = clock or Clock(), policy or Foretell()
    settings = RobotConfig(**{"real_time": False} | settings)
    with RobotEpisodes(policy, clock, ENV, settings, teleoperator=person, recorder=recorder) as episodes:
        episodes.run([SPEC], lambda result: None)
    return clock.sent, episodes.timing


@pytest.mark.parametrize("relative_dims", [[], [0]])
def test_a_person_acts_and_the_policy_is_asked_afresh(relative_dims):
    """The chunk of step 0 holds 1 to 8. The person acts at steps 3 and 4; the policy then plans from step 5, not from its old chunk."""
    person, policy = Person(steps=(3, 4)), Foretell()
    sent, timing = played(person, policy=policy, relative_dims=relative_dims, handover_max_step=1000.0)
    assert sent == [1, 2, 3, 100, 100, *range(6, 21)] and 5 in policy.seen
    assert (timing.intervention_steps, timing.intervened_episodes, timing.teleop_lost_steps, timing.idle_steps) == (
        2,
        1,
        0,
        0,
    )
    assert person.told == [1, 2, 3, *range(6, 21)], (
        "a person is told what the policy does, and does not fight the own hand"
    )


@pytest.mark.parametrize("events", [None, [True], {"is_intervention": float("nan")}, {"is_intervention": "yes"}])
def test_a_teleoperator_that_says_no_flag_is_gone_and_the_policy_goes_on_afterwards(events, caplog):
    person, calls = Person(), []
    person.get_teleop_events = lambda: calls.append(0) or (events if len(calls) == 4 else {})
    sent, timing = played(person, relative_dims=[0])
    assert sent[:3] == [1, 2, 3] and sent[3] == 0 and 100 not in sent and timing.teleop_lost_steps == 1


def test_the_answer_to_a_question_from_before_the_take_over_is_dropped():
    """0.3 s are six steps. The policy was asked at step 2 for the chunk that follows; at the hand-back at step 4 the robot holds until step 10."""
    sent, _ = played(Person(steps=(3,)), latency_s=0.3, relative_dims=[0])
    assert sent[:10] == [1, 2, 3, 100, 0, 0, 0, 0, 0, 0]
    assert sent[10] == 5 + 0, "the chunk that was planned at step 4 starts, as nothing was executed since"


def test_control_a_chunk_that_is_not_dropped_is_noticed(monkeypatch):
    monkeypatch.setattr("rlinf.robot.schedule.ChunkSchedule.clear", lambda self: None)
    policy = Foretell()
    sent, _ = played(Person(steps=(3, 4)), policy=policy, relative_dims=[0])
    assert sent[5] != 6 and 5 not in policy.seen


def test_positions_of_the_person_are_aligned_by_hand():
    """The robot is at 3 when the person takes over at 10: 2 units a step, until they have met. Then the person is free."""
    sent, _ = played(Person(steps=range(3, 9), action=10.0), relative_dims=[], handover_max_step=2.0)
    assert sent[:9] == [1, 2, 3, 5, 7, 9, 10, 10, 10]
    take_over = TakeOver(Person(steps=range(9)), Clock(), np.array([False]), 2.0)
    take_over.teleoperator.action, last, found = 5.0, np.array([2.0], np.float32), []
    for wanted in (5.0, 5.0, 50.0):
        take_over.teleoperator.action = wanted
        take_over.update(last)
        last = take_over.action
        found.append((last.item(), take_over.is_correction))
    assert found == [(4, False), (5, True), (50, True)], "only the person's own action is a correction"
    sent, _ = played(Person(steps=(3,), action=10.0), relative_dims=[0])
    assert sent[3] == 10, "a displacement needs no alignment"


def test_a_teleoperator_that_vanishes_leaves_a_robot_that_holds(caplog):
    person = Person(steps=range(3, 9), action=10.0, gone=(5, 6, 7))
    sent, timing = played(person, relative_dims=[], handover_max_step=100.0)
    assert sent[:10] == [1, 2, 3, 10, 10, 10, 10, 10, 10, 10], "positions are held"
    assert (timing.teleop_lost_steps, timing.idle_steps, timing.intervention_steps) == (3, 3, 3)
    assert (
        "ConnectionError: unplugged" in caplog.text and caplog.text.count("was lost") == 1 and "is back" in caplog.text
    )
    sent, timing = played(Person(gone=range(2, 6)))
    assert sent[:8] == [1, 2, 0, 0, 0, 0, 7, 8], "where nobody watches the policy does not act"


def test_a_leader_arm_whose_driver_fails_is_gone():
    person = Person(steps=(3, 4))
    person.get_action = lambda: (_ for _ in ()).throw(RuntimeError("the port is closed"))
    sent, timing = played(person)
    assert sent[:5] == [1, 2, 3, 0, 0] and timing.teleop_lost_steps == 2


@pytest.mark.parametrize("wants", ["false", float("nan"), None, 0.5])
def test_only_true_means_that_the_person_acts(wants):
    person = Person()
    person.get_teleop_events = lambda: {"is_intervention": wants}
    sent, timing = played(person)
    assert set(sent) == {0} and timing.teleop_lost_steps == 20 and timing.intervention_steps == 0


def test_a_correction_that_does_not_arrive_is_none():
    """The person wants 100 at steps 3 and 4; the first one is lost, so the arm held, and that is not what the person did."""
    rows, clock, calls = [], Clock(num_steps=6), []
    as_it_was = clock.send_action

    def send_action(action):
        calls.append(0)
        if len(calls) == 4:
            raise ConnectionError("no answer")
        return as_it_was(action)

    clock.send_action = send_action
    recorder = SimpleNamespace(begin=rows.clear, end=lambda result: None, add=lambda *row: rows.append(row))
    played(Person(steps=(3, 4)), clock, recorder=recorder)
    assert [(action.item(), own) for _, action, own in rows[2:5]] == [(3, False), (0, False), (100, True)]


def test_what_a_person_does_without_a_picture_is_not_recorded():
    """From step 5 on nothing is seen. 0.15 s are three steps, so 5 and 6 are recorded with the row of step 4, and 7 to 9 are not."""
    rows = []
    recorder = SimpleNamespace(begin=rows.clear, end=lambda result: None, add=lambda *row: rows.append(row))
    sent, _ = played(Person(steps=range(4, 20)), Clock(num_steps=10, lost=range(5, 10)), recorder=recorder)
    assert sent[4:] == [100] * 6
    assert [None if seen is None else seen.state[0, 0] for seen, _, _ in rows] == [0, 1, 2, 3, 4, 4, 4, *[None] * 3]


def test_a_teleoperator_that_does_not_fit_is_refused():
    person = Person()
    with pytest.raises(ConfigError, match="handover_max_step"):
        played(person, relative_dims=[])
    person.is_calibrated = False
    with pytest.raises(ConfigError, match="calibrat"):
        played(person)
    person.action_features = {"wrist": float}
    with pytest.raises(ConfigError, match="missing: joint"):
        played(person)
    with pytest.raises(ConfigError, match="get_teleop_events"):
        played(SimpleNamespace(action_features={"joint": float}, is_calibrated=True))


def test_the_scripted_person_takes_over_after_errors_in_a_row():
    """Halves of the range are 2; the expert wants 1. An action of 3 is 1 away, one of 1.5 is 0.25 away."""
    env = SimpleNamespace(
        action_low=np.full(1, -2.0), action_high=np.full(1, 2.0), expert_actions=lambda: np.ones((1, 1), np.float32)
    )
    robot = SimpleNamespace(env=env, num_started=1, action_features={"joint": float})
    person = ScriptedOperator(robot, RobotConfig(expert_threshold=0.5, expert_patience=2, expert_steps=2))

    def step(action):
        wants = person.get_teleop_events()["is_intervention"]
        if wants:
            assert person.get_action() == {"joint": 1.0}
        else:
            person.send_feedback({"joint": action})
        return wants

    assert [step(action) for action in (3, 1.5, 3, 3, 3, 3, 3, 3)] == [0, 0, 0, 0, 1, 1, 0, 0]
    robot.num_started = 2
    assert not step(1.0), "an episode starts with the policy"


# -- episodes on disk ------------------------------------------------------------------------------------------------------


def test_episodes_that_were_kept_become_a_dataset(tmp_path):
    """A process that was killed in an episode has kept those before it, and the next one writes all."""
    specs = [EpisodeSpec("clock", 0, number, 0) for number in range(2)]
    results = [EpisodeResult(spec, "clock", spec.init_state_id == 0, 1.0, 4) for spec in specs]
    folder, kept = tmp_path / "made", tmp_path / "kept"
    for number, result in enumerate(results):  # a process for each
        recorder = EpisodeRecorder(folder, kept, 20, {"name": "clock", "reward_mode": "dense"})
        played(Person(steps=(1 + number,)), Clock(num_steps=4), recorder=_Renamed(recorder, result))
        recorder.add(None, np.zeros(1, np.float32), False)
    assert not folder.exists() and len(list(kept.glob("*.npz"))) == 2 and recorder.write(results) == folder
    assert not kept.exists()
    data = lerobot_dataset.open_dataset(folder, {}, "observation.state", outcomes=True)
    assert data.actions[:, 0].tolist() == [1, 100, 3, 4, 1, 2, 100, 4]
    assert data.state[:, 0].tolist() == [0, 1, 2, 3] * 2 and data.tasks == ["tell the time"]
    assert np.flatnonzero(data.outcomes.intervention).tolist() == [1, 6]
    assert np.flatnonzero(data.outcomes.success).tolist() == [3] == np.flatnonzero(data.outcomes.rewards).tolist()
    assert np.flatnonzero(data.outcomes.terminated).tolist() == [3]
    assert data.info.env["reward_mode"] == "sparse" and data.info.reports_intervention
    assert recorder.write(results) is None, "no more episodes were kept"
    recorder.pending = tmp_path / "kept_later"
    played(Person(steps=(0,)), Clock(num_steps=4), recorder=_Renamed(recorder, results[1]))
    for _ in range(2):  # the second time is a process that was killed after it had written
        saved = {path: path.read_bytes() for path in recorder.pending.iterdir()}
        assert recorder.write(results) == folder
        recorder.pending.mkdir()
        [path.write_bytes(content) for path, content in saved.items()]
    grown = lerobot_dataset.open_dataset(folder, {}, "observation.state", outcomes=True)
    assert grown.actions[:, 0].tolist() == [*data.actions[:, 0], 100, 2, 3, 4] and grown.num_episodes == 3
    assert np.flatnonzero(grown.outcomes.intervention).tolist() == [1, 6, 8]
    assert np.array_equal(grown.outcomes.success[:8], data.outcomes.success)
    assert np.array_equal(grown.outcomes.terminated[:8], data.outcomes.terminated)
    folder.rename(tmp_path / ".made.old")  # a process was killed between the two renames
    recorder.pending = tmp_path / "kept_last"
    played(Person(steps=(0,)), Clock(num_steps=4), recorder=_Renamed(recorder, results[1]))
    recorder.write(results)
    assert lerobot_dataset.open_dataset(folder, {}, "observation.state", outcomes=True).num_episodes == 4


def test_two_robots_that_record_into_one_folder_lose_nothing(tmp_path, monkeypatch):
    folder, recorders = tmp_path / "made", []
    for name in range(2):
        results = []
        for number in range(2):
            result = EpisodeResult(EpisodeSpec("clock", 0, number, name), "clock", True, 1.0, 4)
            recorder = EpisodeRecorder(folder, tmp_path / f"kept_{name}", 20, {"name": "clock"})
            played(Person(steps=(1,)), Clock(num_steps=4), recorder=_Renamed(recorder, result))
            results.append(result)
        recorders.append((recorder, results))
    meet, replace = threading.Barrier(2, timeout=0.5), recording.replace_folder

    def replace_together(*folders):  # without a lock, each has read the folder before the other writes
        with suppress(threading.BrokenBarrierError):
            meet.wait()
        replace(*folders)

    monkeypatch.setattr(recording, "replace_folder", replace_together)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda of_robot: of_robot[0].write(of_robot[1]), recorders))
    data = lerobot_dataset.open_dataset(folder, {}, "observation.state")
    assert data.num_episodes == 4 and len(data) == 16


def test_a_folder_of_another_rate_or_other_columns_is_not_added_to(tmp_path):
    folder, result = tmp_path / "made", EpisodeResult(EpisodeSpec("clock", 0, 0, 0), "clock", True, 1.0, 4)
    before = EpisodeRecorder(folder, tmp_path / "late", 10, {"name": "clock"})  # the folder is new as this robot starts
    other = EpisodeRecorder(folder, tmp_path / "other", 20, {"name": "tower"})
    for recorder in (EpisodeRecorder(folder, tmp_path / "kept", 20, {"name": "clock"}), before, other):
        played(Person(steps=(1,)), Clock(num_steps=4), recorder=_Renamed(recorder, result))
        if recorder.pending.name == "kept":
            recorder.write([result])
            continue
        with pytest.raises(ConfigError, match="fps=20.*expected 10" if recorder is before else "env="):
            recorder.write([result])
        assert len(list(recorder.pending.glob("*.npz"))) == 1, "the episode stays"
    assert lerobot_dataset.open_dataset(folder, {}, "observation.state").num_episodes == 1
    with pytest.raises(ConfigError, match="fps=20.*expected 10.*Set fps=20"):
        EpisodeRecorder(folder, tmp_path / "again", 10, {"name": "clock"})
    EpisodeRecorder(folder, tmp_path / "again", 20, {"name": "clock"})


class _Renamed:
    """Keeps an episode as another result."""

    def __init__(self, recorder, result):
        self.recorder, self.result, self.begin, self.add = recorder, result, recorder.begin, recorder.add

    def end(self, result):
        self.recorder.end(self.result)


def test_the_command_records_and_refuses(tmp_path, caplog):
    folder = tmp_path / "made"
    settings = RobotConfig(
        real_time=False,
        teleoperator="scripted",
        record=str(folder),
        expert_threshold=0.0,
        expert_patience=1,
        expert_steps=3,
    )
    found = robot(run_config(tmp_path / "eval", *WORDS), settings)
    timing = json.loads((tmp_path / "eval" / "timing.json").read_text())
    data = lerobot_dataset.open_dataset(folder, {}, "observation.state", outcomes=True)
    assert len(data) == timing["steps"] == sum(result.num_env_steps for result in found.results)
    assert data.outcomes.intervention.sum() == timing["intervention_steps"] > 0 and timing["intervened_episodes"] == 6
    assert "must not be evaluated" in caplog.text and not (tmp_path / "eval" / "recorded").exists()
    with pytest.raises(ConfigError, match="episodes of a different kind"):
        robot(run_config(tmp_path / "again", *WORDS, "env.max_episode_steps=9"), settings)


# -- rows from which a policy learns ---------------------------------------------------------------------------------------

SUCCESS = np.array([0, 0, 0, 1, 0, 0, 0, 1, 0, 0], bool)  # of episodes of 4, 4 and 2 rows, the last one failed
PERSON = np.array([0, 1, 1, 0, 0, 0, 0, 0, 0, 1], bool)


class Stored:
    """A dataset of ten rows, whose rows are their numbers."""

    info, last_rows = SimpleNamespace(folder="data/mine"), np.repeat([3, 7, 9], [4, 4, 2])

    def __init__(self, chunk_len=1, person=PERSON):
        self.unreadable = np.zeros(10, bool)
        self.chunk_len, self.outcomes = chunk_len, Outcomes(None, None, SUCCESS, np.zeros(10, bool), person)

    def __len__(self):
        return 10

    def rows(self, index):
        return index


@pytest.mark.parametrize(
    ("rows", "weight", "chunk_len", "expected"),
    [
        ("successes", 1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("successes", 3, 1, [0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7]),
        ("interventions", 1, 1, [1, 2, 9]),
        ("interventions", 1, 2, [1, 9]),  # row 2 is followed by the policy's own action; row 9 ends its episode
        ("corrected", 1, 1, [1, 2, 4, 5, 6, 7, 9]),  # not rows 0 and 3: the policy's own, where it needed help
        ("all", 2, 1, [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 9]),
    ],
)
def test_rows_by_hand(rows, weight, chunk_len, expected):
    found = filtered_rows(Stored(chunk_len), SFTConfig(filter=rows, intervention_weight=weight))
    assert found.rows(np.arange(len(found))).tolist() == expected


def test_no_rows_and_missing_columns_are_refused():
    with pytest.raises(ConfigError, match="sft.filter=interventions"):
        filtered_rows(Stored(person=np.zeros(10, bool)), SFTConfig(filter="interventions"))
    bare = DatasetInfo("data/theirs", "LeRobotDataset v3.0", 1, {}, {}, "observation.state", 2)
    for settings, column in (
        ({"filter": "successes"}, "next.success"),
        ({"filter": "interventions"}, "column intervention"),
        ({"filter": "corrected"}, "next.success"),
        ({"intervention_weight": 2}, "column intervention"),
    ):
        with pytest.raises(ConfigError, match=column):
            check_chosen_rows(SFTConfig(**settings), bare)
        with pytest.raises(ConfigError, match="without sft.dataset"):
            check_chosen_rows(SFTConfig(**settings), None)
    check_chosen_rows(SFTConfig(), bare)
    check_chosen_rows(SFTConfig(), None)
