"""The success classifier, from labelled frames to the success of an env, against counts by hand; and planted false positives."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from run_results import run_config

from rlinf.cli import main
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.envs.base import SimulatorStep, VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.success_network import SuccessClassifier, SuccessNetwork
from rlinf.errors import ConfigError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.intervals import wilson_interval
from rlinf.preflight.conditions import conditions_of
from rlinf.robot import classifier as command
from rlinf.robot.classifier import (
    ClassifierConfig,
    LabelledFrames,
    augment,
    calibration,
    choose_threshold,
    classifier,
    cross_fit,
    errors,
    label_rows,
)
from rlinf.types import EpisodeSpec, Observation

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

SIDE = 16
COLOURS = {"make it red": 0, "make it blue": 2}
INSTRUCTIONS = list(COLOURS)


def image(instruction: int, count: int, goal: int) -> np.ndarray:
    """A dark square that lights up in the colour of the instruction once ``count`` has reached ``goal``."""
    shown = np.full((SIDE, SIDE, 3), 40, dtype=np.uint8)
    if count >= goal:
        shown[4:12, 4:12, COLOURS[INSTRUCTIONS[instruction]]] = 250
    return shown


def write(folder, num_episodes=40, camera="front", success=True, shuffled=False):
    """Episodes of six frames whose third frame shows the goal, in two of three episodes."""
    generator = np.random.default_rng(0)
    writer = LeRobotWriter(
        folder, fps=10, image_shapes={camera: (SIDE, SIDE)}, state_dim=0, action_dim=1, video=False, robot_type="lamp"
    )
    with writer:
        for episode in range(num_episodes):
            goal = 3 if success and episode % 3 else 99
            told = np.arange(1, 7) >= (generator.choice([3, 99]) if shuffled else goal)
            frames = np.stack([image(episode % 2, count, goal) for count in range(6)])
            writer.add_episode(
                {camera: frames}, None, np.zeros((6, 1), np.float32), INSTRUCTIONS[episode % 2],
                rewards=np.zeros(6, np.float32), success=told, truncated=True,
            )  # fmt: skip
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("frames") / "data")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a classifier that was trained by the command."""
    folder = tmp_path_factory.mktemp("classifier") / "out"
    assert main(["classifier", f"data={data}", f"output_dir={folder}", "num_steps=60", "num_folds=2"]) == 0
    return str(folder)


class LampEnv(VectorEnv):
    """Counts up. The lamp lights up at ``3 + init_state_id``; the simulator calls it a success one step later."""

    suite = "lamp"
    late = 1

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=[-1.0], action_high=[1.0])
        self.counts, self.goals, self.tasks = (np.zeros(num_envs, dtype=np.int64) for _ in range(3))

    @classmethod
    def all_task_names(cls, config):
        return ["red", "blue"]

    @classmethod
    def state_width(cls, config):
        return 0

    def _reset_env(self, index, spec):
        self.counts[index], self.goals[index], self.tasks[index] = 0, 3 + spec.init_state_id, spec.task_id

    def _step_envs(self, ids, actions):
        self.counts[ids] += 1
        return SimulatorStep(np.zeros(len(ids), np.float32), self.counts[ids] == self.goals[ids] + self.late)

    def _observe(self, ids):
        shown = [image(self.tasks[i], self.counts[i], self.goals[i]) for i in ids]
        return Observation({"front": np.stack(shown)}, None, [INSTRUCTIONS[self.tasks[i]] for i in ids])


def lamp(num_envs=2, auto_reset=False, kind=LampEnv, **settings):
    config = EnvConfig(name="lamp", image_size=SIDE, max_episode_steps=8, **settings)
    return kind(config, num_envs, auto_reset)


def spec(init_state_id, task_id=0, seed=0):
    return EpisodeSpec("lamp", task_id, init_state_id, seed)


def play(env, specs, chunk_len=1):
    """The results of episodes by zeros, in the order of ``specs``."""
    chunk = np.zeros((env.num_envs, chunk_len, 1))
    found = []
    for first in range(0, len(specs), env.num_envs):
        batch = specs[first : first + env.num_envs]
        env.reset(options={"episodes": [*batch, *[None] * (env.num_envs - len(batch))]})
        results = {}
        while len(results) < len(batch):
            step = env.chunk_step(chunk)
            results |= dict(zip(step.final_env_ids.tolist(), step.episodes, strict=True))
        found += [results[row] for row in range(len(batch))]
    return found


def test_labels_end_with_the_first_frame_after_a_success():
    episodes = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    success = np.array(
        [0, 1, 1, 1, 0, 0, 0, 0, 1], dtype=bool
    )  # the last episode ended at its success: no frame shows it
    rows, labels = label_rows(episodes, success, tail_frames=0, most_failures=None, seed=0)
    assert rows.tolist() == [0, 1, 2, 4, 5, 6, 7, 8] and np.flatnonzero(labels).tolist() == [2]
    rows, labels = label_rows(episodes, success, tail_frames=1, most_failures=None, seed=0)
    assert rows[labels].tolist() == [2, 3, 8] and rows[~labels].tolist() == [0, 1, 4, 5, 6, 7]
    rows, labels = label_rows(episodes, success, tail_frames=9, most_failures=None, seed=0)
    assert rows[labels].tolist() == [0, 1, 2, 3, 7, 8], "all of an episode that is shorter"
    rows, labels = label_rows(episodes, success, tail_frames=0, most_failures=1, seed=0)
    assert labels.tolist() == [False, True, False, False]
    assert rows[:2].tolist() == [1, 2]  # the last failure before the success
    assert len({label_rows(episodes, success, 0, 1, seed)[0][2] for seed in range(20)}) > 1  # drawn where it fails


def test_each_frame_is_scored_by_networks_that_have_not_seen_its_episode(monkeypatch):
    """A network that gives its number: a logit tells which network was asked."""
    seen = {}

    class Number(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, images, instruction_ids):
            return torch.full((len(images),), float(self.number))

    def fake(frames, num_instructions, config, number):
        seen[number] = set(frames.episodes.tolist())
        return Number(4**number)

    monkeypatch.setattr(command, "train", fake)
    episodes = np.repeat(np.arange(12), 5)
    zeros = np.zeros(60, dtype=np.int64)
    frames = LabelledFrames(np.zeros((60, 8, 8, 3), np.uint8), zeros, np.arange(60) % 5 == 0, episodes)
    logits, networks = cross_fit(frames, 1, ClassifierConfig(num_folds=3))
    assert len(networks) == 3 and [len(each) for each in seen.values()] == [8] * 3
    wanted = [sum(4**number for number in seen if episode not in seen[number]) for episode in episodes]
    assert logits.tolist() == wanted and set(wanted) == {1, 4, 16}
    whole = SuccessClassifier(networks, {}).logits(frames.images[:3], zeros[:3])
    assert whole.tolist() == pytest.approx([(1 + 4 + 16) / 3] * 3)


def test_each_row_is_judged_by_its_own_instruction():
    """One image under three instructions, in an order of their own; the weights are random."""
    torch.manual_seed(0)
    about = {"instructions": ["red", "blue", "green"], "camera": "front"}
    classifier, rows = SuccessClassifier([SuccessNetwork(3)], about), [2, 0, 1, 1, 0, 2]
    images = np.repeat(np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8), 6, axis=0)
    alone = [classifier.logits(images[:1], np.array([number])).item() for number in range(3)]
    assert classifier.logits(images, np.array(rows)).tolist() == pytest.approx([alone[row] for row in rows])
    about["threshold"] = sum(sorted(alone)[:2]) / 2
    found = classifier.sees_success(Observation({"front": images}, None, [about["instructions"][row] for row in rows]))
    assert found.tolist() == [alone[row] > min(alone) for row in rows] and 0 < found.sum() < 6


def test_each_frame_is_learned_with_its_own_instruction(data, monkeypatch):
    """But for the successes that are shown under another one, the last quarter. Frames hold the number of their instruction."""
    about = {"camera": None}
    stored = command.read_frames(ClassifierConfig(data=data), "data", about)
    assert stored.instructions.tolist() == (stored.episodes % 2).tolist() and about["instructions"] == INSTRUCTIONS
    seen = []

    class Told(SuccessNetwork):
        def forward(self, images, instruction_ids):
            seen.append((images[:, 0, 0, 0].long(), instruction_ids))
            return super().forward(images, instruction_ids)

    monkeypatch.setattr(command, "SuccessNetwork", Told)
    monkeypatch.setattr(command, "augment", lambda images, mirror, generator: torch.from_numpy(images))
    instruction_ids = np.arange(30) % 3
    images = np.zeros((30, 8, 8, 3), np.uint8) + instruction_ids[:, None, None, None].astype(np.uint8)
    command.train(
        LabelledFrames(images, instruction_ids, np.arange(30) < 15, np.arange(30)), 3, ClassifierConfig(num_steps=2), 0
    )
    for shown, told in seen:
        own = len(told) * 3 // 4
        assert (
            torch.equal(shown[:own], told[:own])
            and not (shown[own:] == told[own:]).any()
            and len(set(told.tolist())) == 3
        )


def test_pictures_are_mirrored_only_if_asked():
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, None, :, None] * 4, (16, 64, 64, 3))
    for mirror, ways in ((False, {1}), (True, {1, -1})):
        found = augment(ramp, mirror, np.random.default_rng(0)).numpy()
        assert {int(np.sign(each[32, 40, 0] - each[32, 20, 0])) for each in found} == ways


def test_threshold_and_errors_are_those_counted_by_hand():
    scores = np.array([5, 4, 3, 2, 1, 0, -1, -2, -3, -4], dtype=np.float32)
    labels = np.array([1, 1, 0, 1, 0, 0, 0, 0, 0, 0], dtype=bool)  # 3 successes, 7 failures
    assert 3 < choose_threshold(scores, labels, 0.0) < 3.001  # above the best failure
    assert 1 < choose_threshold(scores, labels, 0.2) < 1.001  # one of seven may be above
    equal = choose_threshold(np.array([2, 2, 2], np.float32), np.zeros(3, bool), 0.4)
    assert equal > 2  # one of three equal scores cannot be above alone
    found = errors(scores >= 1.5, labels, np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]))["errors"]
    counts = {name: (one["count"], one["of"]) for name, one in found.items()}
    assert counts == {"false_positives": (1, 7), "false_negatives": (0, 3), "false_positive_episodes": (1, 4)}
    assert found["false_positives"]["interval"] == list(wilson_interval(1, 7))


def test_calibration_is_that_counted_by_hand():
    probabilities = np.array([0.15, 0.15, 0.95, 0.95])
    found = calibration(np.log(probabilities / (1 - probabilities)), np.array([0, 1, 1, 1], bool))
    assert [one["frames"] for one in found["reliability"]] == [2, 2]
    assert found["calibration_error"] == pytest.approx(0.5 * 0.35 + 0.5 * 0.05)


def test_the_command_writes_its_numbers_and_sees_what_it_was_taught(trained, capsys):
    about = json.loads((command.Path(trained) / "classifier.json").read_text())
    assert about["camera"] == "front" and about["image_shape"] == [SIDE, SIDE] and about["instructions"] == INSTRUCTIONS
    assert (about["frames"], about["successes"]) == (40 * 6 - 26 * 2, 26)
    assert about["errors"]["false_positives"]["count"] == about["errors"]["false_negatives"]["count"] == 0
    found = SuccessClassifier.load(trained)
    seen = Observation(
        {"front": np.stack([image(0, 3, 3), image(0, 2, 3), image(1, 3, 3)])}, None, [INSTRUCTIONS[0]] * 3
    )
    assert found.sees_success(seen).tolist() == [True, False, False]  # blue is no success of "make it red"
    with torch.autocast("cpu", torch.bfloat16):  # as an env steps inside a rollout
        assert found.sees_success(seen).tolist() == [True, False, False]
    with pytest.raises(ConfigError, match="make it green"):
        found.sees_success(replace(seen, instruction=["make it green"] * 3))


def test_a_manifest_knows_the_classifier_and_not_only_its_folder(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "judge")
    words = (f"env.success_classifier={folder}", "env=tabletop", "model=mlp")
    before = conditions_of(run_config(tmp_path / "run", *words))["env"]
    about = json.loads((folder / "classifier.json").read_text())
    (folder / "classifier.json").write_text(json.dumps(about | {"threshold": 1.0}))
    after = conditions_of(run_config(tmp_path / "run", *words))["env"]
    assert {name for name in before if before[name] != after[name]} == {"success_classifier.sha256"}


def test_shuffled_labels_give_no_classifier(tmp_path):
    data = write(tmp_path / "shuffled", shuffled=True)
    with pytest.raises(ConfigError, match="expected clearly fewer"):
        classifier(ClassifierConfig(data=data, output_dir=str(tmp_path / "out"), num_steps=40, num_folds=2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"success": False}, "all of them failures"),
        ({"camera": "side"}, "cameras \\[side\\]; expected the camera 'front'"),
    ],
)
def test_frames_that_do_not_fit_are_refused_before_training(data, tmp_path, monkeypatch, settings, words):
    monkeypatch.setattr(command, "train", None)  # calling it would be another error
    other = write(tmp_path / "other", 6, **settings)
    with pytest.raises(ConfigError, match=words):
        classifier(ClassifierConfig(data=data, test=other, output_dir=str(tmp_path / "out")))
    with pytest.raises(ConfigError, match="has 40 episodes; expected num_folds=41"):
        classifier(ClassifierConfig(data=data, output_dir=str(tmp_path / "out"), num_folds=41))


def test_the_classifier_decides_on_success_reward_and_end(trained):
    env = lamp(success_classifier=trained, reward_mode="sparse")
    episodes = [spec(0), spec(1, task_id=1), spec(99)]
    seen = play(env, episodes)
    assert [(one.success, one.true_success, one.num_env_steps, one.episode_return) for one in seen] == [
        (True, False, 3, 1.0), (True, False, 4, 1.0), (False, False, 8, 0.0),
    ]  # fmt: skip
    assert (
        play(env, episodes, chunk_len=4)
        == seen
        == play(lamp(3, success_classifier=trained, reward_mode="sparse"), episodes)
    )
    truly = play(lamp(reward_mode="sparse"), episodes)
    assert [(one.success, one.true_success, one.num_env_steps) for one in truly] == [
        (True, None, 4), (True, None, 5), (False, None, 8),
    ]  # fmt: skip
    longer = play(lamp(success_classifier=trained, terminate_on_success=False), [spec(0)])[0]
    assert (longer.success, longer.true_success, longer.num_env_steps) == (True, True, 8)


def test_the_observation_after_a_chunk_is_the_one_that_the_classifier_saw(trained):
    for auto_reset in (False, True):
        envs = [lamp(success_classifier=trained, auto_reset=auto_reset), lamp(kind=Punctual, auto_reset=auto_reset)]
        for env in envs:
            env.reset(options={"episodes": [spec(0), spec(2)], "next_episode": lambda row: spec(7)})
        steps = [env.chunk_step(np.zeros((2, 4, 1))) for env in envs]
        for one, other in (
            (steps[0].observation, steps[1].observation),
            (steps[0].final_observation, steps[1].final_observation),
        ):
            assert np.array_equal(one.images["front"], other.images["front"])
        assert steps[0].executed.tolist() == steps[1].executed.tolist() == [[True] * 3 + [False], [True] * 4]


class Punctual(LampEnv):
    """The simulator calls it a success when the lamp lights up."""

    late = 0


class Losing(LampEnv):
    """Loses the simulator of row 0 once, in its second step."""

    has_lost = False

    def _step_chunk(self, ids, actions, steps_left):
        if not self.has_lost and self.counts[0] == 1 and 0 in ids:
            self.has_lost = self._lost[0] = True
            self._reset_env(0, self._specs[0])
            chunk = super()._step_chunk(ids[1:], actions[1:], steps_left[1:])
            return type(chunk)(*(np.concatenate([np.zeros_like(part[:1]), part]) for part in chunk))
        return super()._step_chunk(ids, actions, steps_left)


def test_a_row_that_loses_its_simulator_begins_again(trained):
    env = lamp(success_classifier=trained, kind=Losing)
    env.reset(options={"episodes": [spec(0), spec(1)]})
    step = env.chunk_step(np.zeros((2, 4, 1)))
    assert step.lost_env_ids.tolist() == [0] and not step.executed[0].any() and step.final_env_ids.tolist() == [1]
    step = env.chunk_step(np.zeros((2, 4, 1)))
    assert [(one.spec, one.success, one.num_env_steps) for one in step.episodes] == [(spec(0), True, 3)]


def test_an_evaluation_tells_both(trained):
    env = lamp(3, success_classifier=trained, terminate_on_success=False)
    found = evaluate_policy(lambda seen: np.zeros((len(seen), 1)), env, [spec(0), spec(5), spec(99)])
    assert (found.successes, found.true_success.successes) == (
        2,
        1,
    )  # the simulator is one step late, and the episode over
    assert found.metrics()["eval/true_success_rate"] == pytest.approx(1 / 3)
    assert "1 of 2 detected" in next(one for one in found.warnings if "simulator" in one)


@pytest.mark.parametrize(
    ("settings", "word"), [({"image_size": 32}, "env.image_size"), ({"cameras": ["side"]}, "front")]
)
def test_an_env_that_shows_other_pictures_is_refused(trained, settings, word):
    with pytest.raises(ConfigError, match=word):
        LampEnv.check_names(EnvConfig(**{"image_size": SIDE, "success_classifier": trained} | settings))
    with pytest.raises(ConfigError, match="not a classifier"):
        LampEnv.check_names(EnvConfig(success_classifier="nowhere"))


def test_the_folder_of_an_earlier_version_is_refused(trained, tmp_path):
    about = json.loads((command.Path(trained) / "classifier.json").read_text())
    del about["networks"]
    (tmp_path / "classifier.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="earlier version"):
        LampEnv.check_names(EnvConfig(success_classifier=str(tmp_path)))


def test_episodes_of_two_datasets_stay_different():
    first, second = (
        LabelledFrames(np.full((2, 4, 4, 3), value, np.uint8), np.zeros(2), np.zeros(2, bool), np.arange(2))
        for value in (1, 2)
    )
    joined = first.concatenate(second)
    assert joined.episodes.tolist() == [0, 1, 2, 3] and joined.images[:, 0, 0, 0].tolist() == [1, 1, 2, 2]


def test_more_episodes_are_learned_from_too(data, tmp_path):
    other = write(tmp_path / "other", 6)
    config = ClassifierConfig(data=data, extra_data=other, output_dir=str(tmp_path / "out"), num_steps=30, num_folds=2)
    about = classifier(config).about
    assert (about["frames"], about["successes"], about["networks"]) == (46 * 6 - 30 * 2, 30, 2)
