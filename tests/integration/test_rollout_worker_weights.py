"""Weights on their way to rollout workers: stored by one rank for all, frozen ones once, and freed when nobody asks for them any more."""

import importlib.util
from pathlib import Path

import pytest
import torch
from ray_references import counted, is_freed
from torch import nn

from rlinf.cluster.weights import WeightStore
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, full_tensor
from rlinf.distributed.process_group import barrier, rank
from rlinf.distributed.ray.cluster import initialise

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)


class Net(nn.Module):
    """Two units of FSDP, of which the first is frozen."""

    fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 2)
        self.blocks[0].requires_grad_(False)


def stored_tensors(ray, refs):
    return {name: tensor.clone() for ref in refs for name, tensor in ray.get(ref).open(verify=True).items()}


def equal_to(model, stored):
    state = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    return stored.keys() == state.keys() and all(torch.equal(tensor, state[name]) for name, tensor in stored.items())


def store_on_two_ranks(work):
    address, folder = work
    import ray

    initialise(ray, address)
    model, put, num_puts = Sharded(Net(), "cpu").model, ray.put, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "put", lambda value: num_puts.append(1) or put(value))
        store = WeightStore(model, "two ranks")
        first = store.put(1)
        found = {"first": equal_to(model, stored_tensors(ray, (*first.frozen, *first.trained)))}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(2)
        found["control"] = equal_to(model, stored_tensors(ray, (*first.frozen, *first.trained)))
        second = store.put(2)
        found["second"] = equal_to(model, stored_tensors(ray, (*second.frozen, *second.trained)))
        found["frozen once"] = [ref.hex() for ref in first.frozen] == [ref.hex() for ref in second.frozen]
        found["puts"] = len(num_puts)
        old, new = first.trained[0].hex(), second.trained[0].hex()
        barrier()
        found["held"] = {old, new} <= counted()
        del first
        barrier()
        found["freed"] = is_freed(old) and new in counted()
        barrier()
    torch.save(found, Path(folder) / f"rank{rank()}.pt")
    ray.shutdown()


def test_one_rank_stores_the_weights_of_all_and_old_ones_are_freed(tmp_path, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    address = initialise(ray, None, num_cpus=1, object_store_memory=100 << 20)
    try:
        launch(store_on_two_ranks, (address, str(tmp_path)), 2, "cpu")
    finally:
        ray.shutdown()
    ranks = [torch.load(tmp_path / f"rank{number}.pt") for number in range(2)]
    assert [found.pop("puts") for found in ranks] == [3, 0], "a bucket of frozen tensors, and two of trained ones"
    wanted = {"first": True, "control": False, "second": True, "frozen once": True, "held": True, "freed": True}
    assert ranks == [wanted, wanted]
