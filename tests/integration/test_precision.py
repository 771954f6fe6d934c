"""``model.precision=bf16`` computes in 16 bits and learns in 32: masters, shards, heads, checkpoints."""

import copy
import inspect
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from rlinf.checkpoints import checkpoint
from rlinf.checkpoints.checkpoint import write_policy
from rlinf.checkpoints.trainer_state import load_trainer_state, trainer_tensors, write_tensors
from rlinf.commands.export import random_observation
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.training import TrainerConfig
from rlinf.distributed import parallel
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, grad_norm
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import build_policy, get_model
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.lora import apply_lora, merge_lora
from rlinf.training.train_worker import TrainWorker

STACK = "{width: 16, depth: 1, mlp_dim: 32, num_heads: 2, num_kv_heads: 1, head_dim: 8}"
PI0 = [
    "model=pi0_tiny", "model.hidden_size=16", f"model.init_config.vlm={STACK}", f"model.init_config.expert={STACK}",
    "model.init_config.vision.hidden_size=16", "model.init_config.vision.intermediate_size=32",
    "model.init_config.vision.image_size=32", "model.init_config.value_hidden_sizes=[16]", "model.image_size=null",
]  # fmt: skip
OFT = [
    "model=openvla_oft_tiny", "model.hidden_size=16", "model.init_config.text_config.hidden_size=16",
    "model.init_config.text_config.intermediate_size=32", "model.init_config.text_config.num_hidden_layers=1",
    "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]",
    "model.init_config.mlp_stem_dim=16",
]  # fmt: skip
CASES = {"pi0": PI0, "OFT": OFT, "OFT, LoRA": [*OFT, "model.is_lora=true", "model.lora.rank=4"]}


def config_of(name, precision="bf16", *overrides):
    words = ["env=tabletop", "env.state=proprio", *CASES[name], f"model.precision={precision}", *overrides]
    return build_config(compose_config(words))


def policy_of(name, precision="bf16", *overrides):
    torch.manual_seed(0)
    return get_model(config_of(name, precision, *overrides).model)


def worker_of(model, precision, learning_rate, parallel=None):
    return TrainWorker(
        model, TrainerConfig(learning_rate=learning_rate, value_learning_rate=learning_rate, max_grad_norm=1e9), temperature=1.0,
        micro_batch_size=1, val_micro_batch_size=1, precision=precision, parallel=parallel,
    )  # fmt: skip


class Row:
    """Stands for an observation of one row."""

    def select(self, index):
        return self


def gradients_of(num_weights, steps):
    """0.3 signal + noise, float32 ``[steps, num_weights]`` whose numbers are those of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.3 * torch.randn(num_weights, generator=generator).sign()
    return (signal + torch.randn(steps, num_weights, generator=generator)).bfloat16().float()


def train(model, precision, learning_rate, gradients, worker=None):
    """Have a worker step the model by these gradients, which each of its backward passes leaves as autograd would."""
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = iter(gradients)

    def sft_loss(*_):
        for parameter, part in zip(trained, next(steps).split([p.numel() for p in trained]), strict=True):
            gradient = part.view(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient.to(parameter.dtype)
        return torch.zeros(1, requires_grad=True)

    model.preprocess = lambda observation: {"x": torch.zeros(1)}
    model.sft_loss = sft_loss
    worker = worker or worker_of(model, precision, learning_rate)
    for step in range(len(gradients)):
        worker.sft_update(Row(), torch.zeros(1, 1, 1), 1, step)
    return worker


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters() if p.requires_grad])


def with_process_group(function):
    """Call a function while there is a process group of this process alone."""
    results = []
    launch(lambda _: results.append(function()), None, 1, "cpu", process_group=True)
    return results[0]


def act_and_score(name):
    """What a sharded policy in bf16 and its replica make of an observation, and the formats in which its parts got their inputs."""
    config = config_of(name)
    policy = build_policy(config, {"norm_stats": unit_range_stats(2, 4)})
    observation, seen = random_observation(config, policy), {}
    replica = copy.deepcopy(policy).eval()
    Sharded(policy, "cpu")
    part = "velocity" if name == "pi0" else "_observation_tokens"
    inner = getattr(policy, part)

    def spy(*args, **kwargs):
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        seen.update({key: x.dtype for key, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()})
        return inner(*args, **kwargs)

    setattr(policy, part, spy)
    inputs = replica.preprocess(observation)
    uniforms = torch.rand(2, replica.num_uniforms, generator=torch.Generator().manual_seed(0)).clamp_min(1e-6)
    chain = replica.predict_action_batch(**inputs, uniforms=uniforms).sequences
    scored = policy.evaluate_actions(inputs, chain)
    scored.logprobs.sum().backward()
    formats = {p.grad.dtype for p in policy.parameters() if p.grad is not None}
    return scored.logprobs.detach(), replica.evaluate_actions(inputs, chain).logprobs.detach(), seen, formats


@pytest.mark.parametrize("name", CASES)
def test_shards_compute_what_the_replica_computes_from_float32_inputs(name):
    scored, expected, seen, formats = with_process_group(lambda: act_and_score(name))
    assert torch.equal(scored, expected)
    assert formats == {torch.float32}
    exact = ("state", "x", "t") if name == "pi0" else ("proprio",)
    assert [seen[key] for key in exact] == [torch.float32] * len(exact)


@pytest.mark.parametrize(("name", "key"), [("pi0", "state"), ("OFT", "proprio")])
def test_control_the_default_of_fsdp_would_round_chain_and_state(monkeypatch, name, key):
    casting = lambda **options: MixedPrecisionPolicy(**options | {"cast_forward_inputs": True})  # noqa: E731
    monkeypatch.setattr(parallel, "MixedPrecisionPolicy", casting)
    scored, expected, seen, _ = with_process_group(lambda: act_and_score(name))
    assert seen[key] == torch.bfloat16
    assert torch.equal(scored, expected) == (name == "OFT")  # whose projector of the state computes in 16 bits itself


class Deviation(torch.nn.Module):
    """A model in bfloat16 with a float32 parameter that is not a module."""

    fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        self.log_std = torch.nn.Parameter(torch.full((2,), -1.2345678))


def test_a_parameter_outside_of_any_module_cannot_stay_float32_in_shards():
    model = Deviation()
    message = "log_std of Deviation is not a module.*used in bfloat16.*Remove it from float32_modules.*wrap it in"
    model.float32_modules = ("log_std",)
    with pytest.raises(ConfigError, match=message):
        with_process_group(lambda: Sharded(model, "cpu"))
    model.float32_modules = ()
    with_process_group(lambda: Sharded(model, "cpu"))
    model = Deviation().float()  # control: nothing is rounded
    model.float32_modules = ("log_std",)
    with_process_group(lambda: Sharded(model, "cpu"))


def test_a_checkpoint_without_masters_begins_them_with_its_weights(tmp_path):
    model = policy_of("OFT")
    write_tensors(tmp_path, trainer_tensors(model, None))
    other = policy_of("OFT")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    worker = worker_of(other, "bf16", 1e-4)
    load_trainer_state(tmp_path, other, worker.optimizer)
    for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, loaded)
        if loaded.requires_grad:
            assert torch.equal(worker.optimizer.master_of(loaded), parameter.float())


def test_the_next_phase_goes_on_with_the_masters(tmp_path):
    model = policy_of("OFT")
    worker = train(model, "bf16", 5e-6, gradients_of(len(flat(model)), 3))
    masters = worker.optimizer.masters
    worker.start_phase(worker.config)
    assert all(one is other for one, other in zip(masters, worker.optimizer.masters, strict=True))
    pairs = list(zip(masters, worker.optimizer.parameters, strict=True))
    assert not worker.optimizer.state and any(m.dtype != p.dtype for m, p in pairs)
    assert all(torch.equal(p, m.to(p.dtype)) for m, p in pairs), "what acts is the master, rounded"
    assert any(not torch.equal(p.float(), m) for m, p in pairs)


def test_gradients_of_micro_batches_add_up_in_float32():
    """1 + 2^-9 is 1 in bf16."""
    model = policy_of("OFT")
    worker = worker_of(model, "bf16", 1e-4)
    parameter = next(p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16)
    worker.train_step.accumulate((1.0, 2.0**-9, 2.0**-9), lambda value: (value * parameter.float().sum(), {}))
    master = worker.optimizer.master_of(parameter)
    assert parameter.grad is None and bool((master.grad == 1 + 2.0**-8).all())
    norm = grad_norm([master])
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx((1 + 2.0**-8) * master.numel() ** 0.5, rel=1e-6)


def test_a_frozen_policy_is_skipped():
    worker = worker_of(policy_of("OFT"), "bf16", 1e-2)
    before = {name: master.detach().clone() for name, master in worker.named_masters.items()}
    trained = worker.optimizer.parameters
    loss_of = lambda parameters: (sum(p.float().sum() for p in parameters), {"loss": torch.zeros(())})  # noqa: E731
    totals = worker.train_step.accumulate([trained], loss_of, frozen=worker.policy_masters)
    worker._take_step(totals, None, frozen=True)
    moved = {name for name, master in worker.named_masters.items() if not torch.equal(master, before[name])}
    assert moved == {name for name in before if name.startswith("value_head.")}
    assert set(worker.optimizer.state) == set(worker.value_masters)


@pytest.mark.parametrize("name", ["OFT", "OFT, LoRA"])
def test_folders_of_a_checkpoint(tmp_path, name):
    """``model/`` holds what acts, ``adapter/`` the masters; both give the policy that was saved."""
    config = config_of(name)
    torch.manual_seed(0)
    policy = build_policy(config)
    observation = random_observation(config, policy)
    worker = train(policy, "bf16", 1e-3, gradients_of(len(flat(policy)), 3))
    weights = checkpoint._full_weights(policy, worker.optimizer)
    write_policy(tmp_path, policy, weights)
    formats = {name: t.dtype for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    del policy.preprocess, policy.sft_loss
    if name == "OFT":
        exact = {name for name, dtype in formats.items() if dtype != torch.bfloat16}
        assert exact == {name for name in formats if name.startswith("value_head.")}
        again = build_policy(replace(config, model=replace(config.model, model_path=str(tmp_path), init_config={})))
    else:
        assert set(formats.values()) == {torch.float32} and any("lora_A" in name for name in formats)
        torch.manual_seed(0)
        again = build_policy(replace(config, model=replace(config.model, lora_path=str(tmp_path))))
        with pytest.raises(CheckpointError, match="is already merged into these weights"):
            apply_lora(merge_lora(policy), config.model.lora, str(tmp_path))
    policies = (policy, again)
    first, second = (each.predict_action_batch(**each.preprocess(observation), do_sample=False) for each in policies)
    assert torch.equal(first.logits, second.logits) and torch.equal(first.values, second.values)
    assert {p.dtype for p in again.value_head.parameters()} == {torch.float32}
