"""100 small updates in bf16 move weights as float32 training does: replicas of every family, and FSDP2 shards of two ranks.

The gradients are given. Every unit of a model computes the sum of its weights times given numbers, so gathering, backward
pass, reduction and optimiser are those of training, while the gradients are known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlinf.checkpoints.trainer_state import load_trainer_state, trainer_tensors, write_tensors
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.training import TrainerConfig
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor, local_part, make_parallel
from rlinf.distributed.process_group import rank, world_size
from rlinf.models import HuggingFacePolicy, get_model
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.train_step import TrainStep
from rlinf.training.train_worker import TrainWorker

STEPS, RESUMED = 100, 2
LEARNING_RATES = (5e-6, 2e-5)
LANGUAGE = [
    "model.hidden_size=16", "model.init_config.text_config.hidden_size=16", "model.init_config.mlp_stem_dim=16",
    "model.init_config.text_config.intermediate_size=32", "model.init_config.text_config.num_hidden_layers=1",
    "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]",
]  # fmt: skip
STACK = "{width: 16, depth: 1, mlp_dim: 32, num_heads: 2, num_kv_heads: 1, head_dim: 8}"
OFT = ["model=openvla_oft_tiny", *LANGUAGE]
ACTION = {
    "openvla": ["model=openvla_tiny", *LANGUAGE],
    "openvla_oft": OFT,
    "openvla_oft, LoRA": [*OFT, "model.is_lora=true", "model.lora.rank=4"],
    "pi0": [
        "model=pi0_tiny", "model.hidden_size=16", f"model.init_config.vlm={STACK}", f"model.init_config.expert={STACK}",
        "model.init_config.vision.hidden_size=16", "model.init_config.vision.intermediate_size=32",
        "model.init_config.vision.image_size=32", "model.init_config.value_hidden_sizes=[16]", "model.image_size=null",
    ],
    "hf_vla": [
        "model=hf_vla_tiny", "model.hidden_size=16", *(f"model.init_config.vlm_config.{part}_config.{size}" for part in ("text", "vision")
        for size in ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=1")),
    ],
    "cnn": ["model=cnn", "model.init_config.hidden_sizes=[16]", "model.init_config.feature_dim=16", "model.init_config.image_size=36"],
}  # fmt: skip
TOKENS = {"HuggingFacePolicy": None, "HuggingFacePolicy, LoRA": {"rank": 4}}
SHARDED = {"openvla_oft": [5e-6], "pi0": [2e-5], "HuggingFacePolicy, LoRA": [5e-6]}
"""Learning rates. The optimiser of shards knows no family: an action policy, one with frozen parts, and a token policy."""


class Trained(NamedTuple):
    model: nn.Module
    step: TrainStep
    optimizer: MasterAdamW

    def weights(self) -> dict[str, Tensor]:
        """What the optimiser steps, of every trained weight that computes in 16 bits."""
        return {name: self.optimizer.master_of(self.model.get_parameter(name)) for name in self.names()}

    def names(self) -> list[str]:
        sharded = getattr(self.model, "compute_dtypes", {})
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [name for name, p in trained if name in sharded or p.element_size() == 2]


def build(name: str, folder: str, learning_rate: float, sharded: bool) -> Trained:
    torch.manual_seed(0)
    if name in TOKENS:
        policy = HuggingFacePolicy(
            folder, torch_dtype="bfloat16", learning_rate=learning_rate, lora=TOKENS[name], device_map=None, max_grad_norm=1e9,
            sharding="fsdp2" if sharded else "replicate",
        )  # fmt: skip
        return Trained(policy.model, policy._train_step, policy._optimizer)
    config = build_config(compose_config(["env=tabletop", "env.state=proprio", *ACTION[name], "model.precision=bf16"]))
    model = get_model(config.model)
    worker = TrainWorker(
        model, TrainerConfig(learning_rate=learning_rate, max_grad_norm=1e9), temperature=1.0, micro_batch_size=1,
        val_micro_batch_size=1, precision="bf16", parallel=make_parallel(model, "cpu", sharded),
    )  # fmt: skip
    return Trained(model, worker.train_step, worker.optimizer)


def gradients_of(num_weights: int, num_ranks: int) -> Tensor:
    """The fraction of each rank in each gradient, 0.3 signal + noise: ``[ranks, steps, num_weights]`` in the numbers of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.3 * torch.randn(num_weights, generator=generator).sign()
    return (signal + torch.randn(num_ranks, STEPS, num_weights, generator=generator)).bfloat16().float()


def train(trained: Trained, gradients: Tensor) -> None:
    """Take a step by each of these gradients, ``[steps, num_weights]``, the fraction of this rank."""
    model, names = trained.model, trained.names()
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    owned: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
    for name in names:
        *path, last = name.split(".")
        way = [model.get_submodule(".".join(path[:k])) for k in range(len(path) + 1)]
        unit = next((module for module in reversed(way) if module in units), model)
        owned.setdefault(unit, []).append((way[-1], last, name))
    given: dict[str, Tensor] = {}

    def weighted_sum(unit: nn.Module) -> Tensor:
        weights = ((getattr(module, last), given[name]) for module, last, name in owned.get(unit, ()))
        return sum(((weight.float() * number.view_as(weight)).sum() for weight, number in weights), torch.zeros(()))

    for unit in owned:
        unit.forward = lambda unit=unit: weighted_sum(unit)
    model.forward = lambda: weighted_sum(model) + sum(unit() for unit in owned if unit is not model)
    sizes = [model.get_parameter(name).numel() for name in names]
    for gradient in gradients:
        given.update(zip(names, gradient.split(sizes), strict=True))
        trained.step.accumulate([None], lambda _: (model(), {}))
        trained.step.apply(0.0)


def update_in_float32(start: Tensor, settings: dict, gradients: Tensor) -> Tensor:
    """How far AdamW moves float32 weights by the same gradients; all of them are one tensor, since it works by element."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], **settings)
    for gradient in gradients:
        weights.grad = gradient
        optimizer.step()
    return weights.detach() - start


def flat(trained: Trained) -> Tensor:
    return torch.cat([full_tensor(weight).detach().float().flatten() for weight in trained.weights().values()])


def state_of(trained: Trained) -> dict[str, Tensor]:
    """This rank's part of weights and moments."""
    state = {}
    for name, weight in trained.weights().items():
        tensors = {"weight": weight, **trained.optimizer.state[weight]}
        state |= {f"{name} {key}": local_part(tensor)[0].detach().clone() for key, tensor in tensors.items()}
    return state


def measure(
    name: str, folder: str, scratch: Path, sharded: bool, learning_rates: Sequence[float]
) -> dict[float, tuple[float, float, bool]]:
    """Train at each learning rate.

    Returns:
        Cosine and ratio of lengths of the update to that of float32 training, and whether the last steps of the run are
        those of another one that starts with its checkpoint, bit for bit.
    """
    found, shares = {}, None
    for learning_rate in learning_rates:
        trained = build(name, folder, learning_rate, sharded)
        start = flat(trained)
        shares = gradients_of(len(start), world_size()) if shares is None else shares
        own = shares[rank()]
        train(trained, own[:-RESUMED])
        checkpoint = scratch / f"{name} {learning_rate}"
        write_tensors(checkpoint, trainer_tensors(trained.model, trained.optimizer))
        before = state_of(trained)
        train(trained, own[-RESUMED:])
        other = build(name, folder, learning_rate, sharded)
        load_trainer_state(checkpoint, other.model, other.optimizer)
        train(other, own[-RESUMED:])
        after, again = state_of(trained), state_of(other)
        resumes = all(torch.equal(after[key], again[key]) for key in after | again)
        moved = not all(torch.equal(after[key], before[key]) for key in after)
        settings = {key: trained.optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        update, expected = flat(trained) - start, update_in_float32(start, settings, shares.sum(0))
        cosine = float(torch.cosine_similarity(update, expected, dim=0))
        found[learning_rate] = cosine, float(update.norm() / expected.norm()), resumes and moved
    return found


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_model(tiny_lm) -> str:
    return tiny_lm(hidden_size=16, intermediate_size=32, num_hidden_layers=1)


def check(found: dict[float, tuple[float, float, bool]], learning_rates: Sequence[float]) -> None:
    assert tuple(found) == tuple(learning_rates)
    for learning_rate, (cosine, length, resumes) in found.items():
        print(f"lr {learning_rate:g}: cosine {cosine:.4f}, length {length:.4f}")
        assert cosine >= 0.98 and 0.95 <= length <= 1.05
        assert resumes


@pytest.mark.parametrize("name", [*ACTION, *TOKENS])
def test_replicas_move_as_far_and_in_the_direction_of_float32(tmp_path, token_model, name):
    """All at the rate at which 16 bits would lose more; the optimiser of replicas knows no family."""
    rates = LEARNING_RATES if name == "openvla_oft" else LEARNING_RATES[:1]
    check(measure(name, token_model, tmp_path, sharded=False, learning_rates=rates), rates)


def test_control_replicas_without_float32_masters_do_not(tmp_path, token_model, monkeypatch):
    monkeypatch.setattr("rlinf.optim.master_adamw._master", lambda parameter: parameter)
    cosine, length, _ = measure("openvla_oft", token_model, tmp_path, sharded=False, learning_rates=[5e-6])[5e-6]
    assert cosine < 0.9 and length < 0.8


# -- two ranks -------------------------------------------------------------------------------------------------------

CONTROL = "openvla_oft, shards in 16 bits"


@torch.no_grad()
def step_and_round(optimizer: MasterAdamW) -> None:
    """Step shards that are kept in 16 bits: the planted fault."""
    optimizer.gather_gradients()
    torch.optim.AdamW.step(optimizer)
    for weight in optimizer.masters:
        weight.copy_(weight.bfloat16())


def measure_on_ranks(argument: tuple[str, Path]) -> None:
    folder, scratch = argument
    torch.set_num_threads(1)
    measured = {name: measure(name, folder, scratch, True, rates) for name, rates in SHARDED.items()}
    with mock.patch.object(MasterAdamW, "step", step_and_round):
        measured[CONTROL] = measure("openvla_oft", folder, scratch / "control", sharded=True, learning_rates=[5e-6])
    torch.save(measured, scratch / f"{rank()}.pt")


@pytest.fixture(scope="module")
def shards(tmp_path_factory, token_model) -> list[dict]:
    """What each of two ranks has measured."""
    scratch = tmp_path_factory.mktemp("shards")
    launch(measure_on_ranks, (token_model, scratch), 2, "cpu")
    return [torch.load(scratch / f"{r}.pt") for r in (0, 1)]


@pytest.mark.parametrize("name", SHARDED)
def test_shards_move_as_far_and_in_the_direction_of_float32(shards, name):
    for found in shards:
        check(found[name], SHARDED[name])


def test_control_shards_in_16_bits_do_not(shards):
    cosine, length, _ = shards[0][CONTROL][5e-6]
    assert cosine < 0.9 and length < 0.8
