"""A checkpoint is data: no command runs code that its configuration names, unless the user has typed it."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from rlinf.cli import EXIT_USER_ERROR, main
from rlinf.commands.export import export
from rlinf.commands.open_checkpoint import read_config
from rlinf.config.compose import compose_config, compose_on_saved
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError
from rlinf.manifest import Manifest, hash_files
from rlinf.options import to_mapping
from rlinf.preflight.conditions import conditions_of

COMMANDS = {
    "train": ["train", "resume={}"],
    "sft": ["sft", "resume={}"],
    "evaluate": ["evaluate", "checkpoint={}"],
    "collect": ["collect", "checkpoint={}", "dataset=new"],
    "diagnose": ["diagnose", "checkpoint={}"],
    "diagnose folder": ["diagnose", "{}"],
    "doctor": ["doctor", "checkpoint={}"],
    "export": ["export", "checkpoint={}", "output=exported"],
}


@pytest.fixture
def evil(here):
    """Returns ``make(**changes)``: a checkpoint folder whose configuration has been changed, and a module that leaves a mark."""
    mark = here / "executed"
    (here / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    config = to_mapping(build_config(compose_config(["experiment=tabletop_ppo_mlp", "output_dir=outputs/x"])))
    manifest = Manifest(
        **conditions_of(build_config(config)), model={"model_type": "mlp"}, normalization={},
        preprocessing={"cameras": config["env"]["cameras"]}, actions={}, lora={}, renderer=None, policy_version=6,
    )  # fmt: skip

    def make(**changes) -> Path:
        folder = here / "run" / "checkpoints" / "rl_000006"
        folder.mkdir(parents=True)
        for key, value in changes.items():
            section, _, name = key.partition("__")
            (config[section] if name else config)[name or section] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        state = {"format": 2, "saved_at": 0.0, "world_size": 1, "loop_state": {"phase": "rl", "step": 6}}
        (folder / "state.json").write_text(json.dumps(state))
        manifest.files = hash_files(folder)
        manifest.save(folder)
        return folder

    return make


def typed(command: str, folder: Path, *overrides: str) -> list[str]:
    return [*(word.format(folder) for word in COMMANDS[command]), *overrides]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_checkpoint(evil, here, started, monkeypatch, capsys, command):
    monkeypatch.syspath_prepend(here)
    env = to_mapping(build_config(compose_config(["env=gymnasium"])))["env"] | {"id": "evil:Evil-v0"}
    folder = evil(plugins=[str(here / "evil.py")], model__trust_remote_code=True, env=env)
    assert main(typed(command, folder)) != 0
    captured = capsys.readouterr()
    for key in (f"'plugins=[{here / 'evil.py'}]'", "env.id=evil:Evil-v0", "model.trust_remote_code=true"):
        assert key in captured.err + captured.out
    assert not (here / "executed").exists() and started == [] and "evil" not in sys.modules


@pytest.mark.parametrize("command", ["train", "evaluate", "export"])
def test_a_plugin_that_is_typed_is_imported(evil, here, started, command):
    """The control of the test above."""
    main(typed(command, evil(plugins=["elsewhere.py"]), f"plugins=[{here / 'evil.py'}]"))
    assert (here / "executed").exists()


def test_an_env_id_and_trust_that_are_typed_are_taken(evil, here, monkeypatch, capsys):
    monkeypatch.syspath_prepend(here)
    env = to_mapping(build_config(compose_config(["env=gymnasium"])))["env"] | {"id": "evil:Evil-v0"}
    words = ["env.id=evil:Evil-v0", "model.trust_remote_code=true"]
    main(typed("evaluate", evil(env=env, model__trust_remote_code=True), *words))
    assert (here / "executed").exists() and "Set model.trust_remote_code=true" not in capsys.readouterr().err


def test_a_resumed_run_trusts_what_is_typed_and_names_everything_that_is_not(evil, here, started, capsys):
    folder = evil(plugins=[str(here / "evil.py")], model__trust_remote_code=True)
    assert main(["train", f"resume={folder}"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert f"'plugins=[{here / 'evil.py'}]' model.trust_remote_code=true" in said and str(folder) in said
    words = ["train", f"resume={folder}", f"plugins=[{here / 'evil.py'}]", "model.trust_remote_code=false"]
    assert main(words) == 0
    assert [config.model.trust_remote_code for _, config in started] == [False]


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"plugins": ["evil"]}, ["model=mlp"]),
        ({"env__instruction": "x", "env__kwargs": {"env_id": "evil:Evil-v0"}}, ["env.id=Pendulum-v1"]),
        ({"model__init_config": {"backbone": "evil:Network"}}, ["plugins=[]"]),
        ({"model__override_config": {"sizes": [{"of": "evil:Network"}]}}, []),
        # a mapping that is typed is merged into the saved one
        ({"env__id": "evil:Evil-v0"}, ["env={image_size: 32}"]),
        ({"env__id": "evil:Evil-v0"}, ["+env={image_size: 32}"]),
        ({"env__kwargs": {"wrapper": "evil:Network", "a": 0}}, ["env.kwargs={a: 1}"]),
        ({"env__kwargs": {"wrapper": "evil:Network"}}, ["env.kwargs={}"]),
        ({"model__trust_remote_code": True}, ["model={precision: fp32}"]),
    ],
)
def test_names_of_code_anywhere_in_env_and_model_are_refused(evil, changes, overrides):
    folder = evil(**changes)
    with pytest.raises(CheckpointError, match="Read that code first"):
        compose_on_saved(yaml.safe_load((folder / "config.yaml").read_text()), overrides, folder=folder)


def test_a_group_that_is_typed_replaces_what_was_saved(evil):
    folder = evil(model__trust_remote_code=True, model__init_config={"backbone": "evil:Network"})
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert compose_on_saved(saved, ["model=mlp"], folder=folder).model.trust_remote_code is False


def test_a_value_inside_a_typed_mapping_replaces_what_was_saved(evil):
    folder = evil(model__trust_remote_code=True)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    config = compose_on_saved(saved, ["model={trust_remote_code: false}"], folder=folder)
    assert config.model.trust_remote_code is False


def test_values_that_look_like_interpolations_stay_text(evil, monkeypatch):
    monkeypatch.setenv("SECRET", "1234")
    folder = evil(tracking__wandb_project="${oc.env:SECRET}", env__tasks=["\\${seed}"])
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    config = build_config(compose_on_saved(saved, [], folder=folder))
    assert (config.tracking.wandb_project, config.env.tasks) == ("${oc.env:SECRET}", ["\\${seed}"])


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "a/../../b"])
def test_a_name_that_leads_out_of_outputs_is_refused(evil, here, capsys, name):
    assert main(["evaluate", f"checkpoint={evil(experiment_name=name)}"]) == EXIT_USER_ERROR
    assert f"experiment_name is '{name}'" in capsys.readouterr().err
    assert not (here.parent / "elsewhere").exists()


def test_a_checkpoint_sends_neither_pictures_nor_keys_to_a_server():
    saved = to_mapping(
        build_config(compose_config(["model=remote", "model.url=ws://evil:1", "model.api_key_env=HOME"]))
    )
    assert (saved["model"]["url"], saved["model"]["api_key_env"]) == ("ws://evil:1", "HOME")
    model = compose_on_saved(saved, []).model
    assert (model.url, model.api_key_env) == (None, None)


def test_paths_of_other_commands_are_not_taken_over(evil, here):
    folder = evil(evaluation__compare=str(here / "other"), sft__dataset=None)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert compose_on_saved(saved, [], folder=folder).evaluation.compare is None


def test_python_refuses_as_the_commands_do(evil, here):
    folder = evil(plugins=[str(here / "evil.py")])
    for call in (lambda: read_config(folder), lambda: export(folder, here / "new")):
        with pytest.raises(CheckpointError, match=r"plugins=\[.*evil.py\]"):
            call()
    assert not (here / "executed").exists()
    assert read_config(folder, [f"plugins=[{here / 'evil.py'}]"]).plugins == [str(here / "evil.py")]
