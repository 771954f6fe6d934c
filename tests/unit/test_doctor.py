"""``rlinf doctor``: its exit status follows what works, and its memory estimate is what torch allocates."""

from __future__ import annotations

import pytest
import torch

from rlinf.cli import doctor as module
from rlinf.cli import main
from rlinf.cli.doctor import NO, OPTIONAL, YES, Finding
from rlinf.cli.memory import checkpoint_parameters, estimate_memory, format_bytes, policy_parameters
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import ENVS
from rlinf.errors import MissingDependencyError
from rlinf.models import get_model

EXPERIMENT = "experiment=tabletop_ppo_mlp"


def build(*overrides):
    return build_config(compose_config(overrides))


@pytest.fixture
def renders(monkeypatch):
    """A machine on which pictures can be drawn, whatever this one is."""
    monkeypatch.setattr("rlinf.envs.rendering.probe_rendering", lambda: ("egl", "MuJoCo renders with egl."))


def test_a_machine_on_which_everything_works_exits_with_0(renders, capsys):
    assert main(["doctor", EXPERIMENT]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "rendering", "env tabletop", "openvla", "ppo", "wandb", "vllm", "ray", "disk", "samples", "weights"):
        assert word in text
    assert "can run here" in text and "cannot" not in text


def test_no_rendering_exits_with_1_and_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("rlinf.envs.rendering.probe_rendering", lambda: (None, "egl: no library; apt-get install libegl1"))
    assert main(["doctor", EXPERIMENT]) == 1
    assert "apt-get install libegl1" in capsys.readouterr().out.split("cannot run here yet")[1]


def test_no_simulator_package_exits_with_1(monkeypatch):
    def missing():
        raise MissingDependencyError("The package 'mujoco' is missing.")

    monkeypatch.setattr("rlinf.envs.rendering.probe_rendering", missing)
    assert module.check_rendering() == Finding("rendering", NO, "The package 'mujoco' is missing.")


def test_experiment_that_cannot_run_exits_with_1_and_its_reason(renders, capsys):
    assert main(["doctor", EXPERIMENT, "trainer.minibatch_size=100"]) == 1
    assert "minibatches of 100" in capsys.readouterr().out
    assert main(["doctor", "experiment=quickstrat"]) == 1


def test_env_of_a_missing_package_matters_only_if_the_main_job_needs_it(monkeypatch):
    monkeypatch.setattr(ENVS, "_entries", dict(ENVS.entries()))
    ENVS.register("other", "no_such_package.env:Env", origin="a plugin")
    statuses = {finding.topic: finding.status for finding in module.check_envs()}
    assert statuses == {"env tabletop": YES, "env other": OPTIONAL}
    ENVS.register("tabletop", "no_such_package.env:Env")
    assert {finding.topic: finding.status for finding in module.check_envs()}["env tabletop"] == NO


def test_package_of_another_version_is_a_fault_with_its_command(monkeypatch):
    monkeypatch.setattr(module, "requires", lambda name: ["numpy>=1", "torch==0.1", "no-such-package>2", 'ruff>99; extra == "dev"'])
    details = [finding.detail for finding in module.check_packages()]
    assert len(details) == 2 and 'pip install "torch==0.1"' in details[0] and "no-such-package is missing" in details[1]


def test_folder_without_permission_is_a_fault(monkeypatch, tmp_path):
    assert module.check_disk(tmp_path).status == YES
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert module.check_disk(tmp_path).status == NO


def test_estimate_too_large_for_the_machine_is_a_fault(renders, monkeypatch, capsys):
    monkeypatch.setattr("rlinf.cli.memory.available_memory", lambda: 1024)
    assert main(["doctor", EXPERIMENT]) == 1
    assert "1024" not in capsys.readouterr().err


def test_memory_estimate_counts_what_torch_allocates():
    config = build("experiment=quickstart")
    estimate = estimate_memory(config)
    model = get_model(config.model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]

    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert estimate.num_parameters == sum(p.numel() for p in parameters)
    assert estimate.weights == size(parameters)
    assert estimate.gradients == size(p.grad for p in parameters if p.grad is not None)
    assert estimate.optimizer == size(moments)
    assert estimate.rollout_weights == estimate.reference_weights == 0


def test_memory_estimate_follows_sharding_reference_and_lora():
    base = estimate_memory(build("experiment=quickstart"))
    sharded = estimate_memory(build("experiment=quickstart", "cluster.num_processes=2"))
    assert (sharded.weights, sharded.rollout_weights) == (base.weights // 2, base.weights)
    assert sharded.rollout_buffer == base.rollout_buffer // 2
    assert estimate_memory(build("experiment=quickstart", "algorithm.kl_coef=0.1")).reference_weights == base.weights
    adapted = estimate_memory(build("experiment=quickstart", "model.is_lora=true", "model.lora.rank=2"))
    assert adapted.num_parameters > base.num_parameters and adapted.num_trainable < base.num_trainable / 2
    assert adapted.optimizer < base.optimizer / 2


def test_a_seven_billion_parameter_model_is_counted_without_being_built():
    parameters = policy_parameters(build("model=openvla", "model.init_config.n_action_bins=256"))
    assert 7.4e9 < sum(count for count, _, _ in parameters) < 7.7e9


def test_parameters_of_a_checkpoint_folder_are_those_of_its_files(tmp_path):
    config = build("experiment=tabletop_ppo_mlp")
    model = get_model(config.model)
    model.save_pretrained(tmp_path)
    config.model.model_path, config.model.init_config = str(tmp_path), {}
    counted = sum(count for count, _, _ in policy_parameters(config))
    assert counted == checkpoint_parameters(tmp_path) == sum(p.numel() for p in model.parameters())


def test_sizes_are_readable():
    assert (format_bytes(3 * 1024**2), format_bytes(int(2.5 * 1024**3))) == ("3.0 MiB", "2.50 GiB")
