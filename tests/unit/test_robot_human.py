"""A person who puts the scene of a robot back, and tells success."""

import io

import numpy as np
import pytest
from PIL import Image
from run_results import run_config

from rlinf.errors import RLinfError
from rlinf.robot.command import robot as robot_command
from rlinf.robot.config import RobotConfig
from rlinf.robot.human import OVERLAY, READY, SUCCESS, HumanLabelledRobot, ask_on_terminal
from rlinf.robot.robot import EpisodeVoidError, check_fits
from rlinf.types import EnvSpec, EpisodeResult, EpisodeSpec
from tests.unit.test_robot import WORDS

SPEC = EpisodeSpec("table", 1, 2, 3)


class Camera:
    """A robot that sees one grey value, and whose env calls every episode a failure."""

    is_calibrated, num_restarts = True, 7
    observation_features, action_features = {"front": (4, 6, 3)}, {"joint": float}

    def __init__(self, grey):
        self.grey, self.result, self.num_started = grey, None, 0

    def begin(self, spec):
        self.result, self.num_started = None, self.num_started + 1
        return "pick it up"

    def get_observation(self):
        return {"front": np.full((4, 6, 3), self.grey, np.uint8)}

    def end(self):
        self.result = EpisodeResult(SPEC, "pick", False, 0.0, 5)


class Answers:
    """A person who answers in this order, and keeps what was shown."""

    def __init__(self, *answers):
        self.answers, self.shown = list(answers), []

    def __call__(self, text, answers):
        self.shown.append(text)
        assert not self.answers or self.answers[0] in answers
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)


def told(tmp_path, *answers, grey=40, wanted=None):
    robot, person = Camera(grey), Answers(*answers)
    return robot, person, HumanLabelledRobot(robot, tmp_path, wanted, person)


@pytest.mark.parametrize(("answer", "success"), [("y", True), ("n", False)])
def test_the_person_tells_success_once(tmp_path, answer, success):
    robot, person, tells = told(tmp_path, "", answer)
    assert tells.begin(SPEC) == "pick it up" and tells.result is None and tells.num_restarts == 7
    check_fits(tells, EnvSpec("table", ["front"], ["front"], 4, 0), 1)
    robot.end()
    results = [tells.result, tells.result]
    assert all(each.success is success and each.success_reported and each.num_env_steps == 5 for each in results)
    assert len(person.shown) == 2 and "pick it up" in person.shown[0], "one answer to start, and one to end"
    assert robot.result.success is False, "control: the env says another thing"


def test_an_episode_is_repeated_and_keeps_its_number(tmp_path):
    robot, person, tells = told(tmp_path, "", "r", "", "y")
    tells.begin(SPEC)
    robot.end()
    with pytest.raises(EpisodeVoidError):
        _ = tells.result
    tells.begin(SPEC)
    robot.end()
    assert tells.result.success and robot.num_started == 2
    assert all("episode 1:" in person.shown[index] for index in (0, 2))


def test_the_command_counts_the_episodes_of_its_list(tmp_path, monkeypatch, capsys):
    """Three episodes, one of which an earlier process has played: 2 of 3, then 3 of 3."""
    words = (*WORDS, "evaluation.num_episodes=3", "env.max_episode_steps=4")
    monkeypatch.setattr("sys.stdin", io.StringIO("\ny\n"))
    with pytest.raises(RLinfError, match="No one is responding"):
        robot_command(run_config(tmp_path, *words), RobotConfig(success="human", real_time=False))
    assert capsys.readouterr().out.count("1 of 3: reach") == 2, "when it starts and when it is judged"
    monkeypatch.setattr("sys.stdin", io.StringIO("\nn\n\ny\n"))
    found = robot_command(run_config(tmp_path, *words), RobotConfig(success="human", real_time=False))
    said = capsys.readouterr().out
    assert [said.count(f"{number} of 3: reach") for number in (1, 2, 3)] == [0, 2, 2]
    assert [result.success for result in found.results] == [True, False, True]


def test_nobody_answers(tmp_path):
    robot, _, tells = told(tmp_path, "")
    tells.begin(SPEC)
    robot.end()
    with pytest.raises(RLinfError, match="success=human.*Set success=env"):
        _ = tells.result
    assert tells.result is not None, "whoever handles the error is not asked again"


def test_the_wanted_start_lies_over_the_present_one(tmp_path):
    """Half of each; a person who looks again sees what has moved."""
    _, _, first = told(tmp_path / "first", "", grey=200)
    first.begin(SPEC)
    robot, person, second = told(tmp_path / "second", "o", "", grey=40, wanted=tmp_path / "first")
    second.begin(SPEC)
    overlay = np.asarray(Image.open(tmp_path / "second" / OVERLAY))
    assert overlay.shape == (4, 6, 3) and np.unique(overlay).tolist() == [120]
    assert len(person.shown) == 2 and str(tmp_path / "first") in person.shown[0]
    _, alone, other = told(tmp_path / "third", "", wanted=tmp_path / "nothing")
    other.begin(SPEC)
    assert "wanted" not in alone.shown[0] and not (tmp_path / "third" / OVERLAY).exists()
    kept = np.asarray(Image.open(tmp_path / "second" / "1_2_3.png"))
    assert np.unique(kept).tolist() == [40]


def test_the_kept_start_is_what_is_seen_after_the_person_has_put_the_scene_back(tmp_path):
    robot, person, labelled = told(tmp_path, "", grey=40)

    def puts_back(text, answers):
        robot.grey = 90
        return person(text, answers)

    labelled.ask = puts_back
    labelled.begin(SPEC)
    assert np.unique(np.asarray(Image.open(tmp_path / "1_2_3.png"))).tolist() == [90]


@pytest.mark.parametrize(
    ("typed", "choices", "expected"),
    [(["what?", "Yes"], SUCCESS, "y"), (["", " NO "], SUCCESS, "n"), (["yes", " "], READY, "")],
)
def test_the_terminal_asks_until_it_is_told(typed, choices, expected):
    assert ask_on_terminal("success?", choices, lambda _: typed.pop(0)) == expected and not typed
