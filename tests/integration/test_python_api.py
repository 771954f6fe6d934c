"""``import rlinf`` is light, and its functions do what the commands do."""

import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf.api import _quoted, run_config
from rlinf.cli import main
from rlinf.commands.export import _with_code_of_model, export
from rlinf.config.compose import compose_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.saved_code import env_overrides
from rlinf.config.schema import build_config
from rlinf.envs import ENVS
from rlinf.envs.gymnasium.env import GymnasiumConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import EvaluationResult
from rlinf.manifest import Manifest, hash_files
from rlinf.models import MODELS, build_policy
from rlinf.types import Observation

TINY = [
    "experiment=tabletop_ppo_mlp", "rollout.num_envs=8", "trainer.minibatch_size=64", "evaluation.num_episodes=4",
    "evaluation.num_videos_per_task=0", "env.cameras=[]", "trainer.max_steps=1", "tracking.tensorboard=false",
    "tracking.progress=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder below which the runs of this file lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def state_run(place):
    """A run of a policy that reads the state."""
    before = Path.cwd()
    os.chdir(place)
    try:
        return rlinf.train([*TINY, "output_dir=outputs/state/one"])
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def policy(state_run):
    return rlinf.load_policy(state_run)


@pytest.fixture(scope="module")
def image_policy():
    """A policy of images and words, with random weights, on the tabletop."""
    config = build_config(compose_config(["model=cnn", "env=tabletop"]))
    return rlinf.Policy(build_policy(config).eval(), config)


def random_images(num_rows: int, size: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_rows, size, size, 3), np.uint8)


def one(image_policy, **changes) -> dict:
    """One observation of ``image_policy``, with changes; None leaves a key out."""
    good = {"images": {"front": random_images(1)[0]}, "state": None, "instruction": "reach the red block"}
    return {name: value for name, value in (good | changes).items() if value is not None}


def test_importing_rlinf_shows_its_functions_and_loads_neither_torch_nor_a_simulator():
    code = """
import sys, rlinf
heavy = {"torch", "transformers", "hydra", "gymnasium", "mujoco", "numpy"}
print(sorted(heavy & set(sys.modules)))
print(sorted(set(rlinf.__all__) - set(dir(rlinf))))
rlinf.load_policy, rlinf.make_env, rlinf.train, rlinf.evaluate, rlinf.compare
print(sorted(heavy & set(sys.modules)))
"""
    *before, after = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=280).splitlines()
    assert before == ["[]", "[]"]
    assert "torch" in after and "transformers" not in after and "mujoco" not in after, "the control: a name loads them"


def test_public_names_are_typed_documented_and_a_wrong_one_is_an_attribute_error():
    for name in rlinf.__all__:
        assert inspect.getdoc(getattr(rlinf, name)), name
    for name in ("load_policy", "make_env", "train", "evaluate", "compare"):
        function = getattr(rlinf, name)
        assert "return" in function.__annotations__ and len(inspect.signature(function).parameters) < 9
    with pytest.raises(AttributeError, match="load_polizy"):
        rlinf.load_polizy


def test_three_lines_act_on_an_observation(state_run):
    policy = rlinf.load_policy(state_run)
    observation, _ = rlinf.make_env("tabletop", num_envs=2, cameras=[]).reset(seed=0)
    actions = policy.act(observation)
    assert actions.shape == (2, policy.action_chunks_len, policy.action_dim) and actions.dtype == np.float32
    prediction = policy.model.predict_action_batch(**policy.model.preprocess(observation), do_sample=False)
    np.testing.assert_array_equal(actions, prediction.actions.numpy())
    assert not policy.model.training


def test_one_observation_is_a_row_of_a_batch(policy, image_policy):
    env = rlinf.make_env("tabletop", num_envs=3, cameras=[])
    rows, _ = env.reset(seed=1)
    single = policy.act({"state": rows.state[1].astype(np.float64), "instruction": rows.instruction[1]})
    np.testing.assert_allclose(single, policy.act(rows)[1], atol=1e-6)
    images, sentences = (
        {"front": random_images(2), "wrist": random_images(2)},
        ["reach the red block", "go to the cyan zone"],
    )
    batch = image_policy.act({"images": images, "instruction": sentences})
    for row in range(2):
        given = {"images": {"front": images["front"][row]}, "instruction": sentences[row]}
        np.testing.assert_allclose(image_policy.act(given), batch[row], atol=1e-5)
    assert np.abs(batch[0] - batch[1]).max() > 1e-4, "a control: the rows differ"


def test_sampling_repeats_with_a_seed_and_greedy_actions_always(policy):
    rows, _ = rlinf.make_env("tabletop", num_envs=2, cameras=[]).reset(seed=1)
    first = policy.act(rows, greedy=False, seed=3)
    np.testing.assert_array_equal(policy.act(rows, greedy=False, seed=3), first)
    assert np.abs(policy.act(rows, greedy=False, seed=4) - first).max() > 1e-4
    drawn = [policy.act(rows, greedy=False) for _ in range(2)]
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-4
    np.testing.assert_array_equal(policy.act(rows), policy.act(rows, seed=5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": {"wrist": random_images(1)[0]}}, r"cameras \['wrist'\]; expected \['front'\]"),
        ({"images": random_images(1)}, r"images is a ndarray; expected a mapping.*{'images': {'front': image}}"),
        ({"images": None}, r"cameras \[\]; expected \['front'\]"),
        ({"images": {"front": random_images(1)[0] / 255}}, r"images\['front'\] is float64; expected uint8"),
        ({"images": {"front": random_images(1, 32)[0]}}, r"shape \[32, 32, 3\]; required with one instruction: \[64, 64, 3\]"),
        ({"images": {"front": random_images(1)}}, r"shape \[1, 64, 64, 3\]; required with one instruction"),
        ({"instruction": ["reach the red block"] * 2}, r"shape \[64, 64, 3\]; required with 2 instructions"),
        ({"instruction": None}, "instruction is None; expected a string"),
        ({"instruction": "  "}, "expected a string"),
        ({"instruction": [3]}, "expected a string"),
        ({"state": np.zeros(3, np.float32)}, r"state has the shape \[3\]; required with one instruction: \[31\]"),
        ({"state": np.array(["a"] * 31)}, "state is <U1; expected numbers"),
        ({"state": np.full(31, np.nan)}, "31 values that are NaN or infinite"),
        ({"image": random_images(1)[0]}, "key 'image'. Did you mean 'images'"),
    ],
)  # fmt: skip
def test_bad_inputs_are_refused_in_one_sentence(image_policy, changes, said):
    assert image_policy.act(one(image_policy)).shape == (1, 2), "the control"
    with pytest.raises(ConfigError, match=said) as caught:
        image_policy.act(one(image_policy, **changes))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="act got a list; expected an rlinf.Observation"):
        image_policy.act([1, 2])


def test_a_run_a_checkpoint_an_export_and_a_public_folder_load_as_the_same_policy(state_run, policy, here):
    (checkpoint,) = (state_run / "checkpoints").iterdir()
    assert main(["export", f"checkpoint={state_run}", "output=exported"]) == 0
    rows, _ = rlinf.make_env(policy.config.env, num_envs=2).reset(seed=2)
    wanted = policy.act(rows)
    for folder in (checkpoint, str(checkpoint), "exported", "outputs/state/latest", checkpoint / "model"):
        found = rlinf.load_policy(folder)
        np.testing.assert_array_equal(found.act(rows), wanted)
    assert rlinf.load_policy("exported", overrides=["rollout.temperature=0.5"]).config.rollout.temperature == 0.5
    np.testing.assert_array_equal(rlinf.load_policy(state_run, model_type="mlp").act(rows), wanted)
    with pytest.raises(CheckpointError, match="contains a 'mlp', but model.model_type is 'cnn'"):
        rlinf.load_policy(state_run, model_type="cnn")
    assert rlinf.load_policy(checkpoint / "model").cameras is None, "nothing is known of its env"


def test_what_is_no_policy_is_refused(here, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for folder, said in (
        ("nowhere", "There is no folder nowhere"),
        ("openvla/openvla-7b", "There is no folder openvla/openvla-7b.*hub needs its type. Pass model_type="),
        (tmp_path, "does not contain a model_type. Pass model_type="),
    ):
        with pytest.raises(CheckpointError, match=said):
            rlinf.load_policy(folder)


def test_code_that_a_checkpoint_names_runs_only_where_it_is_asked_for(state_run, here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, plugin, marker = tmp_path / "rl_000001", tmp_path / "their_code.py", tmp_path / "it_ran"
    plugin.write_text(f"open({str(marker)!r}, 'w')\n")
    shutil.copytree(next((state_run / "checkpoints").iterdir()), folder)
    text = (folder / "config.yaml").read_text()
    assert "plugins: []" in text
    (folder / "config.yaml").write_text(text.replace("plugins: []", f"plugins: [{plugin}]"))
    replace(Manifest.load(folder), files=hash_files(folder)).save(folder)
    for call in (rlinf.load_policy, rlinf.evaluate):
        with pytest.raises(CheckpointError, match="names Python code"):
            call(folder)
    assert not marker.exists()
    loaded = rlinf.load_policy(folder, plugins=[str(plugin)])
    assert loaded.action_dim == 2 and marker.exists()
    assert rlinf.evaluate(loaded, episodes=2).episodes == 2, "what was let run once needs no second word"


def test_envs_are_made_by_name_with_their_settings():
    env = rlinf.make_env("tabletop", 3, tasks=["push"], overrides=["env.image_size=48"])
    assert (env.num_envs, env.task_names, env.config.image_size, env.auto_reset) == (3, ["push"], 48, False)
    same = rlinf.make_env(env.config, overrides=["env.max_episode_steps=5"])
    assert (same.num_envs, same.task_names, same.config.max_episode_steps) == (1, ["push"], 5)
    for env, settings, said in (
        ("tabeltop", {}, "There is no env 'tabeltop'. Did you mean 'tabletop'"),
        ("tabletop", {"taks": ["push"]}, "no key 'env.taks'"),
        ({"name": "tabletop"}, {}, r"env is {'name': 'tabletop'} \(dict\); expected the name of an env"),
        ("tabletop", {"num_env": 3}, "make_env got num_env=3, .* Pass num_envs=3$"),
    ):
        with pytest.raises(ConfigError, match=said):
            rlinf.make_env(env, **settings)


def test_an_env_of_ones_own_needs_no_yaml_and_a_folder_of_ones_own_groups_names_it_to_train_in(here, tmp_path):
    (tmp_path / "my_dot.py").write_text(
        "from rlinf.envs import register_env\n"
        "from rlinf.envs.tabletop.env import TabletopVectorEnv\n"
        "register_env('my_dot', TabletopVectorEnv)\n"
    )
    (tmp_path / "my_configs" / "env").mkdir(parents=True)
    (tmp_path / "my_configs" / "env" / "my_dot.yaml").write_text("name: my_dot\ntasks: [reach]\n")
    words, plugin = [*TINY, "env=my_dot", "output_dir=outputs/my_dot"], str(tmp_path / "my_dot.py")
    with pytest.raises(ConfigError, match="There is no env 'my_dot'"):
        rlinf.train(words)
    env = rlinf.make_env("my_dot", plugins=[plugin], cameras=[])
    assert env.config.name == "my_dot" and env.reset()[0].images == {}
    run = rlinf.train(words, plugins=[plugin], config_dir=tmp_path / "my_configs")
    assert rlinf.load_policy(run, plugins=[plugin]).config.env.tasks == ["reach"]

    # An export acts without the code of its env, and says which env it needs for episodes.
    folder = export(run, tmp_path / "given_away", overrides=[f"plugins=[{plugin}]"])
    saved = rlinf.load_policy(run, plugins=[plugin])
    ENVS._entries.pop("my_dot")  # as on a machine that has never heard of it
    with pytest.raises(CheckpointError, match="names Python code"):
        rlinf.load_policy(run)
    policy, state = rlinf.load_policy(folder), np.linspace(0, 1, saved.model.config.state_dim, dtype=np.float32)
    assert (policy.config.env.name, policy.config.plugins) == ("external", [])
    assert (
        policy.act({"state": state, "instruction": "go"}).tolist()
        == saved.act({"state": state, "instruction": "go"}).tolist()
    )
    with pytest.raises(ConfigError, match="exported without its env's code") as caught:
        rlinf.evaluate(policy, episodes=2)
    words = shlex.split(str(caught.value).rpartition("Set ")[2])
    assert words[0] == f"plugins=[{plugin}]" and words[1:] == ["env=my_dot", "env.tasks=[reach]", "env.cameras=[]"]
    sys.modules.pop("my_dot")  # the plug-in registers the env again
    assert rlinf.evaluate(folder, episodes=2, overrides=words).episodes == 2


def test_an_export_leaves_out_an_id_that_a_plug_in_registers_with_gymnasium(tmp_path):
    plugin = tmp_path / "their_poles.py"
    plugin.write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Pole(CartPoleEnv):\n    pass\n"
        "gymnasium.register('TheirPole-v0', entry_point=Pole, max_episode_steps=9)\n"
    )
    for env_id, name in (("TheirPole-v0", "external"), ("Pendulum-v1", "gymnasium")):
        config = run_config("gymnasium", [f"env.id={env_id}", f"plugins=[{plugin}]"])
        exported = _with_code_of_model(config, tmp_path, None)
        assert (exported.env.name, exported.plugins) == (name, [])
        words = shlex.split(env_overrides(exported))  # as a server of the export prints them
        assert ({f"plugins=[{plugin}]", "env=gymnasium", f"env.id={env_id}"} <= {*words}) == (name == "external")


def test_an_export_brings_the_plug_in_file_of_its_model(here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugin = shutil.copy(Path(__file__).parents[1] / "fixtures" / "mlp_by_rows.py", tmp_path / "their_mlp.py")
    words = [*TINY, "model.model_type=mlp_by_rows", "output_dir=outputs/their_mlp"]
    run = rlinf.train(words, plugins=[str(plugin)])
    folder = export(run, tmp_path / "given_away", overrides=[f"plugins=[{plugin}]"])
    os.unlink(plugin)
    MODELS._entries.pop("mlp_by_rows")
    sys.modules.pop("their_mlp")
    with pytest.raises(CheckpointError, match="names Python code") as caught:
        rlinf.load_policy(folder)
    (word,) = shlex.split(str(caught.value).rpartition("Set ")[2])
    assert word == f"plugins=[{folder / 'their_mlp.py'}]"
    policy = rlinf.load_policy(folder, plugins=[str(folder / "their_mlp.py")])
    assert policy.config.model.model_type == "mlp_by_rows" and policy.config.env.name == "tabletop"


def test_episodes_go_on_from_reset_to_reset_as_in_gymnasium():
    env = rlinf.make_env("tabletop", cameras=[])
    env.reset(seed=3)
    first = [env.current_specs()[0]]
    for _ in range(3):
        env.reset()
        first.append(env.current_specs()[0])
    assert len(set(first)) == 4
    env.reset(seed=3)
    assert env.current_specs()[0] == first[0]


class Constant:
    """A policy of somebody else."""

    def __init__(self, action):
        self.action = action

    def act(self, observation: Observation) -> np.ndarray:
        return np.repeat(np.asarray(self.action, np.float32)[None], len(observation), 0)


def test_a_folder_an_object_and_the_command_give_the_same_evaluation(state_run, policy, here, capsys):
    by_folder = rlinf.evaluate(state_run, episodes=6, overrides=["output_dir=outputs/by_folder"])
    assert main(["evaluate", f"checkpoint={state_run}", "evaluation.num_episodes=6", "output_dir=outputs/typed"]) == 0
    typed = EvaluationResult.from_json("outputs/typed/result.json")
    by_object = rlinf.evaluate(policy, episodes=6)
    assert by_folder.results == typed.results == by_object.results and len(typed.results) == 6
    assert rlinf.evaluate(policy).episodes == 4, "as many as the run's own"
    sampled = rlinf.evaluate(policy, episodes=6, overrides=["evaluation.greedy=false"])
    returns = [[row.episode_return for row in one.results] for one in (sampled, typed)]
    assert not sampled.greedy and returns[0] != returns[1]


def test_any_object_with_act_is_evaluated_as_a_loop_by_hand_does_it():
    action = [0.05, -0.03]
    result = rlinf.evaluate(Constant(action), "tabletop", episodes=5, overrides=["env.cameras=[]"])
    env = rlinf.make_env("tabletop", cameras=[])
    for found in result.results:
        env.reset(options={"episodes": [found.spec]})
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, info = env.step(np.array([action], np.float32))
            total, done = total + float(reward[0]), bool(terminated[0] or truncated[0])
        assert (found.success, found.num_env_steps) == (info["episodes"][0].success, info["episodes"][0].num_env_steps)
        assert found.episode_return == pytest.approx(total, abs=1e-5)
    assert result.episodes == 5


def test_a_function_is_a_policy_and_an_object_with_reset_plays_one_episode_after_the_other():
    class Counts:
        """Turns round after five steps of an episode."""

        starts, steps, widths = 0, 0, set()

        def reset(self):
            self.starts, self.steps = self.starts + 1, 0

        def act(self, observation):
            self.steps += 1
            self.widths.add(len(observation))
            return np.full((1, 1, 2), 0.05 if self.steps <= 5 else -0.05)

    settings = {"episodes": 5, "overrides": ["env.cameras=[]", "env.max_episode_steps=8"]}
    by_function = rlinf.evaluate(lambda observation: np.full((len(observation), 2), 0.05), "tabletop", **settings)
    assert by_function.results == rlinf.evaluate(Constant([0.05, 0.05]), "tabletop", **settings).results
    policy = Counts()
    found = rlinf.evaluate(policy, "tabletop", **settings)
    assert (policy.starts, policy.widths) == (5, {1})
    env = rlinf.make_env("tabletop", cameras=[], max_episode_steps=8)
    for result in found.results:
        env.reset(options={"episodes": [result.spec]})
        steps = (np.full((1, 2), 0.05 if step < 5 else -0.05, np.float32) for step in range(result.num_env_steps))
        assert result.episode_return == pytest.approx(sum(float(env.step(each)[1][0]) for each in steps), abs=1e-5)
    with pytest.raises(ConfigError, match="env has num_envs=2; expected 1. Create env with num_envs=1"):
        evaluate_policy(Counts(), rlinf.make_env("tabletop", 2, cameras=[]), [result.spec for result in found.results])


def test_a_loaded_policy_is_evaluated_with_the_overrides_of_its_folder(place, here):
    run = rlinf.train([*TINY, "output_dir=outputs/seeded/one", "seed=7", "rollout.temperature=0.7"])
    policy = rlinf.load_policy(run)
    sampled = ["evaluation.greedy=false", "env.max_episode_steps=12"]
    for number, more in enumerate(
        ([], ["rollout.temperature=3.0"], ["env={success_bonus: 2.0}"], ["env=tabletop", "env.cameras=[]"])
    ):
        chosen = [*sampled, "evaluation.allow_mismatch=[env]", f"output_dir=outputs/seeded/by_folder_{number}"]
        by_folder = rlinf.evaluate(run, overrides=[*more, *chosen])
        by_object = rlinf.evaluate(policy, overrides=[*more, *sampled])
        assert by_object.results == by_folder.results, more
        for one in (by_object, by_folder):
            assert (one.seed, one.temperature) == (7, 3.0 if number == 1 else 0.7)
    same = [rlinf.evaluate(policy, env, overrides=sampled).results for env in (policy.config.env, None)]
    assert same[0] == same[1]
    assert rlinf.evaluate(policy, overrides=["seed=3"]).seed == 3


@pytest.mark.parametrize(
    "override",
    ["experiment=quickstart", "output_dir=mine", "model.precision=fp32", "evaluation.num_videos_per_task=1",
     "trainer.max_steps=3"],
)  # fmt: skip
def test_what_has_no_effect_on_an_object_is_refused_by_name(override, policy):
    for one, env in ((policy, None), (Constant([0.0, 0.0]), "tabletop")):
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=f"override '{key}', which has no effect on a policy object"):
            rlinf.evaluate(one, env, overrides=[override])


def test_an_override_of_one_key_of_a_mapping_keeps_the_others(tmp_path, monkeypatch):
    env = GymnasiumConfig(id="Pendulum-v1", kwargs={"g": 9.0, "render_mode": "rgb_array"})
    assert run_config(env, ["env.kwargs.g=3.0"]).env.kwargs == {"g": 3.0, "render_mode": "rgb_array"}
    base = run_config(env)
    assert run_config(None, ["env.kwargs.g=3.0"], base=base).env.kwargs == {"g": 3.0, "render_mode": "rgb_array"}
    named = GymnasiumConfig(id="gymnasium.envs.classic_control:Pendulum-v1")
    assert run_config(named, ["env.num_processes=0"]).env.id == named.id, "passing the object allows its code to run"


def test_what_is_no_list_is_refused_before_its_letters_are_taken(state_run, policy):
    for call in (lambda **more: rlinf.load_policy(state_run, **more), lambda **more: rlinf.make_env("tabletop", **more),
                 lambda **more: rlinf.evaluate(policy, **more), lambda **more: rlinf.train(**{"overrides": [], **more})):  # fmt: skip
        for name in ("overrides", "plugins"):
            for value, said in (
                ("model.py", r"'model.py', which is not a list. Pass \['model.py'\]"),
                (3, "3; expected a list"),
            ):
                with pytest.raises(ConfigError, match=f"{name}.*: got {said}"):
                    call(**{name: value})


def test_a_path_that_ends_in_a_backslash_is_one_value():
    for path in ("a\\", "a'b", "a\\'b\\\\", "C:\\runs\\one", "a,b=c"):
        (parsed,) = parse_overrides([f"checkpoint={_quoted(path)}"])
        assert parsed.value() == path
    with pytest.raises(CheckpointError, match="There is no folder"):
        rlinf.evaluate("nowhere\\")


def test_an_object_may_have_an_attribute_that_modules_have():
    policy = Constant([0.05, -0.03])
    policy.training = True
    assert rlinf.evaluate(policy, "tabletop", episodes=2, overrides=["env.cameras=[]"]).episodes == 2
    assert policy.training is True


@pytest.mark.parametrize(
    ("policy", "env", "said"),
    [(Constant([0.0]), "tabletop", "Actions have shape"), (Constant([np.nan, 0.0]), "tabletop", r"\d of whose numbers are not finite .the first: nan.; expected finite numbers"),
     (Constant([[[0.0, 0.0]]]), "tabletop", "expected finite numbers"), (Constant([0.0, 0.0]), None, "needs the env"),
     (object(), "tabletop", "evaluate got a object; expected"), (Constant, "tabletop", "evaluate got a type; expected"),
     (lambda observation: [[0.0, 0.0, 0.0]], "tabletop", "<lambda> returned actions")],
)  # fmt: skip
def test_objects_that_do_not_fit_are_refused(policy, env, said):
    with pytest.raises(ConfigError, match=said):
        rlinf.evaluate(policy, env, episodes=2, overrides=["env.cameras=[]"])


def test_two_results_or_two_folders_are_compared(state_run, here):
    settings = {"episodes": 4, "overrides": ["env.cameras=[]"]}
    results = [rlinf.evaluate(Constant(action), "tabletop", **settings) for action in ([0.1, 0], [0, 0.1])]
    assert rlinf.compare(*results).total.episodes == 4
    other = rlinf.train([*TINY, "output_dir=outputs/other/one", "seed=7"])
    comparison = rlinf.compare(state_run, other)
    assert Path(comparison.a) == state_run / "eval" / "after_rl" and comparison.total.episodes == 4
    with pytest.raises(ConfigError, match="a folder and a result"):
        rlinf.compare(state_run, results[0])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [("experiment=quickstart", r"Pass \['experiment=quickstart'\]"), (["-m", "seed=0,1"], "Flags only work on the command line"),
     (["experiment=quikstart"], "Did you mean 'quickstart'"), ([3], "got the override 3")],
)  # fmt: skip
def test_train_refuses_what_is_no_list_of_overrides(overrides, said, here):
    with pytest.raises(ConfigError, match=said):
        rlinf.train(overrides)


def test_a_signal_is_a_keyboard_interrupt_and_no_end_of_the_notebook(here, monkeypatch):
    monkeypatch.setattr("rlinf.commands.train.train", lambda config: sys.exit(130))
    with pytest.raises(KeyboardInterrupt, match="all progress has been saved"):
        rlinf.train([*TINY, "output_dir=stopped"])


def test_latest_names_the_newest_run_in_every_command(here, capsys):
    first = rlinf.train([*TINY, "experiment_name=mine", "output_dir=outputs/mine/1"])
    latest = here / "outputs" / "mine" / "latest"
    assert os.readlink(latest) == "1"
    # A run that starts from the latest one becomes the latest one itself.
    second = rlinf.train([*TINY, "init_from=outputs/mine/latest", "output_dir=outputs/mine/2"])
    assert os.readlink(latest) == "2" and second != first
    assert "outputs/mine/1" in (second / "checkpoints" / "rl_000001" / "config.yaml").read_text()
    assert rlinf.train(["resume=outputs/mine/latest", "trainer.max_steps=2"]) == Path("outputs/mine/2")
    steps = [json.loads(line)["step"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 2
    assert main(["evaluate", "checkpoint=outputs/mine/latest", "evaluation.num_episodes=2"]) == 0
    assert main(["evaluate", "--compare", "outputs/mine/1", "outputs/mine/latest"]) == 0
    assert "b: outputs/mine/2/eval/after_rl" in capsys.readouterr().out
    assert os.readlink(latest) == "2", "an evaluation is not a run"
