"""Folders that hold no pi0, and envs that do not give what it reads: rejected by their files and settings alone."""

import dataclasses
import json

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config, declared_policy
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import get_model
from rlinf.preflight.compatibility import check_inputs


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model_type": "openvla"}, r"model type 'openvla'.*Set model\.model_type=openvla"),
        ({"type": "smolvla"}, r"model type 'smolvla'.*Set model\.model_type=smolvla"),
        ({"type": "xvla"}, r"model type 'xvla'.*Set model\.model_path=<a different folder>"),
        ({"vlm": {"text_config": {"hidden_size": 8}}}, r"vlm lacks width, depth.*Set model\.model_path="),
        ({"vision": {"image_size": 16}}, r"vision lacks hidden_size.*expected hidden_size.*Set model\.model_path="),
        ({"expert": "gemma_300m"}, r"expert lacks width.*Set model\.model_path="),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "tiny_config.json"])
def test_folders_of_another_architecture_are_refused(tmp_path, file, values, message):
    (tmp_path / file).write_text(json.dumps({"pi05": False} | values))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        get_model({"model_type": "pi0", "model_path": str(tmp_path)})


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["env.state=none"], r"width at most 4.*tabletop provides none.*Set env\.state=proprio"),
        (["env.state=full"], r"width at most 4.*one of width 31.*Set env\.state=proprio"),
        (["env.state=proprio", "+model.init_config.cameras=[front,nose]"], r"model\.init_config\.cameras=\[front\]"),
        (["env.state=proprio", "+model.init_config.cameras=[]"], r"model\.init_config\.cameras=\[front\]"),
        (["env.state=proprio", "env.cameras=[]"], r"env\.cameras of env\.name=tabletop is \[\]"),
        (["env.state=proprio"], None),
        (["env.state=none", "model.init_config.pi05=true", "+model.init_config.discrete_state_input=false"], None),
        (["env.state=proprio", "+model.init_config.cameras=[front,null]"], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("from_folder", [False, True])
def test_inputs_that_the_env_does_not_give_are_refused_before_anything_runs(tmp_path, overrides, message, from_folder):
    config = build_config(compose_config(["model=pi0_tiny", "env=tabletop", *overrides]))
    if from_folder:
        (tmp_path / "tiny_config.json").write_text(json.dumps(config.model.init_config))
        model = dataclasses.replace(config.model, init_config={}, model_path=str(tmp_path))
        config, message = dataclasses.replace(config, model=model), message and message.replace("init_", "override_")
    if message is None:
        return check_inputs(config, declared_policy(config))
    with pytest.raises(ConfigError, match=message):
        check_inputs(config, declared_policy(config))
