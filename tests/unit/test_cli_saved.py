"""The command line on top of a checkpoint: what is taken over, what a resumed run tells, and what is rejected."""

import json
from pathlib import Path

import pytest
import yaml

from rlinf.checkpoints.folders import read_saved_config
from rlinf.cli import EXIT_USER_ERROR, main
from rlinf.errors import CheckpointError
from rlinf.manifest import Manifest
from rlinf.options import to_mapping
from rlinf.preflight.conditions import conditions_of

SMALL = ["experiment=tabletop_ppo_mlp", "trainer.max_steps=1"]


@pytest.fixture
def saved_run(here):
    """A run folder with one checkpoint, whose weights are never looked at."""
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config

    config = build_config(compose_config(["experiment=tabletop_ppo_mlp", "seed=5", "output_dir=outputs/x/run"]))
    folder = here / "outputs" / "x" / "run" / "checkpoints" / "rl_000006"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(config)))
    state = {"format": 2, "saved_at": 0.0, "world_size": 1, "loop_state": {"phase": "rl", "step": 6}}
    (folder / "state.json").write_text(json.dumps(state))
    Manifest(
        **conditions_of(config), model={"model_type": "mlp"}, normalization={}, preprocessing={"cameras": config.env.cameras}, actions={}, lora={},
        renderer=None, policy_version=6,
    ).save(folder)  # fmt: skip
    return folder


def test_resume_goes_on_in_the_same_folder_with_the_saved_configuration_or_a_fresh_experiment(
    saved_run, started, capsys
):
    resumed = ["train", f"resume={saved_run}", "trainer.max_steps=7"]
    assert main([*resumed, "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["model"]["model_type"], printed["trainer"]["max_steps"]) == (5, "mlp", 7)
    assert started == []
    assert main(resumed) == 0
    assert main(["train", *SMALL[:1], "seed=5", f"resume={saved_run}", "output_dir=elsewhere"]) == 0
    (_, config), (_, fresh) = started
    assert (config.seed, config.trainer.max_steps, config.model.model_type) == (5, 7, "mlp")
    assert Path(config.output_dir) == saved_run.parent.parent and config.resume == str(saved_run)
    assert (fresh.seed, fresh.experiment_name, fresh.output_dir) == (5, "tabletop_ppo_mlp", "elsewhere")


def test_resume_tells_every_key_that_has_changed_and_no_other(saved_run, started, capsys):
    changed = ["rollout.num_envs=32", "trainer.learning_rate=1e-5", "env.success_bonus=2", "output_dir=elsewhere"]
    assert main(["train", f"resume={saved_run}", *changed]) == 0
    saved = yaml.safe_load((saved_run / "config.yaml").read_text())
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since")] == [
        f"changed since rl_000006: env.success_bonus {saved['env']['success_bonus']} -> 2.0",
        f"changed since rl_000006: rollout.num_envs {saved['rollout']['num_envs']} -> 32",
        f"changed since rl_000006: trainer.learning_rate {saved['trainer']['learning_rate']} -> 1e-05",
    ]
    assert main(["train", f"resume={saved_run}"]) == 0
    assert "changed since" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "overrides", "said"),
    [
        ("train", ["seed=9"], "seed=9, and {} was written with seed=5; expected the same value throughout a run. Set seed=5"),
        ("train", ["trainer.max_steps=5"], "trainer.max_steps=5 for {}; expected at least the 6 iterations already done"),
        ("train", ["experiment=quickstart", "seed=5"], "{} contains a 'mlp', but model.model_type is 'openvla'"),
        ("sft", ["sft.max_steps=9"], "{} has finished cloning and is in RL. Run rlinf train resume="),
        ("train", ["env=metaworld"], 'env.name: saved "tabletop", present "metaworld"\n'),
        ("train", ["env.cameras=[front]", "env.image_size=32"],
         'preprocessing.cameras: saved [], present ["front"]\n  env.image_size: saved 64, present 32'),
    ],
)  # fmt: skip
def test_a_run_that_cannot_go_on_so_is_refused_before_any_work(saved_run, started, capsys, command, overrides, said):
    assert main([command, f"resume={saved_run}", *overrides]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert said.format(saved_run) in captured.err and captured.out == "" and started == []


def test_an_exported_policy_cannot_be_resumed_and_starts_no_run_of_another_model(saved_run, started, capsys):
    (saved_run / "state.json").unlink()
    (saved_run / "config.json").write_text('{"state_dim": 31}')
    for word, wanted in ((f"resume={saved_run}", "init_from="), (f"init_from={saved_run}", "contains a 'mlp'")):
        assert main(["train", word, "experiment=quickstart"]) == EXIT_USER_ERROR
        assert wanted in capsys.readouterr().err and started == []
    assert main(["train", f"init_from={saved_run}", *SMALL, "output_dir=new", "seed=9"]) == 0


@pytest.mark.parametrize("overrides", [[], ["output_dir=elsewhere"]])
def test_a_superseded_checkpoint_is_moved_back_before_it_is_resumed(saved_run, started, capsys, overrides):
    aside = saved_run.parent / "superseded_1" / saved_run.name
    aside.parent.mkdir()
    saved_run.rename(aside)
    assert main(["train", f"resume={aside}", *overrides]) == EXIT_USER_ERROR
    said = f"Move {aside} back to {saved_run}, and set resume={saved_run}"
    assert said in capsys.readouterr().err and started == []


def test_conditions_may_differ_where_the_user_names_them(saved_run, started):
    allowed = ["model.precision=bf16-mixed", "evaluation.allow_mismatch=[precision]"]
    assert main(["train", f"resume={saved_run}", *allowed]) == 0
    assert started[0][1].model.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("command", "key", "typed"),
    [("train", "checkpoint", "resume="), ("train", "checkpoint", "init_from="), ("sft", "dataset", "Set sft.dataset=")],
)
def test_a_folder_that_training_would_not_read_is_refused(saved_run, started, capsys, command, key, typed):
    assert main([command, "experiment=quickstart", f"{key}={saved_run}"]) == EXIT_USER_ERROR
    assert f"{typed}{saved_run}" in capsys.readouterr().err and started == []


def test_a_folder_whose_run_ended_before_its_first_checkpoint_is_no_dead_end(here, started, capsys):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text("")
    assert main(["train", *SMALL, "output_dir=run"]) == EXIT_USER_ERROR
    assert "Set output_dir=<a new folder>, or delete this one" in capsys.readouterr().err
    assert main(["train", "resume=run"]) == EXIT_USER_ERROR
    assert "cannot be resumed, only restarted" in capsys.readouterr().err


def test_evaluate_takes_the_saved_configuration_but_not_who_trained_it_and_the_overrides(saved_run, monkeypatch):
    pytest.importorskip("ray", reason="not installed: ray; extra 'ray'")
    trained = {
        "num_processes": 2,
        "num_rollout_workers": 4,
        "start": "ray",
        "placement": "disaggregated",
        "max_restarts": 7,
    }
    saved = yaml.safe_load((saved_run / "config.yaml").read_text())
    saved["cluster"] |= trained
    saved["evaluation"] |= {"baselines": True, "greedy": False}  # baselines belong to the run's own evaluation
    (saved_run / "config.yaml").write_text(yaml.safe_dump(saved))
    calls = []
    monkeypatch.setattr("rlinf.commands.evaluate.evaluate", calls.append)
    for words in (["evaluation.num_episodes=7"], ["cluster.start=ray", "cluster.num_rollout_workers=3"]):
        assert main(["evaluate", f"checkpoint={saved_run}", *words]) == 0
    config = calls[0]
    assert (config.checkpoint, config.seed, config.model.model_type) == (str(saved_run), 5, "mlp")
    assert (config.evaluation.baselines, config.evaluation.greedy, config.evaluation.num_episodes) == (False, False, 7)
    assert config.output_dir.startswith("outputs/tabletop_ppo_mlp/evaluate_")
    names = ("num_processes", "num_rollout_workers", "start", "placement", "max_restarts")
    found = [[getattr(each.cluster, name) for name in names] for each in calls]
    # The last one is a control: other keys come from the checkpoint.
    assert found == [[1, None, "auto", "colocated", 7], [1, 3, "ray", "colocated", 7]]


def test_a_saved_configuration_that_is_damaged_or_has_aliases_is_refused_before_it_grows(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_saved_config(tmp_path)
    (tmp_path / "config.yaml").write_text("- a list")
    with pytest.raises(CheckpointError, match="contains no configuration"):
        read_saved_config(tmp_path)
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]  # 9 ** 9 words
    (tmp_path / "config.yaml").write_text("\n".join(levels))
    with pytest.raises(CheckpointError, match=r"has an alias \(\*name\)\)\. Use a different checkpoint"):
        read_saved_config(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1")
    assert read_saved_config(tmp_path) == {"seed": 1}


def test_a_folder_of_runs_means_its_latest_or_else_the_one_that_saved_last(tmp_path, monkeypatch):
    from rlinf.checkpoints.folders import resolve_checkpoint
    from rlinf.report.runs import run_folders

    monkeypatch.setattr("rlinf.checkpoints.folders.damage_of", lambda *_: None)
    for run, saved_at in (("1", 20.0), ("2", 10.0)):
        checkpoint = tmp_path / run / "checkpoints" / "step_000001"
        checkpoint.mkdir(parents=True)
        state = {"format": 2, "saved_at": saved_at, "world_size": 1, "loop_state": {"phase": "step", "step": 1}}
        (checkpoint / "state.json").write_text(json.dumps(state))
        (tmp_path / run / "metrics.jsonl").write_text("")
        (tmp_path / run / "config.yaml").write_text("train: {train_policy: {type: sft}}\n")
    first, second = (tmp_path / run / "checkpoints" / "step_000001" for run in "12")
    assert resolve_checkpoint(tmp_path) == first and resolve_checkpoint(tmp_path / "2") == second
    (tmp_path / "latest").symlink_to("2")
    assert resolve_checkpoint(tmp_path) == second
    assert run_folders([second]) == [tmp_path / "2"]
    for run in "12":
        (tmp_path / run / "samples").mkdir()
    assert run_folders([tmp_path]) == [tmp_path / "2"], "of recipes' runs the newest"
