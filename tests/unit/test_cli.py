"""The command line: exit status, one-line errors, folders, and Hydra's habits."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlinf import cli
from rlinf.cli import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USER_ERROR, main
from rlinf.commands import hydra_app
from rlinf.commands import train as training
from rlinf.errors import ConfigError, NonFiniteError, RankError
from rlinf.options import to_mapping

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["experiment=tabletop_ppo_mlp", "trainer.max_steps=1"]


def test_help_lists_every_command_and_no_or_a_misspelt_command_is_an_error(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in cli.COMMANDS)
    assert main([]) == EXIT_USER_ERROR
    assert main(["trian"]) == EXIT_USER_ERROR
    assert "Did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "path"),
    # The folders of a sweep have an equals sign: ``trainer.learning_rate=1e-4``.
    [("train output_dir", "runs/lr=1e-4"), ("evaluate checkpoint", "runs/lr=1e-4"), ("collect dataset", "runs/lr=1e-4"),
     ("train resume", "runs/lr=1e-4"), ("evaluate checkpoint", "runs/a,b"), ("collect checkpoint", "runs/a,b"),
     ("train resume", "runs/a,b"), ("train output_dir", "o/José"), ("evaluate checkpoint", "o/a: $1 #2 'x'"),
     ("train resume", "日本/x y")],
)  # fmt: skip
def test_a_path_with_an_equals_sign_or_a_comma_or_any_letters_needs_no_quotes(command, path, tmp_path, capsys):
    name, key = command.split()
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / "file").touch()
    place = tmp_path / path if key in ("checkpoint", "resume") else tmp_path / "file" / path
    assert main([name, f"{key}={place}", *([] if key in ("checkpoint", "resume") else SMALL)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert f"{place}" in error and "cannot be read" not in error and "several values" not in error


@pytest.mark.parametrize("command", ["evaluate", "audit", "serve", "play", "collect", "export"])
def test_a_folder_that_comes_first_is_the_checkpoint(command, tmp_path, capsys):
    run, others = tmp_path / "run", [f"output={tmp_path / 'new'}"] if command == "export" else []
    for words in ([str(run), *others], [f"checkpoint={run}", *others]):
        assert main([command, *words]) == EXIT_USER_ERROR
        assert f"There is no folder {run}; expected a checkpoint folder or a run folder" in capsys.readouterr().err
    run.mkdir()
    assert main([command, str(run), *others]) == EXIT_USER_ERROR
    assert f"{run} contains no usable checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("place", [[], ["output_dir=new/newer/run"]])
def test_a_start_that_is_rejected_while_its_parts_are_built_leaves_no_folder(place, here, monkeypatch, capsys):
    def reject(*_):
        raise ConfigError("the parts do not fit")

    monkeypatch.setattr(training, "_policy", reject)
    assert main(["train", *SMALL, *place]) == EXIT_USER_ERROR
    assert "the parts do not fit" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_train_runs_in_one_folder_below_the_present_one_or_in_output_dir(here, started, capsys):
    assert main(["train", *SMALL]) == 0
    ((name, config),) = started
    folder = Path(config.output_dir)
    assert name == "train" and not folder.exists() and folder.parent == here / "outputs" / "tabletop_ppo_mlp"
    assert Path.cwd() == here
    assert "samples" in capsys.readouterr().out
    assert main(["train", *SMALL, "output_dir=my runs/first"]) == 0
    assert Path(started[1][1].output_dir) == here / "my runs" / "first"


@pytest.mark.parametrize("words", [["models"], ["train", *SMALL, "--cfg", "job"]])
def test_a_pipe_whose_reader_is_gone_ends_without_a_traceback(words, here):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "rlinf", *words]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=280)
    os.close(write)
    assert (result.returncode, result.stderr) == (cli.EXIT_PIPE, "")


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        ("train --max_steps 3", "Set trainer.max_steps=3 or sft.max_steps=3"),
        ("train --seed=3", "Set seed=3"),
        ("train lr 1e-4", "Set trainer.learning_rate=1e-4 or sft.learning_rate=1e-4"),
        ("train experiment=quickstart --dry-run", "Set e.g. trainer.max_steps=10"),
        ("train experiment quickstart", "Set experiment=quickstart"),
        ("train experiment=zzz", "no experiment 'zzz'. `rlinf models` lists them"),
        ("train experiment=your_config", "register it in a plugin (docs/adding_a_model.md)"),
    ],
)  # fmt: skip
def test_a_likely_mistake_is_answered_with_what_to_type(arguments, typed, here, started, capsys):
    assert main(arguments.split()) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert typed in said and "libero_ppo_openvla" not in said and len(said.splitlines()) == 1


def test_config_name_takes_an_experiment_or_a_complete_config_of_the_user(here, started):
    assert main(["train", "--config-name", "tabletop_ppo_mlp", "trainer.max_steps=1"]) == 0
    assert main(["train", *SMALL]) == 0
    first, second = (to_mapping(config) | {"output_dir": None} for _, config in started)
    assert first == second
    (here / "mine").mkdir()
    whole = "defaults:\n  - train\n  - override model: mlp\n  - _self_\ntrainer: {max_steps: 2}\n"
    (here / "mine" / "whole.yaml").write_text(whole)
    assert main(["train", "--config-dir", "mine", "--config-name", "whole", "env.tasks=[reach]"]) == 0
    config = started[2][1]
    assert (config.model.model_type, config.trainer.max_steps) == ("mlp", 2)


def test_multirun_starts_one_run_per_value_each_in_its_own_folder(here, started):
    assert main(["train", "-m", *SMALL, "seed=1,2", "trainer.learning_rate=1e-4,1e-3"]) == 0
    pairs = [(config.seed, config.trainer.learning_rate) for _, config in started]
    assert pairs == [(1, 1e-4), (1, 1e-3), (2, 1e-4), (2, 1e-3)]
    folders = [Path(config.output_dir) for _, config in started]
    assert len(set(folders)) == 4 and all(here / "multirun" in folder.parents for folder in folders)


def test_sweep_with_one_bad_run_starts_none_of_them(here, started, capsys):
    assert main(["train", "-m", *SMALL, "trainer.minibatch_size=256,100"]) == EXIT_USER_ERROR
    assert started == [] and list(here.iterdir()) == []
    assert "trainer.minibatch_size=100 for 1024 samples" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "runs"), [([], 1), (["-m", "seed=1,2"], 2)])
def test_each_run_is_built_and_checked_once(words, runs, here, started, monkeypatch):
    calls = []
    for name in ("build_config", "check"):
        function = getattr(hydra_app, name)
        monkeypatch.setattr(
            hydra_app, name, lambda *args, name=name, function=function: (calls.append(name), function(*args))[1]
        )
    assert main(["train", *SMALL, *words]) == 0
    assert len(started) == runs and sorted(calls) == ["build_config"] * runs + ["check"] * runs


def test_cfg_job_prints_the_configuration_and_starts_nothing(here, started, capsys):
    assert main(["train", "experiment=quickstart", "seed=3", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["seed"] == 3 and printed["experiment_name"] == "quickstart" and "hydra" not in printed
    assert started == [] and list(here.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "train", "train experiment=quickstart trainer.minibatch_size=100", "train experiment=quickstart env.tasks=[raech]",
        "train -m experiment=quickstart trainer.max_stps=1,2", "train --config-name quickstrat",
        "train --cfg job env.tsks=[reach]", "train --cfg job -m experiment=quickstart seed=1,2",
        "evaluate --cfg job env.tsks=[reach]", "collect --cfg job algorithm.gama=1",
        "train --config-dir nowhere experiment=quickstart", "evaluate", "evaluate checkpoint=nowhere", "evaluate -m seed=1,2",
        "export", "export checkpoint=nowhere output=new", "export chekpoint=nowhere", "export nowhere", "models x=1",
        "check env.image_size=32", "check env=tabletop seed=3",
    ],
)  # fmt: skip
def test_user_errors_are_one_line_with_status_2_and_leave_nothing_behind(arguments, here, started, capsys):
    assert main(arguments.split()) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert len(captured.err.strip().splitlines()) == 1 and "Error: " in captured.err
    assert started == [] and list(here.iterdir()) == []


def test_a_path_that_no_file_system_takes_is_one_line(here, started, capsys):
    assert main(["train", *SMALL, f"output_dir={'x' * 316}"]) == EXIT_USER_ERROR
    printed = capsys.readouterr().err
    assert "exceeds the maximum path length" in printed and len(printed.splitlines()) == 1 and started == []


def test_errors_of_the_run_become_exit_status_and_one_line_and_a_bug_keeps_its_traceback(here, monkeypatch, capsys):
    def status_of(error: BaseException) -> tuple[int, str]:
        """Exit status, and stderr, of a training that ends with an error."""

        def fail(config):
            raise error

        monkeypatch.setattr("rlinf.commands.train.train", fail)
        return main(["train", *SMALL]), capsys.readouterr().err

    diverged = NonFiniteError("loss is nan")
    diverged.add_note("Report of the batch: failed_batch")
    report = "NonFiniteError: loss is nan\n  Report of the batch: failed_batch\n"
    assert status_of(diverged) == (EXIT_USER_ERROR, report)
    status, printed = status_of(OSError(errno.ENOSPC, "No space left on device"))
    assert status == EXIT_USER_ERROR and "Traceback" not in printed
    assert "The disk is full: [Errno 28] No space left" in printed
    killed = "Rank 1 was killed by SIGKILL"
    assert status_of(RankError(killed)) == (EXIT_FAULT, f"RankError: {killed}\n")
    assert status_of(KeyboardInterrupt())[0] == EXIT_INTERRUPTED
    with pytest.raises(ZeroDivisionError):
        status_of(ZeroDivisionError("a bug"))
    with pytest.raises(SystemExit) as caught:
        status_of(SystemExit(143))
    assert caught.value.code == 143, "the status of the trainer is passed on"


def test_export_refuses_a_folder_that_is_full_or_cannot_be_written(here, capsys):
    (here / "old").mkdir()
    (here / "old" / "file").write_text("")
    assert main(["export", "checkpoint=x", "output=old"]) == EXIT_USER_ERROR
    assert "not empty" in capsys.readouterr().err
    assert main(["export", "checkpoint=nowhere", "output=/proc/new"]) == EXIT_USER_ERROR
    printed = capsys.readouterr().err
    assert "Error: output='/proc/new'" in printed and "Set output=<a different folder>" in printed


def test_a_folder_that_holds_a_run_is_refused_where_hydra_chooses_it(here, started, capsys):
    (here / "old" / "checkpoints").mkdir(parents=True)
    assert main(["train", *SMALL, "hydra.run.dir=old"]) == EXIT_USER_ERROR
    assert started == [] and "already contains a run" in capsys.readouterr().err


def options_of(groups: str) -> dict[str, list[str]]:
    """The names that ``rlinf models`` prints of each group."""
    found: dict[str, list[str]] = {}
    for line in groups.strip().splitlines():
        group, _, names = line.rpartition("=...")
        found.setdefault(group or list(found)[-1], []).extend(names.split())
    return found


def test_models_shows_plugins_and_the_folder_of_the_user(here, capsys):
    (here / "mine" / "model").mkdir(parents=True)
    (here / "mine" / "model" / "arm.yaml").write_text("model_type: arm_policy\n")
    (here / "mine" / "arm_plugin.py").write_text(
        "from rlinf.models import register_model\nregister_model('arm_policy', model='arm:Arm')\n"
    )
    assert main(["models", "--config-dir", "mine", "plugins=[arm_plugin.py]"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "arm_policy" in line)
    assert row.endswith(str(here / "mine" / "arm_plugin.py"))
    assert "arm" in options_of(text.split("\n\n")[2])["model"]
    about = dict(line.split(None, 1) for line in text.split("\n\n")[3].splitlines()[1:])
    first_line = (ROOT / "examples/embodiment/config/quickstart.yaml").read_text().splitlines()[0]
    assert about["quickstart"].startswith(first_line.removeprefix("# ")) and "your_config" not in about
    assert all("CPU" in text or "GPU" in text for text in about.values()), "where each experiment runs"


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_example_scripts_work_from_any_folder(script, here):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    file = ROOT / "examples" / "embodiment" / script
    command = [sys.executable, str(file), "model=mlp", "env=tabletop", "algorithm=pppo"]
    result = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == EXIT_USER_ERROR, result.stderr
    assert result.stderr.startswith("ConfigError: There is no algorithm 'pppo'. Did you mean 'ppo'?")
