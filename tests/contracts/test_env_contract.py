"""The contract checker accepts every registered env and the documented examples, and finds each planted fault."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.contracts.env import check_env
from rlinf.envs import ENVS, make_env
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.options import public_fields
from rlinf.registry import BUILTIN

GUIDE = Path(__file__).parents[2] / "docs" / "adding_an_env.md"
CASES = [
    ("tabletop", {"image_size": 32, "max_episode_steps": 8}),
    ("tabletop", {"tasks": ["push"], "max_episode_steps": 20, "image_size": 32, "state": "none"}),
    ("tabletop", {"terminate_on_success": False, "reward_mode": "relative", "cameras": ["front", "wrist"], "image_size": 32,
                  "distractors": True, "state": "proprio", "max_episode_steps": 7}),
    ("metaworld", {"tasks": ["reach-v3", "drawer-close-v3"], "max_episode_steps": 4, "image_size": 32, "num_processes": 0,
                   "action_repeat": 2}),
    ("libero", {"suite": "libero_goal", "tasks": ["turn_on_the_stove"], "image_size": 16, "rendering": "fast",
                "cameras": ["agentview"], "max_episode_steps": 4, "num_settling_steps": 0, "num_processes": 0}),
    ("maniskill", {"cameras": [], "tasks": ["PushCube-v1"], "max_episode_steps": 3, "num_processes": 0}),
    ("maniskill_gpu", {"cameras": [], "tasks": ["PushCube-v1"], "max_episode_steps": 3}),
    ("pusht", {"max_episode_steps": 6, "image_size": 24, "num_processes": 0}),
    ("so101", {"tasks": ["PickAndPlace", "Touch"], "max_episode_steps": 4, "image_size": 24, "num_processes": 0,
               "colours": ["red", "green"], "num_distractors": 1}),
    ("gymnasium", {"id": "CartPole-v1", "max_episode_steps": 8, "num_processes": 0}),
]  # fmt: skip
"""Name of a registered env, and settings with short episodes."""


def code_blocks():
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def guide():
    """What the code of the guide defines, run in the order in which it is printed."""
    scope = {"__name__": "dot_env"}
    for number, block in enumerate(code_blocks()):
        exec(compile(block, f"{GUIDE.name}, block {number}", "exec", dont_inherit=True), scope)
    yield SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})
    ENVS._entries.pop("dot")


def report_of(config):
    return check_env(lambda num_envs, auto_reset: make_env(config, num_envs, auto_reset=auto_reset))


def test_no_registered_env_is_left_out():
    packaged = {name for name, entry in ENVS.entries().items() if entry.origin == BUILTIN}
    assert packaged - {"external"} == {name for name, _ in CASES}, "an external env has no episodes"


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_registered_env_fulfils_the_contract(name, settings):
    if name == "maniskill_gpu" and not torch.cuda.is_available():
        pytest.skip("maniskill_gpu simulates on a CUDA device, and there is none")
    try:
        assert report_of(ENVS.get(name).config_class(**settings)) == []
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_the_example_of_the_guide_fulfils_the_contract(guide):
    assert guide.report == []


def test_the_yaml_of_the_guide_lists_every_field(guide):
    text = re.search(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL).group(1)
    keys = [line.split(":")[0] for line in text.splitlines()]
    assert keys == list(public_fields(guide.DotConfig))


def test_the_expert_of_the_guide_succeeds(guide):
    env = make_env(guide.DotConfig(), 20, auto_reset=False)
    env.reset(options={"episodes": env.episode_specs("eval")[:20]})
    results = [result for _ in range(16) for result in env.chunk_step(env.expert_actions()[:, None]).episodes]
    assert len(results) == 20 and all(result.success for result in results)


@pytest.mark.parametrize("num_processes", [0, 2])
def test_the_example_of_processes_fulfils_the_contract(num_processes, monkeypatch):
    monkeypatch.syspath_prepend(GUIDE.parents[1] / "examples" / "embodiment" / "plugins")
    config_class = importlib.import_module("dial_env").DialConfig
    config = config_class(num_processes=num_processes)
    assert report_of(config) == []
    env = make_env(config, 3, auto_reset=False)
    env.reset()
    assert [one.success for one in env.chunk_step(np.repeat(env.expert_actions()[:, None], 8, 1)).episodes] == [
        True
    ] * 3
    env.close()


def test_the_checker_finds_a_fault_of_a_simulator_in_a_process():
    """A simulator whose episodes depend on what ran before in its row."""
    from walk_env import WalkConfig, WalkVectorEnv

    class Forgetful(WalkVectorEnv):
        simulator_class = "walk_env:ForgetfulSimulator"

    report = check_env(lambda num_envs, auto: Forgetful(WalkConfig(num_processes=2), num_envs, auto))
    assert [sentence for sentence in report if sentence.startswith("Not repeatable")]


def count_resets(base, self, index, spec):
    self.num_resets = getattr(self, "num_resets", 0) + 1
    base(self, index, spec)
    self._dots[index] += 1e-6 * self.num_resets


def shift_by(amount):
    """Start elsewhere, by ``amount(env, rows)``."""

    def shift(base, self, ids, specs):
        base(self, ids, specs)
        self._dots[ids] += 0.01 * amount(self, ids)

    return shift


def changed(**fields):
    """Show another ``images``, ``state`` or ``instruction``: a function of the true one."""

    def show(base, self, ids):
        seen = base(self, ids)
        return replace(seen, **{name: change(getattr(seen, name)) for name, change in fields.items()})

    return show


def after(change):
    """Let ``change(env, step)`` write into the result of a step."""

    def step(base, self, actions):
        found = base(self, actions)
        change(self, found)
        return found

    return step


def reuse_arrays(base, self, ids):
    before = self._observation
    base(self, ids)
    before.state[:] = self._observation.state


def divide_by_zero(base, self):
    never = (self._goals == 0).all(1, keepdims=True)  # no row has its goal in the middle
    return np.where(never, np.float32("nan"), base(self))


def end_twice(env, step):
    step.terminated[:] |= step.truncated


def execute_after_the_end(env, step):
    step.executed[~step.executed.any(1)] = True


def execute_without_an_episode(env, step):
    step.executed[[spec is None for spec in env.current_specs()]] = True


def show_the_old_episode(env, step):
    if step.final_observation is not None:
        step.observation.state[step.final_env_ids] = step.final_observation.state


def another_last_observation(env, step):
    if step.final_observation is not None:
        step.final_observation.state[:] += 1


def do_not_clip(base, self, actions):
    base(self, actions)
    return np.asarray(actions, np.float32)


FAULTS = {
    "['q01'] must have 2 values": ("action_statistics", lambda base, self: {"action": {}}),
    "Not repeatable": ("_reset_env", count_resets),
    "depends on its env slot": ("_reset_envs", shift_by(lambda env, ids: ids[:, None])),
    "depends on num_envs": ("_reset_envs", shift_by(lambda env, ids: env.num_envs)),
    "depends on idle envs": ("_reset_envs", shift_by(lambda env, ids: len(ids))),
    "must be uint8": ("_observe", changed(images=lambda images: {name: each / 255 for name, each in images.items()})),
    "the config's cameras": ("_observe", changed(images=lambda images: {})),
    "`state` is float64": ("_observe", changed(state=lambda state: state.astype(np.float64))),
    "non-empty strings": ("_observe", changed(instruction=lambda sentences: [""] * len(sentences))),
    "modified a previously returned observation": ("_update_observation", reuse_arrays),
    "not disjoint": ("episode_specs", lambda base, self, split: base(self, "train")),
    "round robin": ("episode_specs", lambda base, self, split: sorted(base(self, split)[:100])),
    "is empty": ("episode_specs", lambda base, self, split: []),
    "expert_actions() is float64": ("expert_actions", lambda base, self: base(self).astype(np.float64)),
    "within the action bounds": ("expert_actions", lambda base, self: base(self) + 5),
    "finite for envs without an episode": ("expert_actions", divide_by_zero),
    "render_frames([1], 48)": ("render_frames", lambda base, self, ids, size: base(self, ids, size + 1)),
    "instruction_of": ("instruction_of", lambda base, self, task_id: "do nothing"),
    "must not both be true": ("chunk_step", after(end_twice)),
    "must not change": ("chunk_step", after(execute_after_the_end)),
    "must stay idle": ("chunk_step", after(execute_without_an_episode)),
    "must be the first one of the next episode": ("chunk_step", after(show_the_old_episode)),
    "true last observation": ("chunk_step", after(another_last_observation)),
    "must raise ConfigError; they were accepted": (
        "_checked_actions", lambda base, self, actions: base(self, np.nan_to_num(actions)),
    ),
    "must raise ConfigError, not IndexError": (
        "_checked_actions", lambda base, self, actions: np.nan_to_num(np.clip(actions, -1, 1))[:, :, :2],
    ),
    "clipped": ("_checked_actions", do_not_clip),
}  # fmt: skip
"""A sentence of the report to a method of the guide's env, and a faulty one, which is called with the true one first."""


@pytest.mark.parametrize("words", list(FAULTS))
def test_the_checker_finds_a_planted_fault(guide, words):
    method, change = FAULTS[words]
    base = getattr(guide.DotVectorEnv, method)
    broken = type("Broken", (guide.DotVectorEnv,), {method: lambda self, *args: change(base, self, *args)})
    report = check_env(lambda num_envs, auto: broken(guide.DotConfig(image_size=16), num_envs, auto))
    assert any(words in sentence for sentence in report), report


def test_the_checker_asks_for_short_episodes(guide):
    with pytest.raises(ConfigError, match="max_episode_steps is 500"):
        check_env(lambda num_envs, auto: guide.DotVectorEnv(guide.DotConfig(max_episode_steps=500), num_envs, auto))
