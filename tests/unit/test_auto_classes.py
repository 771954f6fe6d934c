"""Folders of our policies load by the Auto classes of transformers, with the sizes that they were saved with."""

import subprocess
import sys

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models import build_policy, register_auto_classes

SIZES = {"openvla_tiny": (2, 1), "openvla_oft_tiny": (2, 3), "pi0_tiny": (2, 2), "mlp": (2, 3), "cnn": (2, 1)}


@pytest.mark.parametrize("name", SIZES)
def test_what_a_policy_saved_is_loaded_as_it_was(name, tmp_path):
    from transformers import AutoConfig, AutoModel

    dim, chunk_len = SIZES[name]
    sizes = [f"model.action_token_len={dim}", f"model.action_chunks_len={chunk_len}"]
    policy = build_policy(build_config(compose_config([f"model={name}", *sizes])))
    policy.save_pretrained(tmp_path)
    register_auto_classes()
    found = AutoModel.from_pretrained(tmp_path)
    assert type(found) is type(policy) and type(AutoConfig.from_pretrained(tmp_path)) is type(policy.config)
    assert (found.action_dim, found.action_chunks_len) == (dim, chunk_len)
    weights, wanted = found.state_dict(), policy.state_dict()
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[key], wanted[key]) for key in wanted)


def test_an_argument_of_the_caller_comes_before_the_saved_one(tmp_path):
    from rlinf.errors import ConfigError

    policy = build_policy(build_config(compose_config(["model=openvla_tiny", "model.action_token_len=2"])))
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="action_token_len is 3"):
        type(policy).from_pretrained(tmp_path, action_dim=3)


def test_the_import_alone_is_cheap_and_registers_nothing():
    code = "import sys, rlinf.models; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
