"""The weight sync between two plain models: every tensor arrives, or the sync is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlinf.errors import RLinfError
from rlinf.rollout.weight_sync import WeightSync, frozen_copy


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


class Elsewhere(Net):
    """Computes with other tensors than those that it shows."""

    def state_dict(self, *args, **kwargs):
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


class Generator:
    """Remembers the versions that it was told of."""

    def __init__(self):
        self.versions = []

    def update_weights(self, version):
        self.versions.append(version)


def test_every_parameter_and_buffer_arrives():
    trained, played = Net(5.0), Net(1.0)
    sync = WeightSync(trained, played)
    assert sync.version == 0
    assert sync.push(7) == sync.version == 7
    state = played.state_dict()
    assert len(state) == 6 and all((tensor == 5.0).all() for tensor in state.values())
    assert all((tensor == 5.0).all() for tensor in trained.state_dict().values()), "the trainer's are its own still"
    assert sync.trainer_model is trained and sync.rollout_policy is played and not played.training


def test_a_model_that_plays_itself_is_not_copied():
    model = Elsewhere(5.0)  # a copy would not arrive
    sync = WeightSync(model, model)
    assert sync.push(3) == 3 and sync.rollout_policy is model


def test_a_generator_is_told_the_version_and_plays():
    generator = Generator()
    sync = WeightSync(Net(5.0), Net(1.0), generator)
    sync.push(7), sync.push(8)
    assert generator.versions == [7, 8] and sync.rollout_policy is generator


def test_models_that_differ_are_refused():
    other = Net(1.0)
    other.register_buffer("extra", torch.zeros(1))
    with pytest.raises(RLinfError, match=r"names differ: \['extra'\]"):
        WeightSync(Net(5.0), other).push(1)
    with pytest.raises(
        RLinfError, match=r"'layer.weight' is \[3, 3\], rollout has \[1, 1\]"
    ):  # to which no copy would shrink
        WeightSync(Net(5.0), Net(1.0, width=1)).push(1)
    with pytest.raises(RLinfError, match=r"'layer.weight' is \[1, 1\], rollout has \[3, 3\]"):  # a copy would fill it
        WeightSync(Net(5.0, width=1), Net(1.0)).push(1)


def test_weights_that_do_not_arrive_or_are_not_known_stop_the_sync():
    with pytest.raises(RLinfError, match="in 6 of 6 tensors: .*layer.bias.*older weights"):
        WeightSync(Net(5.0), Elsewhere(1.0)).push(1)
    arrived = Elsewhere(5.0)
    assert WeightSync(Net(5.0), arrived).push(1) == 1, "control: equal weights need no copy"
    with torch.no_grad():
        arrived.head.bias[2] = 5.000001
    with pytest.raises(RLinfError, match="in 1 of 6 tensors: head.bias"):
        WeightSync(Net(5.0), arrived).push(1)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_weight_that_is_not_finite_is_not_sent(value):
    trained, played = Net(5.0), Net(1.0)
    sync = WeightSync(trained, played)
    with torch.no_grad():
        trained.head.bias[1] = value
    with pytest.raises(RLinfError, match="'head.bias' .*nothing was sent"):
        sync.push(1)
    assert sync.version == 0 and all((tensor == 1.0).all() for tensor in played.state_dict().values())


def test_a_frozen_copy_is_not_trained_and_does_not_follow():
    model = Net(5.0)
    frozen = frozen_copy(model)
    assert not frozen.training and not any(parameter.requires_grad for parameter in frozen.parameters())
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.layer.bias.fill_(9.0)
    assert (frozen.layer.bias == 5.0).all()
