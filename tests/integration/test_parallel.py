"""However the ranks hold a policy, they take the steps of one process: replicas, shards, groups of shards, shards in main memory."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from rlinf.checkpoints.trainer_state import load_trainer_state, trainer_tensors, write_tensors
from rlinf.commands.export import random_observation
from rlinf.commands.train import _distribute
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.config.training import TrainerConfig
from rlinf.distributed import parallel
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Replicated, Sharded, full_tensor, make_parallel
from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import RankError
from rlinf.models import build_policy
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.optim.reference import Reference
from rlinf.training.train_worker import TrainWorker, rank_rows

ROWS, STEPS, LEARNING_RATE = 8, 2, 1e-2
SMALL = [
    "env=tabletop", "env.state=proprio", "env.image_size=32", "model=openvla_oft_tiny", "model.hidden_size=16",
    "model.init_config.text_config.hidden_size=16", "model.init_config.text_config.intermediate_size=32",
    "model.init_config.text_config.num_hidden_layers=2", "model.init_config.mlp_stem_dim=16",
    "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]",
]  # fmt: skip
LORA = ["model.is_lora=true", "model.lora.rank=2"]
WAYS = {
    "replicas on 2": (2, False, {}),
    "replicas on 4": (4, False, {}),
    "shards on 1": (1, True, {}),
    "shards on 2": (2, True, {}),
    "shards on 4": (4, True, {}),
    "2 groups of 2 shards": (4, True, {"shard_size": 2}),
    "shards in main memory on 2": (2, True, {"cpu_offload": True}),
}
"""Ranks, whether they shard, and how."""


def config_of(*overrides):
    return build_config(compose_config([*SMALL, *overrides]))


def policy_of(config, seed=0):
    torch.manual_seed(seed)
    return build_policy(config, {"norm_stats": unit_range_stats(2, 4)})


def worker_of(held, config, max_grad_norm=1.0):
    # Adam divides by the size of the gradient, so a huge epsilon keeps the step as exact as the gradient.
    trainer = TrainerConfig(
        learning_rate=LEARNING_RATE, value_learning_rate=LEARNING_RATE, adam_eps=1.0, max_grad_norm=max_grad_norm
    )
    return TrainWorker(
        held.model, trainer, temperature=1.0, micro_batch_size=1, val_micro_batch_size=2,
        precision=config.model.precision, parallel=held,
    )  # fmt: skip


def train(worker, config, num_steps=STEPS, first=0):
    """Clone random actions, and return the norm of each gradient; each rank computes its rows in micro-batches of one."""
    norms = []
    index, _ = rank_rows(ROWS)
    length = worker.model.sft_chunk_len
    for step in range(first, first + num_steps):
        observation = random_observation(config, worker.model, ROWS, seed=step)
        actions = np.random.default_rng(step).uniform(-1, 1, (ROWS, length, 2)).astype(np.float32)
        own = observation.select(index.numpy()), torch.from_numpy(actions)[index]
        norms.append(worker.sft_update(*own, ROWS, step, seed=step)["grad_norm"])
    return norms


def whole(tensors):
    return {name: full_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


CLIPPED = ["replicas on 2", "shards on 1", "shards on 2", "shards on 4", "2 groups of 2 shards"]
CASES = [(name, None, False) for name in WAYS] + [(name, None, True) for name in CLIPPED]
CASES += [("shards on 2", "average", False), ("replicas on 2", "own seed", False)]
CASES += [("shards on 2", "large gradients", False), ("shards on 2", "norm of a shard", True)]
"""Way, fault, and whether gradients are clipped."""


def train_on_ranks(arguments):
    """Train in all cases of so many ranks, which start once."""
    file, limit = arguments
    torch.set_num_threads(1)
    config, results = config_of(), {}
    for case in CASES:
        if WAYS[case[0]][0] == world_size():
            with pytest.MonkeyPatch.context() as patch:
                results[case] = trained(config, *case, limit, patch)
    if rank() == 0:
        torch.save(results, file)


def trained(config, name, fault, clips, limit, patch):
    _, sharded, how = WAYS[name]
    model = policy_of(config, seed=rank() if fault == "own seed" else 0)
    if fault == "large gradients":
        patch.setattr(parallel, "LOCAL_SUMS", 0)
    held = make_parallel(model, "cpu", sharded, **how)
    if fault == "average":
        for unit in held.units():
            unit.set_gradient_divide_factor(float(world_size()))
    worker = worker_of(held, config, limit if clips else 1.0)
    if fault == "norm of a shard":
        worker.train_step.norm_of = norm_of_own_shards
    reductions, reduce = [], _fsdp_param_group.foreach_reduce
    patch.setattr(
        _fsdp_param_group, "foreach_reduce", lambda *args, **more: reductions.append(1) or reduce(*args, **more)
    )
    norms = train(worker, config)
    if sharded:
        assert all(isinstance(p, DTensor) for p in model.parameters())
    units = len(list(held.units())) if sharded else 0
    return {"state": whole(model.state_dict()), "norms": norms, "reductions": len(reductions), "units": units}


def norm_of_own_shards(parameters):
    return torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters]) if parameters else torch.zeros(())


@pytest.fixture(scope="module")
def result_of(clipped, tmp_path_factory):
    """``result_of(*case)``; all cases of so many ranks run at once."""
    found, file = {}, tmp_path_factory.mktemp("results") / "results.pt"

    def result(*case):
        if case not in found:
            launch(train_on_ranks, (str(file), clipped[2]), WAYS[case[0]][0], "cpu", process_group=True)
            found.update(torch.load(file))
        return found[case]

    return result


def expected_of(*overrides):
    config = config_of(*overrides)
    model = policy_of(config)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(worker_of(Replicated(model), config), config)
    return start, model.state_dict()


def gap(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def full():
    return expected_of()


@pytest.mark.parametrize("name", WAYS)
def test_ranks_take_the_steps_of_one_process(result_of, full, name):
    start, expected = full
    assert gap(start, expected) > 1e-3
    result = result_of(name, None, False)
    assert gap(result["state"], expected) < 1e-6
    assert result["reductions"] == STEPS * result["units"], "one for each unit and step, not for each micro-batch"


@pytest.mark.parametrize(("name", "fault"), [("shards on 2", "average"), ("replicas on 2", "own seed")])
def test_control_ranks_that_average_or_begin_apart_do_not(result_of, full, name, fault):
    assert gap(result_of(name, fault, False)["state"], full[1]) > 1e-4


def test_gradients_too_large_to_be_held_whole_are_reduced_in_each_micro_batch(result_of, full):
    result = result_of("shards on 2", "large gradients", False)
    assert gap(result["state"], full[1]) < 1e-6
    assert result["reductions"] > STEPS * result["units"]


@pytest.fixture(scope="module")
def clipped():
    """Weights after steps whose gradients are cut to a thirtieth, the norms before, by hand, and where they are cut."""
    config = config_of()
    model = policy_of(config)
    worker = worker_of(Replicated(model), config, max_grad_norm=1e-9)
    first = train(worker, config, num_steps=1)[0]
    model = policy_of(config)
    worker, norms = worker_of(Replicated(model), config, max_grad_norm=first / 30), []
    clip = worker.train_step.apply

    def by_hand(loss):
        gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norms.append(float(sum(gradient.square().sum() for gradient in gradients).sqrt()))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= first / 30 / norms[-1]
        worker.train_step.max_grad_norm = 0.0  # it is cut already
        return clip(loss)

    worker.train_step.apply = by_hand
    train(worker, config)
    assert min(norms) > 10 * first / 30
    return model.state_dict(), norms, first / 30


@pytest.mark.parametrize("name", CLIPPED)
def test_gradients_are_cut_by_the_norm_of_all_shards(result_of, full, clipped, name):
    expected, norms, _ = clipped
    assert gap(expected, full[1]) > 1e-3, "the test needs gradients that are cut"
    result = result_of(name, None, True)
    assert result["norms"] == pytest.approx(norms, rel=1e-4)
    assert gap(result["state"], expected) < 1e-6


def test_control_ranks_that_cut_by_the_norm_of_their_own_shards_do_not(result_of, clipped):
    expected, norms, _ = clipped
    result = result_of("shards on 2", "norm of a shard", True)
    assert result["norms"] != pytest.approx(norms, rel=1e-2)
    assert gap(result["state"], expected) > 1e-5


def adapter_gradients(worker, config):
    """Take a step, and return the gradients that the optimiser sees."""
    gradients, step = {}, worker.optimizer.step

    def record():
        gradients.update({name: m.grad.clone() for name, m in worker.named_masters.items() if m.grad is not None})
        step()

    worker.optimizer.step = record
    train(worker, config, 1)
    return gradients


def lora_on_ranks(folder):
    torch.set_num_threads(1)
    config = config_of(*LORA)
    config.cluster.device = "cpu"
    held, sync = _distribute(config, policy_of(config), "cpu", 10**12, None)
    worker = worker_of(held, config)
    gradients, sent = adapter_gradients(worker, config), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "all_gather"):

            def spy(*args, _function=getattr(dist, name), **kwargs):
                sent.extend(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))
                return _function(*args, **kwargs)

            patch.setattr(dist, name, spy)
        sync.push(1)
    replica = sync.rollout_policy is not worker.model
    torch.save({"gradients": gradients, "sent": sent, "replica": replica}, f"{folder}/{rank()}.pt")


def test_adapters_on_two_ranks_need_no_replica_and_no_push(tmp_path):
    launch(lora_on_ranks, str(tmp_path), 2, "cpu")
    config = config_of(*LORA)
    expected = adapter_gradients(worker_of(Replicated(policy_of(config)), config), config)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for number in range(2):
        result = torch.load(tmp_path / f"{number}.pt")
        assert not result["replica"]
        assert sum(result["sent"]) <= 64, "flags of rejections only"
        distance = torch.cat([(result["gradients"][name] - expected[name]).flatten() for name in expected]).norm()
        assert distance < 1e-6 * norm
        assert result["gradients"].keys() == expected.keys()


class Ones(torch.nn.Module):
    """A loss whose gradient of every weight is what it is called with."""

    fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)

    def forward(self, size):
        return (self.layer(torch.eye(4, dtype=torch.bfloat16)) * size).sum()


def gradients_of_three_micro_batches(sums_locally):
    """1 + 2^-9 + 2^-9 is 1 in bfloat16."""
    model = Ones()
    held = Sharded(model, "cpu")
    held._sums_locally = sums_locally
    for number, size in enumerate((1.0, 2.0**-9, 2.0**-9)):
        held.start_backward(is_last=number == 2)
        model(size).backward()
    gradient = full_tensor(model.layer.weight.grad)
    return gradient.dtype, gradient.unique().tolist()


def test_shards_in_16_bits_add_micro_batches_in_float32():
    results = []
    launch(
        lambda _: results.extend(map(gradients_of_three_micro_batches, (True, False))),
        None,
        1,
        "cpu",
        process_group=True,
    )
    assert results == [(torch.float32, [1 + 2.0**-8])] * 2


def state_of(worker):
    """All that training continues from: weights, masters and moments by name."""
    names = {id(master): name for name, master in worker.named_masters.items()}
    tensors = dict(worker.named_masters)
    for stepped, values in worker.optimizer.state.items():
        tensors |= {f"{names[id(stepped)]}.{key}": value for key, value in values.items()}
    return whole(tensors)


def exchange(folder):
    """Train and save in one way, load in the other, and the other way round, then train both further."""
    torch.set_num_threads(1)
    for precision, sharded in itertools.product(("fp32", "bf16"), (False, True)):
        config = config_of(f"model.precision={precision}")
        worker = worker_of(make_parallel(policy_of(config), "cpu", sharded), config)
        train(worker, config)
        saved = f"{folder}/{precision} {sharded}"
        write_tensors(saved, trainer_tensors(worker.model, worker.optimizer))
        other = worker_of(make_parallel(policy_of(config, seed=1), "cpu", not sharded), config)
        assert gap(whole(other.model.state_dict()), whole(worker.model.state_dict())) > 1e-3
        load_trainer_state(saved, other.model, other.optimizer)
        one, two = state_of(worker), state_of(other)
        assert one.keys() == two.keys() and len(one) > 3 * len(worker.named_masters)  # the value head has no moments
        assert all(torch.equal(one[name].float(), two[name].float()) for name in one)
        train(worker, config, 1, first=STEPS)
        train(other, config, 1, first=STEPS)
        assert gap(state_of(worker), state_of(other)) < (1e-6 if precision == "fp32" else 1e-3)


def test_state_goes_between_replicas_and_shards_bit_for_bit(tmp_path):
    launch(exchange, str(tmp_path), 2, "cpu")


def score(model, config):
    inputs = model.preprocess(random_observation(config, model, 2))
    tokens = torch.full((2, model.num_sampled), model.action_tokenizer.first_token)
    with torch.no_grad():
        return model.eval().evaluate_actions(inputs, tokens, 1.0).logprobs


def keep_a_reference(arguments):
    folder, ways, forgetful = arguments
    torch.set_num_threads(1)
    for sharded in ways:
        keep_one(folder, sharded, forgetful)


def keep_one(folder, sharded, forgetful):
    config = config_of()
    worker = worker_of(make_parallel(policy_of(config), "cpu", sharded), config)
    reference = Reference(worker.model)
    kept, file = reference.tensors(), Path(folder) / "kept.safetensors"
    assert (rank() == 0) == bool(kept)
    if rank() == 0:
        save_file(kept, file)
    dist.barrier()
    before = score(worker.model, config)
    train(worker, config)
    after = score(worker.model, config)  # leaves the root of shards gathered
    if forgetful:
        parallel.FSDPModule.reshard = lambda self: None
    with reference.in_place():
        again = score(worker.model, config)
    assert not torch.allclose(before, after, atol=1e-4)
    assert torch.equal(again, before)
    assert torch.equal(score(worker.model, config), after)
    other = Reference(worker.model)
    other.load(load_file(file))
    with other.in_place():
        assert torch.equal(score(worker.model, config), before)
    train(worker, config, 1, first=STEPS)
    present = reference.tensors()
    assert kept.keys() == present.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in present.items())


def test_a_reference_is_the_policy_of_then_and_leaves_that_of_now(tmp_path):
    """Control: where gathered weights are not given up, whole weights meet shards."""
    launch(keep_a_reference, (str(tmp_path), (False, True), False), 2, "cpu")
    with pytest.raises(RankError, match="size of tensor"):
        launch(keep_a_reference, (str(tmp_path), (True,), True), 2, "cpu")


def test_a_reference_of_adapters_holds_adapters_only():
    config = config_of(*LORA)
    model = policy_of(config)
    names = set(Reference(model).tensors())
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(".lora_B" in name for name in names) and not any("base_layer" in name for name in names)
