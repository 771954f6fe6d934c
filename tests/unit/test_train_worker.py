"""Every trained tensor is stepped: one that the optimiser lacks is rejected before anything starts."""

from __future__ import annotations

import re

import pytest
import torch
from run_results import run_config

from rlinf.algorithms import NLLLossFn
from rlinf.commands.train import build
from rlinf.distributed import BatchedDataDict
from rlinf.errors import RLinfError
from rlinf.llm import token_policy
from rlinf.models import HuggingFacePolicy
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.preflight.validation import validate
from rlinf.training import train_worker

SMALL = [
    "experiment=tabletop_ppo_mlp", "env.max_episode_steps=8", "rollout.num_envs=4", "rollout.num_chunks=8",
    "trainer.minibatch_size=16", "algorithm.update_epochs=1", "model.micro_batch_size=16", "algorithm.critic_warmup_steps=0",
    "evaluation.probe=false", "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip
WAYS = {
    "cloning": ["sft.max_steps=2", "sft.num_demonstrations=2", "sft.batch_size=4", "trainer.max_steps=0"],
    "reinforcement": ["trainer.max_steps=1"],
}


def run_of(folder, name: str):
    config = run_config(folder, *SMALL, *WAYS[name])
    validate(config)
    run = build(config)
    run.loop.evaluate_once = lambda tag: None
    return run


def unmoved(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", WAYS)
def test_two_updates_move_every_trained_tensor(tmp_path, name):
    run = run_of(tmp_path, name)
    model = run.parts.worker.model
    before = weights_of(model)
    run.execute()
    assert run.parts.worker.train_step.num_steps == 2
    heads = {each for each in before if name == "cloning" and each.startswith("value_head")}
    assert unmoved(model, before) == heads and len(before) > 4


def test_two_updates_move_every_tensor_of_a_token_policy(tiny_lm):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2)
    before = weights_of(policy.model)
    ids = torch.arange(1, 13).view(2, 6)
    for _ in range(2):
        policy.train(BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), NLLLossFn())
    assert unmoved(policy.model, before) == set() and policy.num_steps == 2


def without_one(module, monkeypatch, which: int) -> None:
    """Let a module make its optimisers of all parameters but one."""

    def make(parameters, *args, **kwargs):
        given = list(parameters)
        group = given[which]["params"] if isinstance(given[0], dict) else given
        del group[which]
        return MasterAdamW(given, *args, **kwargs)

    monkeypatch.setattr(module, "MasterAdamW", make)


@pytest.mark.parametrize("which", [0, -1])
def test_a_trained_tensor_that_the_optimiser_lacks_is_refused_at_the_start(tmp_path, tiny_lm, monkeypatch, which):
    words = re.compile(r"lacks 1 of \d+ trained tensors of \w+, which would never change \(first: [\w.]+\)")
    without_one(train_worker, monkeypatch, which)
    with pytest.raises(RLinfError, match=words):
        run_of(tmp_path, "reinforcement")
    without_one(token_policy, monkeypatch, which)
    with pytest.raises(RLinfError, match=words):
        HuggingFacePolicy(tiny_lm())


def test_frozen_tensors_need_no_optimiser():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    MasterAdamW([model.weight], lr=0.1).check_trains(model)
    with pytest.raises(RLinfError, match=r"lacks 1 of 1 trained tensors of Linear.*first: weight"):
        MasterAdamW([model.bias], lr=0.1).check_trains(model)
