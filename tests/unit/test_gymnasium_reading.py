"""What a gymnasium env of your own shows and says: cameras, sentence, state, success; and its return in every result."""

import importlib
import json
import sys

import gymnasium
import numpy as np
import pytest

import rlinf
from rlinf.cli.play import PlayConfig, play_episode
from rlinf.commands.collect import _summary
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.contracts.env import check_env
from rlinf.envs import make_env
from rlinf.envs.gymnasium import env as gymnasium_env
from rlinf.envs.gymnasium.env import GymnasiumConfig
from rlinf.envs.process.trial import run_trial
from rlinf.errors import ConfigError
from rlinf.evaluation.result import EvaluationResult, Success

MODULE = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text, Tuple


def act(observation, env):
    return [observation["grip"][0] / 2 + env.unwrapped.at]


def far(observation, env):
    return [7.0]


def two(observation, env):
    return [1, 2]


def text(observation, env):
    return "left"


class Arm(gymnasium.Env):
    """A hand on a line, seen by a camera; a step of more than 0.2 reaches the goal."""

    metadata = {"render_modes": []}
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    told, reset_info = {"succeed": None}, {}
    observation_space = Dict(
        {"top": Box(0, 255, (6, 9, 3), np.uint8), "hand": Dict({"wrist": Box(0, 255, (8, 8, 3), np.uint8), "at": Box(-9, 9, (2,))}),
         "grip": Box(0, 1, (1,)), "task": Text(40)}
    )

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.words = 0.0, f"go to {self.np_random.integers(9)}"
        return self.observe(), dict(self.reset_info)

    def observe(self):
        wrist = np.full((8, 8, 3), 7, np.uint8)
        return {"top": np.full((6, 9, 3), 200, np.uint8), "task": self.words, "grip": np.array([0.5], np.float32),
                "hand": {"wrist": wrist, "at": np.array([self.at, 3], np.float32)}}

    def step(self, action):
        self.at += float(action[0])
        return self.observe(), self.at, False, False, {key: self.at > 0.2 for key in self.told}


SPACES = Arm.observation_space.spaces
for name, changes in {
    "Arm-v0": {},
    "Spoken-v0": {"observation_space": Dict({key: SPACES[key] for key in ("grip",)}), "reset_info": {"instruction": "lift it"}},
    "TwoTexts-v0": {"observation_space": Dict({**SPACES, "hint": Text(9)})},
    "Listed-v0": {"observation_space": Dict({"grip": SPACES["grip"]}), "reset_info": {"instruction": ["lift", "it"]}},
    "Renamed-v0": {"told": ("task_success",)},
    "Untold-v0": {"told": ()},
    "AtTheEnd-v0": {"step": lambda self, action: (*Arm.step(self, action)[:2], self.at > 2, False, {"is_success": False} if self.at > 2 else {})},
    "Planes-v0": {"observation_space": Dict({"top": Box(0, 255, (3, 6, 9), np.uint8)})},
    "Expert-v0": {"expert_action": lambda self: np.array([0.5 + self.at])},
    "InTuple-v0": {"observation_space": Tuple((Dict({"top": SPACES["top"]}), SPACES["grip"])),
                   "observe": lambda self: ({"top": np.full((6, 9, 3), 200, np.uint8)}, np.array([0.5], np.float32))},
    "NanSuccess-v0": {"step": lambda self, action: (*Arm.step(self, action)[:4], {"is_success": float("nan")})},
    "TextSuccess-v0": {"step": lambda self, action: (*Arm.step(self, action)[:4], {"success": "no"})},
    "TextReward-v0": {"step": lambda self, action: (self.observe(), "good", False, False, {})},
    "TextEnd-v0": {"step": lambda self, action: (self.observe(), 0.0, "no", False, {})},
    "NoDict-v0": {"step": lambda self, action: (self.observe(), 0.0, False, False, None)},
    "Lacks-v0": {"observe": lambda self: {"task": "go"}},
    "Wide-v0": {"observe": lambda self: {"task": "go", "grip": np.zeros(2, np.float32), "hand": {"at": np.zeros(2, np.float32)}}},
}.items():
    gymnasium.register(name, entry_point=type(name[:-3], (Arm,), changes), max_episode_steps=4)
'''  # fmt: skip


def tried_here(trial, config, what):
    """A trial without the process around it, which takes a second."""
    return run_trial(trial(config))


@pytest.fixture(scope="module", autouse=True)
def arm_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "arm_for_tests.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.import_module("arm_for_tests")
        patch.setattr(gymnasium_env, "run_in_child", tried_here)
        yield
    sys.modules.pop("arm_for_tests")
    for name in [name for name, spec in gymnasium.registry.items() if "arm_for_tests" in str(spec.entry_point)]:
        gymnasium.registry.pop(name, None)


def build(name="Arm-v0", **settings):
    return make_env(GymnasiumConfig(id=f"arm_for_tests:{name}", num_processes=0, **settings), 1, auto_reset=False)


def test_boxes_of_pictures_are_cameras_a_text_is_the_sentence_and_the_rest_is_the_state():
    env = build(cameras=["hand.wrist", "top"], image_size=16)
    observation, _ = env.reset()
    assert {name: (image.shape, image.flat[0]) for name, image in observation.images.items()} == {
        "hand.wrist": ((1, 16, 16, 3), 7), "top": ((1, 16, 16, 3), 200),
    }  # fmt: skip
    np.testing.assert_array_equal(observation.state, [[0.5, 0.0, 3.0]])  # grip, then hand.at: sorted keys
    assert observation.instruction[0].startswith("go to ") and env.instruction_of(0) is None
    later = env.chunk_step(np.full((1, 1, 1), 0.25, np.float32))
    assert later.success[0] and later.observation.state[0, 1] == 0.25, "info['succeed'] is the success"
    assert env.render_frames([0], 24)[0, 0, 0, 0] == 7, "a video of an env without render shows its first camera"
    assert check_env(lambda num, auto: make_env(env.config, num, auto_reset=auto)) == []


def test_cameras_of_the_observation_are_those_that_the_model_reads():
    def cameras(*overrides):
        return build_config(compose_config(["env=gymnasium", "env.id=arm_for_tests:Arm-v0", *overrides])).env.cameras

    assert cameras("model=mlp") == [] and cameras("model=openvla_tiny") == ["hand.wrist"]
    assert cameras("model=mlp", "env.cameras=[top]") == ["top"]


def test_random_weights_take_the_sizes_of_the_env_and_typed_values_win():
    def model(*overrides):
        given = ["env=gymnasium", "env.id=arm_for_tests:Arm-v0", "env.image_size=48", *overrides]
        section = build_config(compose_config(given)).model
        sizes = {key: section.init_config.get(key) for key in ("state_dim", "image_size", "num_images_in_input")}
        return section.action_token_len, sizes

    assert model("model=mlp") == (1, {"state_dim": 3, "image_size": None, "num_images_in_input": None})
    assert model("model=mlp", "env.state=none")[1]["state_dim"] == 0
    assert model("model=cnn") == (1, {"state_dim": None, "image_size": 48, "num_images_in_input": 1})
    assert model("model=cnn", "env.cameras=[top,hand.wrist]")[1]["num_images_in_input"] == 2
    typed = ["model.action_token_len=5", "model.init_config.image_size=40", "model.init_config.num_images_in_input=2"]
    assert model("model=cnn", *typed) == (5, {"state_dim": None, "image_size": 40, "num_images_in_input": 2})


def test_an_image_in_a_tuple_is_a_camera():
    env = build("InTuple-v0", cameras=["item0.top"], image_size=16)
    observation, _ = env.reset()
    assert observation.images["item0.top"].flat[0] == 200 and observation.state.tolist() == [[0.5]]


EXPERTS = {
    "of the env": ("Expert-v0", None, 0.5), "by name": ("Arm-v0", "arm_for_tests:act", 0.25),
    "beyond the bounds": ("Arm-v0", "arm_for_tests:far", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS)
def test_an_expert_acts_by_a_method_of_the_env_or_by_name(kind):
    name, expert, action = EXPERTS[kind]
    env = build(name, expert=expert)
    env.check_expert(env.config, {}, "x")
    env.reset()
    assert env.expert_actions().tolist() == [[action]]


@pytest.mark.parametrize(("expert", "words"), [
    ("arm_for_tests:nobody", "nobody"), ("arm_for_tests", "module:function"),
    ("arm_for_tests:two", r"\[1, 2\].*an action of Box"), 
])  # fmt: skip
def test_an_expert_that_is_none_is_refused_by_name(expert, words):
    env = build("Arm-v0", expert=expert)
    env.reset()
    with pytest.raises(ConfigError, match=words):
        env.expert_actions()
    with pytest.raises(ConfigError, match="env.expert=<module:function>.*Set x=1"):
        env.check_expert(GymnasiumConfig(id="arm_for_tests:Arm-v0", num_processes=0), {}, "x=1")


@pytest.mark.parametrize(("name", "words"), [
    ("NanSuccess-v0", r"info\['is_success'\] of .*nan"), ("TextSuccess-v0", r"info\['success'\] of .*'no'"), ("TextReward-v0", "`reward` of .*'good'"),
    ("TextEnd-v0", "`terminated` of .*'no'"), ("NoDict-v0", "`info` of .*None"), ("Lacks-v0", r"observation\['grip'\]"), ("Wide-v0", r"'grip'.*Box"),
])  # fmt: skip
def test_a_value_of_another_kind_is_refused_by_name(name, words):
    with pytest.raises(ConfigError, match=words) as raised:
        build(name)
    assert name in str(raised.value)
    if "Success" in name:
        build(name, success_return=1.0)  # then it is not read


def test_a_sentence_of_info_holds_for_the_episode():
    env = build("Spoken-v0")
    assert env.reset()[0].instruction == ["lift it"]
    assert env.chunk_step(np.zeros((1, 2, 1), np.float32)).observation.instruction == ["lift it"]


@pytest.mark.parametrize(("name", "words"), [
    ("TwoTexts-v0", ["two instructions, 'hint' and 'task'", "at most one Text", "FilterObservation"]),
    ("Listed-v0", ["['lift', 'it'] (list)", "expected a str"]),
    ("Planes-v0", ["['top']", "(3, 6, 9)", "neither a camera (uint8, [H, W, 3])", "env.state=none"]),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_sentence_before_an_episode(name, words):
    with pytest.raises(ConfigError) as raised:
        build(name)
    assert all(word in str(raised.value) for word in words), raised.value


def test_success_has_three_names_and_counts_are_none():
    from rlinf.envs.gymnasium.reading import SUCCESS_KEYS, read_success

    assert [read_success({key: 1.0}, "x") for key in SUCCESS_KEYS] == [True] * 3
    assert (
        read_success({"num_successes": 1, "success_rate": 0.0, "solved_by": "me", "success_reward": 0.0}, "x") is None
    )
    with pytest.raises(ConfigError, match="goal_reached"):
        read_success({"goal_reached": np.bool_(False)}, "x")
    with pytest.warns(UserWarning, match="goal_reached"):  # a run that has started continues
        assert read_success({"goal_reached": True}, "x", rejects=False) is None
    build("Renamed-v0", success_return=1.0)  # a return counts instead


def evaluate(name, size, episodes, processes=0):
    """Evaluate a policy that always takes steps of ``size``."""
    overrides = [f"env.id=arm_for_tests:{name}", f"env.num_processes={processes}"]
    return rlinf.evaluate(
        lambda seen: np.full((len(seen), 1), size), "gymnasium", episodes=episodes, overrides=overrides
    )


def test_an_env_without_success_shows_its_return_and_no_rate(tmp_path):
    untold, told = (evaluate(name, 0.25, episodes=5) for name in ("Untold-v0", "Arm-v0"))
    assert untold.return_mean == told.return_mean == pytest.approx(0.25 * (1 + 2 + 3 + 4))
    assert untold.return_interval == pytest.approx((2.5, 2.5))
    assert untold.metrics()["eval/return_low"] == pytest.approx(2.5)
    assert "%" not in untold.table().replace("95 %", "") and "2.5 (95 % 2.5 to 2.5)" in untold.table()
    assert "100.0%" in told.table() and "2.5 (95 % 2.5 to 2.5)" in told.table()
    assert untold.headline().startswith("return 2.5") and told.headline().startswith("5/5 = 100.0%")
    assert (untold.success_rate, untold.successes, untold.interval) == (None, None, None)
    of_success = {name for name in told.metrics() if "success" in name or "interval" in name}
    assert len(of_success) == 5 and untold.metrics().keys() == told.metrics().keys() - of_success
    (tmp_path / "data").mkdir()
    lines = [_summary(tmp_path / "data", collected, 5, 20).splitlines()[0] for collected in (untold, told)]
    assert "success" not in lines[0] and "return 2.5" in lines[0] and "5 successes = 100.0%" in lines[1]
    path = untold.to_json(tmp_path / "result.json")
    data = json.loads(path.read_text())
    assert (data["return_mean"], data["return_interval"], data["reports_success"]) == (2.5, [2.5, 2.5], False)
    for found in (data, *data["per_task"].values()):
        assert (found["success_rate"], found["successes"], found["interval"]) == (None, None, None)
    assert [row["success"] for row in data["results"]] == [None] * 5
    assert EvaluationResult.from_json(path).as_dict() == data and Success.from_dict(data) == untold.total
    assert (told.success_rate, told.successes, told.as_dict()["results"][0]["success"]) == (1.0, 5, True), "control"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_success_that_is_told_at_the_end_alone_is_a_rate_once_an_episode_has_told_a_failure(tmp_path, processes):
    # Four steps of 0.75 pass 2, where the env ends the episode with a failure; those of 0.25 meet the time limit, untold.
    ended, cut = (evaluate("AtTheEnd-v0", size, 2, processes) for size in (0.75, 0.25))
    assert ended.headline().startswith("0/2 = 0.0%") and "0.0%" in ended.table() and ended.summary()["reports_success"]
    assert cut.headline().startswith("return 2.5") and not cut.summary()["reports_success"]
    assert EvaluationResult.from_json(ended.to_json(tmp_path / "result.json")).total.is_reported


@pytest.mark.parametrize(("name", "words"), [("Untold-v0", "ended after 4"), ("Renamed-v0", "failure after 4")])
def test_play_shows_an_outcome_only_if_the_env_tells_a_success(tmp_path, capsys, name, words):
    size = ["model=mlp", "model.init_config.state_dim=3", "model.action_token_len=1", "env.cameras=[top]"]
    success_key = ["env.success_return=1000"] if name == "Renamed-v0" else []
    words_of_env = ["env=gymnasium", f"env.id=arm_for_tests:{name}", "env.num_processes=0"]
    config = build_config(compose_config([*words_of_env, *size, *success_key]))
    play_episode(config, PlayConfig(output=str(tmp_path / "a.mp4"), window=False))
    assert words in capsys.readouterr().out
