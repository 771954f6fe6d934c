"""Filtered behaviour cloning on a task that a random policy sometimes solves, with and without demonstrations."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from every_trainer import lines
from run_results import QUIET, REACH, differing_weights, weights_of
from safetensors.torch import load_file

from rlinf.cli import main
from rlinf.offpolicy import filtered_bc
from rlinf.offpolicy.filtered_bc import FilteredBCTrainer

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

RUN = [
    *REACH, *QUIET, "env.max_episode_steps=40", "algorithm=filtered_bc", "trainer.learning_rate=1e-3", "trainer.minibatch_size=64",
    "evaluation.num_episodes=20", "evaluation.num_envs=10", "cluster.num_threads=1",
]  # fmt: skip
SHORT = [*RUN, "algorithm.num_episodes=30", "algorithm.num_updates=3", "trainer.max_steps=2"]


def iterations(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/num_episodes" in line]


def test_a_random_policy_learns_from_its_successes(tmp_path):
    words = ["algorithm.num_episodes=80", "algorithm.num_updates=150", "trainer.max_steps=5"]
    assert main(["train", *RUN, *words, f"output_dir={tmp_path}"]) == 0
    rates = [line["rollout/success_rate"] for line in iterations(tmp_path)]
    assert rates[0] < 0.4 < 0.6 < rates[-1], rates


def test_successful_episodes_are_stored_and_no_others(tmp_path):
    assert main(["train", *SHORT, f"output_dir={tmp_path}"]) == 0
    for number, line in enumerate(iterations(tmp_path)):
        info = json.loads((tmp_path / "successes" / f"{number:06d}" / "meta" / "info.json").read_text())
        assert info["total_episodes"] == round(30 * line["rollout/success_rate"]) > 0


def test_the_demonstrations_are_cloned_too(tmp_path):
    data = tmp_path / "data"
    env = ["env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=40"]
    assert main(["collect", *env, f"dataset={data}", "collect.num_episodes=5", "tracking.progress=false"]) == 0
    for name, more in (("without", []), ("with", [f"sft.dataset={data}"])):
        assert main(["train", *SHORT, *more, f"output_dir={tmp_path / name}"]) == 0
    without, together = (iterations(tmp_path / name)[0] for name in ("without", "with"))
    assert without["rollout/success_rate"] == together["rollout/success_rate"], "the same first rollout"
    assert without["train/loss"] != together["train/loss"]


@pytest.mark.parametrize("restart", [True, False])
def test_an_iteration_restarts_from_the_first_weights(restart, tmp_path):
    # The rate is so small that all steps of an iteration together change no weight by 1e-6.
    words = [f"algorithm.restart={str(restart).lower()}", "trainer.learning_rate=1e-8", "trainer.weight_decay=0"]
    first = [*SHORT, "algorithm.num_updates=20", "algorithm.restart=true", "trainer.max_steps=1"]
    assert main(["train", *first, f"output_dir={tmp_path}"]) == 0
    initial = load_file(tmp_path / "initial.safetensors")
    before = weights_of(tmp_path, "rl_000001")
    assert max(float((before[name] - weight).abs().max()) for name, weight in initial.items()) > 1e-3
    assert main(["train", *SHORT, *words, f"output_dir={tmp_path}", f"resume={tmp_path}"]) == 0
    after = weights_of(tmp_path, "rl_000002")
    expected = initial if restart else {name: before[name] for name in initial}
    assert max(float((after[name] - weight).abs().max()) for name, weight in expected.items()) < 1e-6


def test_a_run_continues_in_a_renamed_and_in_another_folder(tmp_path):
    run, renamed, other = (tmp_path / name for name in ("run", "renamed", "other"))
    assert main(["train", *SHORT, "trainer.max_steps=1", f"output_dir={run}"]) == 0
    run.rename(renamed)
    for folder in (other, renamed):
        assert main(["train", *SHORT, f"output_dir={folder}", f"resume={renamed}/checkpoints/rl_000001"]) == 0
    assert not differing_weights(weights_of(other, "rl_000002"), weights_of(renamed, "rl_000002"))
    assert sorted(path.name for path in (other / "successes").iterdir()) == ["000000", "000001"]


@pytest.mark.parametrize("change", ["missing", "different"])
def test_a_resumed_run_needs_its_stored_episodes(change, tmp_path, capsys):
    words = ["train", *SHORT, f"output_dir={tmp_path}"]
    assert main([*words, "trainer.max_steps=1"]) == 0
    stored = tmp_path / "successes" / "000000"
    if change == "missing":
        shutil.rmtree(stored)
    else:
        (stored / "meta" / "info.json").open("a").write("\n")
    capsys.readouterr()
    assert main([*words, f"resume={tmp_path}"]) != 0
    assert f"successes/000000 {'is missing' if change == 'missing' else 'contains other'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "name", "number"), [(filtered_bc, "run_episodes", 5), (FilteredBCTrainer, "_add_stored", 2)]
)
def test_a_signal_ends_the_sampling_and_the_run_continues(place, name, number, tmp_path, monkeypatch):
    original, calls = getattr(place, name), []

    def signalled(*arguments):
        result = original(*arguments)
        calls.append(arguments)
        if len(calls) == number:  # in the second iteration of three batches, or after it has stored its episodes
            signal.raise_signal(signal.SIGTERM)
        return result

    assert main(["train", *SHORT, f"output_dir={tmp_path / 'whole'}"]) == 0
    words = ["train", *SHORT, f"output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(place, name, signalled)
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 128 + signal.SIGTERM and len(calls) == number
    assert main([*words, f"resume={tmp_path / 'run'}"]) == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["cluster.num_processes=2", "trainer.minibatch_size=64"], "cluster.num_processes=1"),
        (["rollout.worker_processes=2"], "rollout.worker_processes=0"),
        (["sft.max_steps=5", "algorithm.restart=true"], "algorithm.restart=false"),
        (["env=gymnasium", "env.id=Pendulum-v1", "env.tasks=null", "env.max_episode_steps=null"], "algorithm=ppo"),
        (["model.init_config.normalize_state=true"], "normalize_state"),
        (["model.micro_batch_size=48"], "model.micro_batch_size="),
        (["sft.dataset=nowhere"], "sft.dataset"),
    ],
)
def test_bad_input_is_rejected_before_the_start(words, fix, tmp_path, capsys):
    assert main(["train", *SHORT, *words, f"output_dir={tmp_path / 'run'}"]) != 0
    assert fix in capsys.readouterr().err and not (tmp_path / "run").exists()
