"""Filtered behaviour cloning on a task that a random policy sometimes solves, with and without demonstrations."""

import json
import shutil
from pathlib import Path

import pytest
from run_results import QUIET, REACH

from rlinf.cli import main

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


def test_a_resumed_run_needs_its_stored_episodes(tmp_path, capsys):
    words = ["train", *SHORT, f"output_dir={tmp_path}"]
    assert main([*words, "trainer.max_steps=1"]) == 0
    shutil.rmtree(tmp_path / "successes" / "000000")
    capsys.readouterr()
    assert main([*words, f"resume={tmp_path}"]) != 0
    assert "successes/000000 is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["cluster.num_processes=2", "trainer.minibatch_size=64"], "cluster.num_processes=1"),
        (["model.micro_batch_size=48"], "model.micro_batch_size="),
        (["sft.dataset=nowhere"], "sft.dataset"),
    ],
)
def test_bad_input_is_rejected_before_the_start(words, fix, tmp_path, capsys):
    assert main(["train", *SHORT, *words, f"output_dir={tmp_path / 'run'}"]) != 0
    assert fix in capsys.readouterr().err and not (tmp_path / "run").exists()
