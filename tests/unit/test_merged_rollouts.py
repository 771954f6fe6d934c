"""Rollouts with merged adapters act as unmerged ones do, with the newest weights, and leave the trainer's weights alone."""

from unittest.mock import Mock

import pytest
import torch
from run_results import run_config

from rlinf.cluster.rollout_worker import RolloutWorker
from rlinf.commands.train import build
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError, ParityError
from rlinf.models.lora import MergedCopy, _dithered, _noise, has_adapters, merge_lora
from rlinf.preflight.placement import Placement
from rlinf.preflight.validation import validate
from rlinf.rollout.policy_skeleton import PolicyReplica, PolicySkeleton
from rlinf.rollout.weight_push import WeightPush
from tests.unit.test_lora import adapted, inputs, logits, policy  # noqa: F401
from tests.unit.test_rollout_worker import SMALL, push

RUN = [*SMALL, "model.is_lora=true", "model.lora.rank=4", "trainer.max_steps=3", "algorithm.critic_warmup_steps=0",
       "trainer.learning_rate=1e-3", "trainer.eval_every=0", "evaluation.num_videos_per_task=0",
       "evaluation.num_fresh_episodes=0"]  # fmt: skip
MERGED = "rollout.merge_adapters=true"


@torch.no_grad()
def learn(model):
    """Change all trained weights in place, as an optimiser step does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_each_push_merges_the_new_adapters_in_place(inputs):  # noqa: F811
    def gap():
        return (logits(acting, inputs) - logits(model, inputs)).abs().max()

    model = adapted()
    with pytest.raises(ConfigError, match="no LoRA layers to merge. Set model.is_lora=true"):
        MergedCopy(policy())
    sync = WeightPush(model, model, merge_adapters=True)
    sync.push(0)
    acting = sync.rollout_policy
    assert gap() <= 1e-5 and has_adapters(model) and not has_adapters(acting)
    learn(model)
    assert gap() > 1e-2, "control: without a push, the copy has the old adapters"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [tensor.data_ptr() for tensor in acting.parameters()]
    sync.push(1)
    assert gap() <= 1e-5 and sync.rollout_policy is acting
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [tensor.data_ptr() for tensor in acting.parameters()] == places, "graphs read these addresses"
    torch.testing.assert_close(dict(acting.state_dict()), merge_lora(model).state_dict(), atol=1e-6, rtol=0)
    shared = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    new = {name for name, tensor in [*acting.named_parameters(), *acting.named_buffers()] if id(tensor) not in shared}
    assert new == {name.replace(".base_layer", "") for name in before if name.endswith(".base_layer.weight")}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9])
def test_rounding_to_bfloat16_has_a_mean_error_of_0(fraction):
    ones, noise = torch.full((64, 1024), 1.0), _noise(1 << 16, "cpu")
    rounded = _dithered(ones + fraction / 128, noise)  # between 1 and 2, neighbours are 1/128 apart
    assert set(((rounded - 1) * 128).unique().tolist()) <= {0.0, 1.0}
    assert _dithered(-ones - fraction / 128, noise).equal(-rounded)
    up = (rounded > 1).double()
    assert up.mean() == pytest.approx(fraction, abs=0.01)
    for axis, count in ((0, 64), (1, 1024)):
        assert (up.mean(axis) - fraction).abs().max() <= 6 * (fraction * (1 - fraction) / count) ** 0.5
    assert (ones + 0.4 / 128).bfloat16().float().equal(ones), "control: to nearest, a small update is lost"


def test_small_updates_of_bfloat16_weights_are_merged():
    model = adapted().bfloat16()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=2e-3)
    copied, merged, nearest, size = MergedCopy(model), 0.0, 0.0, 0.0
    copied.refresh()
    for layer, weight in copied._merged:
        base, delta = layer.get_base_layer().weight.float(), layer.get_delta_weight("default").float()
        merged += ((weight.float() - base) * delta).sum()
        nearest += (((base + delta).bfloat16().float() - base) * delta).sum()
        size += delta.square().sum()
    assert abs(merged / size - 1) < 0.2, "the mean error is 0"
    assert nearest / size < 0.6, "control: to nearest, a part is lost"


def test_a_rollout_worker_whose_merge_failed_has_no_version(monkeypatch):
    worker = object.__new__(RolloutWorker)
    monkeypatch.setattr(PolicyReplica, "commit", lambda worker: 1)
    monkeypatch.setattr(PolicyReplica, "version", property(lambda worker: 1))
    worker.engine, worker._merged_version, worker.merged = None, 0, Mock()
    worker.commit()
    assert worker.version == 1
    worker.merged.refresh.side_effect = MemoryError
    with pytest.raises(MemoryError):
        worker.commit()
    assert worker.version is None


def test_a_run_with_merged_adapters_has_the_results_of_a_run_without(tmp_path, monkeypatch):
    lines = []
    for word in ("rollout.merge_adapters=false", MERGED):
        run = build(run_config(tmp_path / word, *RUN, word))
        monkeypatch.setattr(
            run.rl, "iteration", lambda step, run=run.rl.iteration: lines.append(run(step)) or lines[-1]
        )
        run.execute()
    for first, second in zip(lines[:3], lines[3:], strict=True):
        for key in ("train/loss", "rollout/return_mean", "train/grad_norm", "rollout/logprob_gap_max"):
            assert second[key] == pytest.approx(first[key], abs=1e-4), key


def test_control_the_parity_gate_stops_a_run_whose_adapters_are_not_merged_again(tmp_path, monkeypatch):
    refresh, times = MergedCopy.refresh, []
    monkeypatch.setattr(MergedCopy, "refresh", lambda merged: times or (times.append(1), refresh(merged)))
    with pytest.raises(ParityError, match="until the weights were updated"):
        build(run_config(tmp_path, *RUN, MERGED, "trainer.learning_rate=0.1")).execute()


def test_a_rollout_worker_merges_after_each_push(tmp_path):
    run = build(run_config(tmp_path, *RUN, MERGED))
    config, model = run.parts.config, run.rl.model.eval()
    config.cluster.placement, config.cluster.num_rollout_workers = "disaggregated", 1
    worker = RolloutWorker(config, PolicySkeleton.of(model), Placement.of(config), 0, 1)
    observation, results = run.parts.evaluator.env.reset()[0], []
    try:
        for version in range(2):
            push(worker, model, version)
            for acting in (model, worker.policy):
                results.append(acting.predict_action_batch(**acting.preprocess(observation), do_sample=False).logits)
            torch.testing.assert_close(*results[-2:], atol=1e-4, rtol=0)
            learn(model)
        assert (results[3] - results[1]).abs().max() > 1e-2 and not has_adapters(worker.policy)
    finally:
        worker.close()
        run.close()


def config_of(*words):
    return build_config(compose_config([*words, MERGED, "cluster.device=cpu"]))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model.is_lora=false"], "merge_adapters=true with model.is_lora=false.*Set model.is_lora=true, or rollout.merge"),
        (["rollout.worker_processes=1"], "with rollout.worker_processes=1.*Set rollout.worker_processes=0"),
        (["model.precision=bf16-mixed"], "with model.precision=bf16-mixed.*fp32 or bf16. Set model.precision=bf16"),
        (["rollout.backend=vllm"], "with rollout.backend=vllm.*Set rollout.backend=torch"),
        (["algorithm=sac", "model.is_lora=false"], "with algorithm.name=sac.*Set rollout.merge_adapters=false"),
    ],
)  # fmt: skip
def test_settings_that_do_not_merge_are_rejected(words, problem):
    base = ["model=openvla_tiny", "env=tabletop", "model.is_lora=true"]
    validate(config_of(*base), "train")  # control
    with pytest.raises(ConfigError, match=problem):
        validate(config_of(*base, *words), "train")
