"""The weight push between two plain models: every tensor arrives, or the push is rejected."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.distributed.parallel import empty_copy
from rlinf.engines.weight_transfer import ModuleReceiver
from rlinf.errors import RLinfError
from rlinf.llm import token_policy
from rlinf.rollout import weight_push
from rlinf.rollout.weight_push import WeightPush


class Net(nn.Module):
    """Has parameters and a buffer, of each one under two names."""

    def __init__(self, fill: float, width: int = 3):
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.head.weight = self.layer.weight
        self.register_buffer("scale", torch.full((2,), fill))
        self.register_buffer("same_scale", self.scale)
        for parameter in self.parameters():
            nn.init.constant_(parameter, fill)


class Deaf(ModuleReceiver):
    """Takes tensors and copies none."""

    def _copy(self, name, tensor):
        pass


class Generator:
    """Remembers the versions that it was told of."""

    def __init__(self):
        self.versions = []

    def update_weights(self, version):
        self.versions.append(version)

    def sleep(self):
        self.versions.append("asleep")


def test_every_parameter_and_buffer_arrives():
    trained, played = Net(5.0), Net(1.0)
    sync = WeightPush(trained, played)
    with pytest.raises(RLinfError, match="no complete weights"):
        sync.rollout_policy
    assert sync.push(7) == sync.version == 7
    state = played.state_dict()
    assert len(state) == 6 and all((tensor == 5.0).all() for tensor in state.values())
    assert all((tensor == 5.0).all() for tensor in trained.state_dict().values()), "the trainer's are its own still"
    assert sync.trainer_model is trained and sync.rollout_policy is played and not played.training


def test_a_model_that_plays_itself_is_not_copied():
    model = Net(5.0)
    sync = WeightPush(model, model)
    with count_copies() as copies:
        assert sync.push(3) == 3 and sync.rollout_policy is model
    assert not copies
    with count_copies() as copies:
        WeightPush(model, Net(1.0)).push(3)
    assert len(copies) == 6, "control"


def test_a_generator_is_told_the_version_and_plays():
    generator = Generator()
    sync = WeightPush(Net(5.0), Net(1.0), generator)
    sync.push(7), sync.push(8)
    assert generator.versions == [7, 8] and sync.rollout_policy is generator
    sync.rest()
    assert generator.versions == [7, 8, "asleep"]
    WeightPush(Net(5.0), Net(1.0)).rest()  # nothing sleeps


def test_models_that_differ_are_refused():
    other = Net(1.0)
    other.register_buffer("extra", torch.zeros(1))
    with pytest.raises(RLinfError, match="missing extra"):
        WeightPush(Net(5.0), other).push(1)
    with pytest.raises(RLinfError, match="unknown extra"):
        WeightPush(other, Net(1.0)).push(1)
    with pytest.raises(
        RLinfError, match=r"layer.weight is \[3, 3\] instead of \[1, 1\]"
    ):  # to which no copy would shrink
        WeightPush(Net(5.0), Net(1.0, width=1)).push(1)
    with pytest.raises(RLinfError, match=r"layer.weight is \[1, 1\] instead of \[3, 3\]"):  # a copy would fill it
        WeightPush(Net(5.0, width=1), Net(1.0)).push(1)


def test_weights_that_do_not_arrive_stop_the_push(monkeypatch):
    monkeypatch.setattr(weight_push, "ModuleReceiver", Deaf)
    sync = WeightPush(Net(5.0), Net(1.0))
    with pytest.raises(RLinfError, match="in 6 of 6 tensors: .*layer.bias.*outdated weights"):
        sync.push(1)
    with pytest.raises(RLinfError, match="no complete weights"):
        sync.rollout_policy
    played = Net(5.0)
    assert WeightPush(Net(5.0), played).push(1) == 1, "control: equal weights need no copy"
    with torch.no_grad():
        played.head.bias[2] = 5.000001
    with pytest.raises(RLinfError, match="in 1 of 6 tensors: head.bias"):
        WeightPush(Net(5.0), played).push(1)


def test_frozen_tensors_are_copied_once_and_a_version_once():
    trained, played = Net(5.0), Net(1.0)
    trained.layer.requires_grad_(False)  # its weight is that of the head too
    sync = WeightPush(trained, played)
    counts = []
    for version in (0, 1, 1, 2):
        with count_copies() as copies:
            sync.push(version)
        counts.append(sorted(copies))
        with torch.no_grad():
            trained.head.bias.add_(1.0 if version != 1 else 0.0)
    trained_only = ["head.bias", "same_scale", "scale"]
    everything = ["head.bias", "head.weight", "layer.bias", "layer.weight", "same_scale", "scale"]
    assert counts == [everything, trained_only, [], trained_only]
    assert (played.head.bias == 6.0).all()
    with torch.no_grad():
        trained.layer.bias.fill_(9.0)  # a frozen tensor that changes after all
    with pytest.raises(RLinfError, match="in 1 of 6 tensors: layer.bias"):
        sync.push(3)
    assert sync.push(3) == 3 and (played.layer.bias == 9.0).all(), "the push after a rejection copies everything"


@contextlib.contextmanager
def count_copies():
    """Names of the tensors that arrive in a module meanwhile."""
    names, copy = [], ModuleReceiver._copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ModuleReceiver, "_copy", lambda self, name, tensor: (names.append(name), copy(self, name, tensor))
        )
        yield names


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_weight_that_is_not_finite_is_not_sent(value):
    trained, played = Net(5.0), Net(1.0)
    sync = WeightPush(trained, played)
    with torch.no_grad():
        trained.head.bias[1] = value
    with pytest.raises(RLinfError, match="'head.bias' .*nothing was sent"):
        sync.push(1)
    assert sync.version is None and all((tensor == 1.0).all() for tensor in played.state_dict().values())


def test_an_empty_copy_needs_the_gradients_of_its_model_and_takes_its_buffers_along():
    model = Net(5.0)
    model.head.bias.requires_grad_(False)
    model.register_buffer("angles", torch.tensor([1.0, 2.0]), persistent=False)
    empty = empty_copy(model, "cpu")
    assert model.training and not empty.training
    frozen = [name for name, parameter in empty.named_parameters() if not parameter.requires_grad]
    assert frozen == ["head.bias"]
    assert torch.equal(empty.angles, model.angles) and empty.angles is not model.angles
    WeightPush(model, empty).push(0)
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), empty.parameters(), strict=True))
    with torch.no_grad():
        model.layer.bias.fill_(9.0)
    assert (empty.layer.bias == 5.0).all()


class Largest(TorchDispatchMode):
    """The most float64 numbers of a result."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64 and not func.is_view:
            self.num = max(self.num, out.numel())
        return out


def test_sums_are_those_of_a_float64_copy_without_making_one(monkeypatch):
    monkeypatch.setattr(token_policy, "SUM_CHUNK", 1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(30, 30)).bfloat16()
    with torch.no_grad():
        model[0].weight[0, :2] = torch.tensor([1e6, -1e6])  # sums in 16 or 32 bits would lose the rest
    with Largest() as largest:
        checksum = token_policy.weights_checksum(model)
    assert largest.num == 1000
    expected = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    assert checksum == pytest.approx(expected, rel=1e-12, abs=1e-12) and checksum[2:] == expected[2:]
    with Largest() as control:
        model[0].weight.double().sum()
    assert control.num == 70 * 90, "control"
    with torch.no_grad():
        model[0].weight[89, 69] += 0.5
    assert token_policy.weights_checksum(model)[0] != checksum[0]
