"""A sharded trainer pushes one unit at a time: few collective calls, never a second copy, and the same rejection on every rank."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, empty_copy, full_tensor
from rlinf.distributed.process_group import rank
from rlinf.errors import NonFiniteError, RLinfError
from rlinf.rollout.weight_push import WeightPush

NUM_BLOCKS, WIDTH = 4, 32
NUM_UNITS = NUM_BLOCKS + 1  # and the root


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


class Net(nn.Module):
    fsdp_wrap_modules = ("Block",)

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.register_buffer("scale", torch.ones(3))
        self.to(dtype)

    def forward(self, ids):
        return self.head(self.embedding(ids))


class Spy:
    """Counts collective calls, and the FSDP units that are whole at the same time."""

    def __init__(self, patch):
        self.calls, self.whole, self.most_whole = [], set(), 0
        names = "all_gather_into_tensor all_gather_single all_reduce all_gather all_gather_object broadcast"
        for name in filter(partial(hasattr, dist), names.split()):
            patch.setattr(dist, name, self._counted(name, getattr(dist, name)))
        unshard, reshard = FSDPModule.unshard, FSDPModule.reshard

        def open_unit(module, *args, **kwargs):
            self.whole.add(module)
            self.most_whole = max(self.most_whole, len(self.whole))
            return unshard(module, *args, **kwargs)

        def close_unit(module):
            self.whole.discard(module)
            reshard(module)

        patch.setattr(FSDPModule, "unshard", open_unit)
        patch.setattr(FSDPModule, "reshard", close_unit)

    def _counted(self, name, call):
        def counted(*args, **kwargs):
            self.calls.append(name)
            return call(*args, **kwargs)

        return counted

    def number(self):
        """Calls since the last time."""
        number, self.calls = len(self.calls), []
        return number


@torch.no_grad()
def step(shards):
    for shard in shards:
        if shard.requires_grad:
            shard.to_local().add_(0.25)


def equal(trained, played):
    held = played.state_dict()
    return all(
        torch.equal(full_tensor(tensor).to(held[name]), held[name]) for name, tensor in trained.state_dict().items()
    )


def push_on_two_ranks(folder):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = Net(dtype)
        for block in plain.blocks[:2]:
            block.requires_grad_(False)
        replica, trained = empty_copy(plain, "cpu"), Sharded(plain, "cpu").model
        sync, shards = WeightPush(trained, replica), list(trained.parameters())
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(patch)
            numbers, equals = [], []
            for version in (0, 1, 1):
                spy.number()
                sync.push(version)
                numbers.append(spy.number())
                assert all(isinstance(parameter, DTensor) for parameter in trained.parameters()), "sharded again"
                equals.append(equal(trained, replica))
                if version == 0:
                    with torch.no_grad():
                        trained(
                            torch.zeros(1, dtype=torch.long)
                        )  # leaves the root whole, with the weights before the step
                    step(shards)
            counts = {"most_whole": spy.most_whole, "whole": len(spy.whole)}
            found[str(dtype)] = {"numbers": numbers, "equals": equals, **counts}
    step(shards)
    with torch.no_grad():
        if rank() == 1:
            trained.blocks[3].down.bias.to_local().fill_(float("nan"))
    with pytest.raises(NonFiniteError) as rejected:
        sync.push(2)
    found["rejected"] = str(rejected.value)
    with pytest.raises(RLinfError, match="no complete weights"):
        sync.rollout_policy
    with torch.no_grad():
        trained.blocks[3].down.bias.to_local().fill_(0.5)
    sync.push(3)
    found["mended"] = equal(trained, replica) and sync.rollout_policy is replica
    torch.save(found, Path(folder) / f"rank{rank()}.pt")


def test_units_are_gathered_one_by_one_frozen_ones_once_and_all_ranks_refuse_alike(tmp_path):
    launch(push_on_two_ranks, str(tmp_path), 2, "cpu")
    ranks = [torch.load(tmp_path / f"rank{number}.pt") for number in range(2)]
    assert ranks[0] == ranks[1]
    found = ranks[0]
    for dtype in ("torch.float32", "torch.bfloat16"):
        # Every unit, and two flags; then two of the four blocks are frozen; then the version is there already.
        assert found[dtype]["numbers"] == [NUM_UNITS + 2, NUM_UNITS - 2 + 2, 2]
        assert found[dtype]["equals"] == [True] * 3
        assert found[dtype]["most_whole"] == 1 and found[dtype]["whole"] == 0
    assert "'blocks.3.down.bias' contains nan" in found["rejected"] and found["mended"]


def push_of_one_object(folder):
    model = Net()
    sync = WeightPush(model, model)
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        sync.push(1)
        torch.save((spy.calls, sync.rollout_policy is model), Path(folder) / f"rank{rank()}.pt")


def test_a_replicated_policy_plays_itself_on_two_ranks(tmp_path):
    launch(push_of_one_object, str(tmp_path), 2, "cpu")
    for number in range(2):
        assert torch.load(tmp_path / f"rank{number}.pt") == (["all_reduce"], True), (
            "the flag that the weights are finite"
        )
