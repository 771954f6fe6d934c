"""``resume=auto``: one command that a batch system can start more than once."""

from pathlib import Path

from rlinf.checkpoints.folders import read_loop_state
from rlinf.cli import main

SMALL = [
    "model=mlp", "env=tabletop", "sft.max_steps=0", "env.image_size=32", "env.max_episode_steps=4", "rollout.num_envs=4", "rollout.group_size=2",
    "trainer.minibatch_size=4", "model.micro_batch_size=4", "evaluation.num_envs=2", "evaluation.num_episodes=2",
    "evaluation.num_videos_per_task=0", "evaluation.probe=false", "cluster.device=cpu", "cluster.num_threads=1",
]  # fmt: skip


def start(*words: str) -> int:
    return main(["train", *SMALL, "resume=auto", *words])


def steps_in(folder: Path) -> list[int]:
    return [read_loop_state(path)["step"] for path in sorted((folder / "checkpoints").iterdir())]


def test_the_same_command_begins_a_run_and_goes_on_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert start("output_dir=mine", "trainer.max_steps=1") == 0
    assert "there is no complete checkpoint, so a new run starts" in capsys.readouterr().out
    assert start("output_dir=mine", "trainer.max_steps=2") == 0
    assert f"resume=auto: mine/checkpoints/rl_000001 (searched: {Path.cwd() / 'mine'})" in capsys.readouterr().out
    assert steps_in(tmp_path / "mine") == [1, 2]
    file = tmp_path / "mine" / "checkpoints" / "rl_000002" / "state.json"
    file.write_text(file.read_text() + " ")
    assert start("output_dir=mine", "trainer.max_steps=3") == 0
    assert "resume=auto: mine/checkpoints/rl_000001" in capsys.readouterr().out, "a damaged one is skipped"


def test_without_a_folder_the_newest_run_of_the_experiment_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert start("experiment_name=one", "trainer.max_steps=1") == 0
    (run,) = (path for path in (tmp_path / "outputs" / "one").iterdir() if path.name != "latest")
    assert start("experiment_name=other", "trainer.max_steps=1") == 0, "another experiment starts from the start"
    assert capsys.readouterr().out.count("a new run starts") == 2
    assert start("experiment_name=one", "trainer.max_steps=2") == 0
    assert steps_in(run) == [1, 2]
