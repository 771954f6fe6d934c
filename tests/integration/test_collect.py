"""`rlinf collect` and behaviour cloning from what it wrote: experts, policies, resume, and what is rejected."""

import json
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from run_results import clone, differing_weights, weights_of

from rlinf.cli import main
from rlinf.commands import collect as collecting
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data import lerobot_dataset
from rlinf.data.formats import open_dataset
from rlinf.data.statistics import normalization_statistics
from rlinf.envs import make_env
from rlinf.envs.tabletop.scene import NUM_SUBSTEPS, TIMESTEP_S
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError, SimulatorError
from rlinf.preflight.validation import validate
from rlinf.rollout.demonstrations import ScriptedExpert, run_episodes
from rlinf.tracking import read_metrics
from rlinf.types import EpisodeSpec

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

FIXTURES = Path(__file__).parents[1] / "fixtures"
COLUMN = "observation.images.front"
ENV = ["env=tabletop", "env.tasks=[reach,reach_zone]", "env.max_episode_steps=8", "env.state=proprio"]
QUIET = ["tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1"]
MODEL = ["model=openvla_tiny", "model.action_chunks_len=2"]
CLONE = [
    *ENV, *QUIET, *MODEL, "sft.batch_size=8", "sft.max_steps=4", "trainer.max_steps=0", "evaluation.num_episodes=2", "evaluation.num_envs=2",
    "evaluation.num_videos_per_task=0", "trainer.max_keep=-1",
]  # fmt: skip


def collect(dataset: Path, *overrides: str) -> Path:
    assert main(["collect", *ENV, *QUIET, f"dataset={dataset}", *overrides]) == 0
    return dataset


@pytest.fixture(scope="module")
def expert(tmp_path_factory) -> Path:
    """Ten episodes of an expert that misses now and then, failures too."""
    folder = tmp_path_factory.mktemp("expert") / "data"
    return collect(
        folder, "collect.num_episodes=10", "collect.num_envs=4", "collect.only_success=false",
        "sft.expert.aim_offset_m=[0.07,0.0]", "sft.expert.jitter=0.3",
    )  # fmt: skip


def open_all(folder: Path, chunk_len: int = 1, outcomes: bool = False):
    dataset = lerobot_dataset.open_dataset(folder, {"front": COLUMN}, "observation.state", outcomes)
    dataset.chunk_len = chunk_len
    return dataset


def assert_rows(folder: Path, whole: Path, rows: np.ndarray) -> None:
    """Check that a dataset holds ``rows`` of another one, and no others."""
    found, everything = open_all(folder), open_all(whole)
    np.testing.assert_array_equal(found.actions, everything.actions[rows])
    images, expected = found.rows(np.arange(len(rows)))[0].images, everything.rows(rows)[0].images
    np.testing.assert_array_equal(images["front"], expected["front"])


def recorded(folder: Path) -> dict:
    return json.loads((folder / "meta" / "rlinf.json").read_text())


def test_the_dataset_holds_what_the_expert_saw_and_wanted(expert):
    about, dataset = recorded(expert), open_all(expert, outcomes=True)
    observation, actions = dataset.rows(np.arange(len(dataset)))
    noise = dataset.outcomes.executed - dataset.actions
    assert 0.1 < np.abs(noise).mean() < 0.5, "the label is without the noise that was executed"
    config = build_config(compose_config([*ENV, "sft.expert.aim_offset_m=[0.07,0.0]", "sft.expert.jitter=0.3"]))
    env = make_env(config.env, 1, auto_reset=False)
    for number, episode in enumerate(about["episodes"]):
        expert_of_episode = ScriptedExpert(env, config.sft.expert, config.seed, [number])
        batch = run_episodes(env, [EpisodeSpec(**episode["spec"])], expert_of_episode)
        rows, found = np.flatnonzero(dataset.episode_ids == number), dataset.outcomes
        for stored, played in (
            (actions[:, 0].numpy(), batch.labels[:, 0]),
            (observation.images["front"], np.concatenate([v.images["front"] for v in batch.seen])),
            (observation.state, np.concatenate([v.state for v in batch.seen])),
            (found.executed, batch.executed[:, 0]),
            (found.rewards, batch.rewards[:, 0]),
            (found.success, batch.success[:, 0]),
        ):
            np.testing.assert_array_equal(stored[rows], played)
        assert {observation.instruction[row] for row in rows} == {batch.seen[0].instruction[0]}
        assert episode["success"] == batch.results[0].success and episode["num_env_steps"] == len(rows)
        ends = [False] * (len(rows) - 1) + [episode["success"]]  # a limit is not an end
        assert found.terminated[rows].tolist() == ends
    env.close()
    specs = [tuple(episode["spec"].values()) for episode in about["episodes"]]
    assert len(set(specs)) == len(specs) == 10, "each episode has an initial state of its own"
    assert about["demonstrator"] == "expert" and about["env"]["image_size"] == 64 and "mujoco" in about["versions"]
    assert about["whole"] and dataset.info.env == about["env"]
    info = json.loads((expert / "meta" / "info.json").read_text())
    assert info["fps"] == round(1 / (TIMESTEP_S * NUM_SUBSTEPS)) == 12


def test_only_successes_are_stored_whatever_the_number_of_envs(expert, tmp_path, capsys):
    wanted = ["collect.num_episodes=10", "sft.expert.aim_offset_m=[0.07,0.0]", "sft.expert.jitter=0.3"]
    folder = collect(tmp_path / "successes", "collect.num_envs=3", *wanted)
    every, kept = recorded(expert)["episodes"], recorded(folder)["episodes"]
    stored = [number for number, episode in enumerate(every) if episode["success"]]
    assert 0 < len(stored) < 10, "the expert fails now and then"
    places = [stored.index(n) if n in stored else None for n in range(10)]
    assert kept == [episode | {"episode_index": place} for episode, place in zip(every, places, strict=True)]
    assert_rows(folder, expert, np.flatnonzero(np.isin(open_all(expert).episode_ids, stored)))
    printed = capsys.readouterr().out
    assert f"ran       10 episodes of 2 tasks, {len(stored)} successes" in printed
    assert f"sft.dataset={folder}" in printed


def test_nothing_is_written_without_an_episode(tmp_path, capsys, monkeypatch):
    words = ["collect", *ENV, *QUIET, f"dataset={tmp_path / 'data'}", "collect.num_episodes=2"]
    assert main([*words, "env.max_episode_steps=1"]) == 2
    error = capsys.readouterr().err
    assert "None of 2 episodes succeeded" in error and "Set collect.only_success=false" in error
    monkeypatch.setattr(collecting, "run_episodes", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    assert list(tmp_path.iterdir()) == []


def stopping(monkeypatch, number: int = signal.SIGINT) -> None:
    """Let a signal arrive while the third episode is written."""
    add_episode = collecting.LeRobotWriter.add_episode

    def interrupted(self, *args, **kwargs):
        if self.info["total_episodes"] == 2:
            signal.raise_signal(number)
        add_episode(self, *args, **kwargs)

    monkeypatch.setattr(collecting.LeRobotWriter, "add_episode", interrupted)


def terminating(monkeypatch) -> None:
    stopping(monkeypatch, signal.SIGTERM)


def failing(monkeypatch) -> None:
    """Let the simulator fall over in the third batch."""
    batches: list = []

    def play(env, batch, actor):
        if len(batches) == 2:
            raise SimulatorError("a worker was lost too often")
        batches.append(batch)
        return run_episodes(env, batch, actor)

    monkeypatch.setattr(collecting, "run_episodes", play)


@pytest.mark.parametrize(("fault", "code", "kept"), [(stopping, 130, 3), (terminating, 130, 3), (failing, 2, 4)])
def test_a_collection_that_is_cut_short_keeps_what_has_ended(fault, code, kept, expert, tmp_path, monkeypatch, capsys):
    fault(monkeypatch)
    words = ["collect", *ENV, *QUIET, f"dataset={tmp_path / 'data'}", "collect.num_episodes=10", "collect.num_envs=2",
             "collect.only_success=false", "sft.expert.aim_offset_m=[0.07,0.0]", "sft.expert.jitter=0.3"]  # fmt: skip
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(words) == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert f"interrupted after {kept} of 10 episodes" in capsys.readouterr().out
    assert_rows(tmp_path / "data", expert, np.flatnonzero(open_all(expert).episode_ids < kept))
    about = recorded(tmp_path / "data")
    assert about["episodes"] == recorded(expert)["episodes"][:kept] and not about["whole"]


@pytest.fixture(scope="module")
def cloned(expert, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    clone(folder, expert, *CLONE)
    return folder


def test_two_and_two_steps_on_a_dataset_equal_four(cloned, expert, tmp_path):
    clone(tmp_path / "halves", expert, *CLONE, "sft.max_steps=2", "sft.num_workers=0")
    clone(tmp_path / "halves", expert, *CLONE, f"resume={tmp_path / 'halves'}", "sft.num_workers=3")
    whole = weights_of(cloned, "sft_000004")
    assert not differing_weights(whole, weights_of(tmp_path / "halves", "sft_000004"))
    assert differing_weights(whole, weights_of(tmp_path / "halves", "sft_000002")), "two steps are told apart from four"


def test_a_run_goes_on_with_the_dataset_that_it_began_with(cloned, expert, tmp_path):
    other = collect(tmp_path / "other", "collect.num_episodes=4", "collect.only_success=false", "seed=9")
    shutil.copytree(cloned, tmp_path / "run")
    resume = f"resume={tmp_path / 'run'}"
    for dataset in (f"sft.dataset={other}", "sft.dataset=null"):
        with pytest.raises(
            CheckpointError, match="has cloned different demonstrations from .*Set sft.dataset=.*init_from="
        ):
            clone(tmp_path / "run", expert, *CLONE, resume, "sft.max_steps=5", dataset)
    moved = Path(shutil.copytree(expert, tmp_path / "moved"))
    clone(tmp_path / "run", moved, *CLONE, resume, "sft.max_steps=5")
    assert (tmp_path / "run" / "checkpoints" / "sft_000005").is_dir()


def test_the_policy_takes_its_statistics_from_the_dataset(cloned, expert):
    saved = json.loads((cloned / "checkpoints" / "sft_000004" / "model" / "config.json").read_text())
    dataset = open_all(expert)
    assert saved["norm_stats"] == {"tabletop": normalization_statistics(dataset.actions, dataset.state)}


def test_a_robot_acts_at_the_rate_of_the_dataset_unless_another_is_typed(cloned, tmp_path):
    rate = json.loads((cloned / "checkpoints" / "sft_000004" / "manifest.json").read_text())["fps"]
    assert rate == 12  # of the tabletop's 12.5 steps a second, rounded by the dataset
    for words, expected in (([], 12), (["fps=30"], 30)):
        output = tmp_path / str(expected)
        words = [*words, "real_time=false", "evaluation.num_episodes=1", f"output_dir={output}"]
        assert main(["robot", f"checkpoint={cloned}", *words]) == 0
        assert json.loads((output / "timing.json").read_text())["settings"]["fps"] == expected


def test_the_time_spent_waiting_for_rows_is_logged(cloned):
    (first, last) = [line for line in read_metrics(cloned) if "sft/loss" in line]
    for line in (first, last):
        assert 0 <= line["throughput/data_wait_fraction"] < 1 and line["time/data_wait_s"] >= 0
    # The last line is the mean of three steps; their waits cannot be longer than the steps themselves.
    assert 3 * last["time/data_wait_s"] <= last["time/total_s"] - first["time/total_s"] + 1e-6


def test_a_policy_is_collected_from_and_its_actions_are_the_stored_ones(cloned, tmp_path, monkeypatch):
    calls: list[tuple] = []

    class Recorded(collecting.BatchedPolicy):
        def act(self, observation, streams):
            chosen = super().act(observation, streams)
            calls.append((observation, chosen))
            return chosen

    monkeypatch.setattr(collecting, "BatchedPolicy", Recorded)
    words = ["collect", f"checkpoint={cloned}", f"dataset={tmp_path / 'data'}", "collect.num_episodes=3", "collect.num_envs=3",
             "collect.only_success=false", "collect.split=eval"]  # fmt: skip
    assert main([*words, *QUIET]) == 0
    about, dataset = recorded(tmp_path / "data"), open_all(tmp_path / "data")
    assert about["checkpoint"].endswith("sft_000004") and about["policy_version"] == 4
    assert about["demonstrator"] == "policy"
    observation, chosen = calls[0]
    first = [int(np.flatnonzero(dataset.episode_ids == number)[0]) for number in range(3)]
    np.testing.assert_array_equal(dataset.actions[first], chosen[:, 0])
    np.testing.assert_array_equal(dataset.actions[np.array(first) + 1], chosen[:, 1], "the second action of the chunk")
    np.testing.assert_array_equal(dataset.rows(np.array(first))[0].images["front"], observation.images["front"])
    longest = max(episode["num_env_steps"] for episode in about["episodes"])
    assert len(calls) == -(-longest // 2), "the policy is asked once per chunk"
    assert about["differences"] == []
    # A folder of weights is a policy, too, not a reason for the expert to act.
    folder = f"model.model_path={cloned / 'checkpoints' / 'sft_000004' / 'model'}"
    words = ["collect.num_episodes=3", "collect.num_envs=3", "collect.only_success=false", "collect.split=eval"]
    collect(tmp_path / "folder", *MODEL, "~model.init_config", folder, *words)
    assert recorded(tmp_path / "folder")["demonstrator"] == "policy"
    np.testing.assert_array_equal(open_all(tmp_path / "folder").actions, dataset.actions)


def test_a_policy_is_collected_from_under_its_own_conditions_or_the_differences_are_recorded(cloned, tmp_path, capsys):
    words = ["collect", f"checkpoint={cloned}", "collect.num_episodes=2", "collect.num_envs=2", "collect.only_success=false",
             "env.max_episode_steps=3", *QUIET]  # fmt: skip
    assert main([*words, f"dataset={tmp_path / 'rejected'}"]) == 2
    message = capsys.readouterr().err
    assert "ManifestMismatchError" in message and "evaluation.allow_mismatch=[env.max_episode_steps" in message
    assert main([*words, f"dataset={tmp_path / 'data'}", "evaluation.allow_mismatch=[env]"]) == 0
    found = recorded(tmp_path / "data")["differences"]
    assert found and all(line.startswith("env.max_episode_steps") and "saved 8, present 3" in line for line in found)
    damaged = Path(shutil.copytree(cloned / "checkpoints" / "sft_000004", tmp_path / "sft_000004"))
    weights = damaged / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert main([*words[:1], f"checkpoint={damaged}", *words[2:5], *QUIET, f"dataset={tmp_path / 'damaged'}"]) == 2
    assert "damaged or was edited" in capsys.readouterr().err
    assert not (tmp_path / "rejected").exists() and not (tmp_path / "damaged").exists()


def rejection(command: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(build_config(compose_config([*ENV, *QUIET, *overrides])), command)
    return str(caught.value)


REFUSED_DATASETS = {
    "camera": (["env.cameras=[side]"], ["no camera 'side'", f"Set sft.cameras=[{COLUMN}]"]),
    "number of cameras": (["sft.cameras=[front,side]"], ["sft.cameras is [front,side]", f"Set sft.cameras=[{COLUMN}]"]),
    "image size": (["env.image_size=32"], ["64 x 64 pixels", "32 x 32", "Set env.image_size=64"]),
    "action width": (["model.action_token_len=3"],
                     ["have 2 dimensions", "expected model.action_token_len=3", "Set model.action_token_len=2"]),
    "state column": (["sft.state_key=next.reward"], ["has 1 dimensions", "expected 4", "Set sft.state_key=observation.state"]),
    "unknown state": (["sft.state_key=propio"], ["'propio'", "Set sft.state_key=null"]),
    "no folder": (["sft.dataset=nowhere"], ["'nowhere', which is not a folder", "Set sft.dataset="]),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), REFUSED_DATASETS.values(), ids=REFUSED_DATASETS)
def test_a_dataset_that_does_not_fit_is_refused_before_anything_starts(expert, overrides, expected):
    message = rejection("sft", *MODEL, "sft.max_steps=4", f"sft.dataset={expert}", *overrides)
    for words in expected:
        assert words in message, message


def test_the_env_judges_the_actions_of_a_dataset_when_it_is_opened(expert, monkeypatch):
    config = build_config(compose_config([*ENV, f"sft.dataset={expert}"]))
    env = make_env(config.env, 1, auto_reset=False)
    found = open_dataset(config.sft, env)
    assert len(found) == len(open_all(expert))
    validate(build_config(compose_config([*ENV, *QUIET, *MODEL, "sft.max_steps=4", f"sft.dataset={expert}"])), "sft")

    def judge(cls, settings, statistics):
        assert settings is config.env and statistics == found.statistics()
        raise ConfigError("the gripper has the other sign")

    monkeypatch.setattr(type(env), "check_statistics", classmethod(judge))
    with pytest.raises(ConfigError, match="the other sign"):
        open_dataset(config.sft, env)
    env.close()


def test_a_dataset_of_the_same_env_under_other_settings_is_refused(expert, tmp_path):
    folder = Path(shutil.copytree(expert, tmp_path / "other"))
    about = recorded(folder)
    base = [*MODEL, "sft.max_steps=4", f"sft.dataset={folder}"]
    (folder / "meta" / "rlinf.json").write_text(json.dumps(about | {"env": about["env"] | {"name": "metaworld"}}))
    message = rejection("sft", *base)
    assert "env.name=metaworld; expected env.name=tabletop" in message and "Set env=metaworld" in message
    free = {"max_episode_steps": 99, "reward_mode": "sparse", "tasks": ["push"]}
    about["env"].update(distractors=True, terminate_on_success=False, **free)
    (folder / "meta" / "rlinf.json").write_text(json.dumps(about))
    message, mended = rejection("sft", *base), ["env.terminate_on_success=false", "env.distractors=true"]
    present = "but the current env has env.terminate_on_success=true env.distractors=false"
    assert f"collected with {' '.join(mended)}, {present}" in message
    assert f"Set {' '.join(mended)}, or sft.allow_mismatch=[terminate_on_success,distractors] to" in message
    assert not any(name in message for name in free), "what changes no row may differ"
    assert "names 'distractor', which is not a key of env" in rejection("sft", *base, "sft.allow_mismatch=[distractor]")
    assert "env.terminate_on_success" not in rejection("sft", *base, "sft.allow_mismatch=[terminate_on_success]")
    for accepted in (mended, ["sft.allow_mismatch=[distractors,terminate_on_success]"]):
        validate(build_config(compose_config([*ENV, *QUIET, *base, *accepted])), "sft")


def test_a_dataset_without_the_state_that_the_model_reads_is_refused():
    overrides = ["env.image_size=16", "env.cameras=[front]", "sft.cameras=[image]", "model.action_token_len=7"]
    base = [*MODEL, *overrides, "sft.max_steps=4", f"sft.dataset={FIXTURES / 'rlds'}"]
    validate(build_config(compose_config([*ENV, *QUIET, *base])), "sft")  # this model reads no state
    message = rejection("sft", *base, "sft.state_key=state")
    assert "has 8 dimensions" in message and "expected 4" in message


def test_a_collection_extends_another_one(expert, tmp_path):
    """The copied rows equal those of the first dataset, the new ones those of a collection on its own."""
    words = ["collect.num_episodes=4", "seed=3"]
    alone = collect(tmp_path / "alone", *words)
    both = collect(tmp_path / "both", *words, f"collect.extends={expert}")
    first, second, all_rows = (open_all(folder, outcomes=True) for folder in (expert, alone, both))
    expected = [np.concatenate(parts) for parts in zip(columns(first), columns(second), strict=True)]
    for column, wanted in zip(columns(all_rows), expected, strict=True):
        np.testing.assert_array_equal(column, wanted)
    assert len({len(first), len(second), len(all_rows)}) == 3 and (first.outcomes.executed != first.actions).any(), (
        "control"
    )
    assert all_rows.episode_ids.tolist() == [*first.episode_ids, *(second.episode_ids + 10)]
    numbers = [row["episode_index"] for row in recorded(both)["episodes"]]
    assert numbers == [row["episode_index"] + 10 for row in recorded(alone)["episodes"]]
    message = rejection("collect", f"collect.extends={expert}", "dataset=new", "env.hold_steps=2")
    assert "was collected with env.hold_steps=1" in message
    assert "not written by `rlinf collect`" in rejection(
        "collect", f"collect.extends={FIXTURES / 'rlds'}", "dataset=new"
    )


def columns(dataset) -> list[np.ndarray]:
    observation, _ = dataset.rows(np.arange(len(dataset)))
    outcomes = dataset.outcomes
    return [
        observation.images["front"], observation.state, np.array(observation.instruction), dataset.actions, outcomes.executed,
        outcomes.rewards, outcomes.success, outcomes.terminated,
    ]  # fmt: skip


REFUSED_COLLECTIONS = {
    "no folder": ([], "Set dataset=data/<name>"),
    "too many": (["dataset=new", "env.num_train_init_states=3", "collect.num_episodes=7"], "Set collect.num_episodes=6"),
    "odd video": (["dataset=new", "collect.video=true", "env.image_size=33"], "Set collect.video=false, or env.image_size=34"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), REFUSED_COLLECTIONS.values(), ids=REFUSED_COLLECTIONS)
def test_a_collection_that_cannot_be_is_refused(overrides, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert expected in rejection("collect", *overrides)


def test_a_collection_never_overwrites_and_needs_an_actor(expert, monkeypatch):
    message = rejection("collect", f"dataset={expert}")
    assert "exists; expected a new folder" in message and str(expert) in message
    monkeypatch.setattr("rlinf.envs.tabletop.env.TabletopVectorEnv.has_expert", classmethod(lambda cls, config: False))
    assert "no scripted expert" in (message := rejection("collect", "dataset=new")) and "Set checkpoint=" in message


@pytest.mark.parametrize(("package", "overrides"), [("pyarrow", []), ("av", ["collect.video=true"])])
def test_a_missing_package_is_told_before_anything_starts(package, overrides, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    config = build_config(compose_config([*ENV, *QUIET, "dataset=new", *overrides]))
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        validate(config, "collect")
