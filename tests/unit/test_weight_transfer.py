"""Weights to another process: bounded buckets, frozen tensors once, and complete or rejected by name."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from weight_peers import Net, Remote, serve

from rlinf.engines.weight_handle import WeightBuckets, WeightsRejectedError
from rlinf.engines.weight_transfer import ModuleReceiver, ModuleWeights, PushHeader, push
from rlinf.models.base_weights import trained_names
from rlinf.models.lora import MergedWeights, layer_prefix, merged_state_dict, merged_tensors

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux")


class Direct:
    """A peer in this process, with the parameters of a real one: what is sent is pickled, and handled when it is asked for."""

    def __init__(self, receiver):
        self.receiver, self.buckets, self.sent_nbytes, self.handles = receiver, 0, 0, []

    def send(self, command, payload):
        sent = pickle.dumps(payload)
        self.sent_nbytes += len(sent)
        self.pending = pickle.loads(sent)
        if command == "load":
            self.handles.append(payload)

    def reply(self, command):
        return getattr(self.receiver, command)(self.pending)

    def crossed(self):
        """Bytes of the tensors that crossed since the last call."""
        entries = [entry for handle in self.handles for entry in handle.manifest.values()]
        self.handles = []
        return sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)


def equal(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def buckets():
    buckets = WeightBuckets(1024)
    yield buckets
    buckets.close()


@pytest.mark.parametrize(("nbytes", "num_buckets"), [(1, 157), (192, 53), (4032, 4), (2**20, 1)])
def test_weights_of_any_size_pass_through_two_bounded_buckets(nbytes, num_buckets):
    """Tensors larger than a bucket are divided; all others stay whole."""
    source, target = Net(1), Net(2)
    buckets, peer = WeightBuckets(nbytes), Direct(ModuleReceiver(target))
    assert peer.receiver.version is None
    assert push(ModuleWeights(source, 7, buckets), peer) == 7 == peer.receiver.version
    assert equal(source, target)
    assert len(peer.handles) == num_buckets and all(handle.nbytes == 64 + max(nbytes, 64) for handle in peer.handles)
    assert len({handle.path for handle in peer.handles}) == min(2, num_buckets)
    for handle in peer.handles:
        for entry in handle.manifest.values():
            assert entry.offset + entry.padded_nbytes <= handle.nbytes
            assert entry.is_complete or torch.Size(entry.shape).numel() * entry.dtype.itemsize > nbytes
    buckets.close()


def test_a_frozen_tensor_crosses_once_and_the_manifest_once(buckets):
    source, target, finished = Net(1), Net(2), []
    peer = Direct(ModuleReceiver(target))
    peer.receiver.finish = lambda is_complete: finished.append(is_complete)
    first = ModuleWeights(source, 1, buckets)
    push(first, peer)
    everything, sent = peer.crossed(), peer.sent_nbytes
    with torch.no_grad():
        source.head.weight.add_(1.0)
    second = ModuleWeights(source, 2, buckets)
    assert second.builds_on(first) and not ModuleWeights(copy.deepcopy(source), 2, buckets).builds_on(first)
    assert push(second, peer, base=1) == 2 and equal(source, target)
    assert everything == sum(tensor.nbytes for tensor in source.state_dict().values())
    assert peer.crossed() == source.head.weight.nbytes + source.head.bias.nbytes + source.count.nbytes
    assert peer.sent_nbytes - sent < sent / 2
    with torch.no_grad():
        source.base.bias.add_(1.0)
    push(ModuleWeights(source, 3, buckets), peer, base=2)
    assert not equal(source, target), "control: a frozen tensor does not cross again"
    assert finished == [True, False, False]


def lora_model(rank=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 2))
    return inject_adapter_in_model(
        LoraConfig(r=rank, target_modules=["0", "1", "2", "3"], init_lora_weights=False), model
    )


def test_a_receiver_with_adapters_gets_the_adapters_alone_and_an_engine_the_merged_blocks(buckets):
    source, target = lora_model(), lora_model()
    peer = Direct(ModuleReceiver(target))
    push(ModuleWeights(source, 0, buckets), peer)
    peer.crossed()
    adapters = [p for name, p in source.named_parameters() if ".lora_" in name]
    with torch.no_grad():
        for parameter in adapters:
            parameter.mul_(2.0)
    push(ModuleWeights(source, 1, buckets), peer, base=0)
    assert equal(source, target) and peer.crossed() <= 1.1 * sum(p.nbytes for p in adapters)

    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 2))
    engine = Direct(ModuleReceiver(plain))
    push(MergedWeights(source, 0, buckets), engine)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in merged_state_dict(source).items())
    engine.crossed()
    push(MergedWeights(source, 1, buckets), engine, base=0)
    assert engine.crossed() == sum(plain[k].weight.nbytes + plain[k].bias.nbytes for k in range(4)), "not the last"


def test_one_merged_weight_exists_at_a_time():
    seen, merged = [], [f"{k}.weight" for k in range(4)]
    for name, tensor in merged_tensors(lora_model()):
        assert not any(each() is not None for each in seen[:-1])
        if name in merged:
            seen.append(weakref.ref(tensor))
        del tensor
    assert len(seen) == 4
    held = [(weakref.ref(tensor), tensor) for _, tensor in merged_tensors(lora_model())]
    assert all(each() is not None for each, _ in held), "control: kept"


def test_what_is_trained_and_which_blocks_go_with_it():
    model = lora_model()
    assert trained_names(model) == {f"{k}.weight" for k in range(4)}
    model[4].bias.requires_grad_(True)
    assert trained_names(model) == {f"{k}.weight" for k in range(4)} | {"4.bias"}
    assert layer_prefix("language_model.model.layers.11.self_attn.q_proj.weight") == "language_model.model.layers.11"
    assert layer_prefix("model.layers.0.mlp.experts.2.gate_proj.weight") == "model.layers.0"
    assert layer_prefix("projector.fc1.bias") == "projector.fc1" and layer_prefix("log_std") == ""


class Faulty(ModuleWeights):
    """Spoils a push: ``flip`` changes a byte in shared memory after a tensor was packed, ``without`` leaves a tensor out."""

    flip = without = twice = None

    def tensors(self, names):
        for name, tensor in super().tensors(names):
            if name != self.without:
                yield name, tensor
            if name == self.twice:
                yield name, tensor

    def buckets(self, trained_only):
        for handle in super().buckets(trained_only):
            if self.flip in handle.manifest:
                with open(handle.path, "r+b") as file:
                    file.seek(handle.manifest[self.flip].offset + 5)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 64]))
            yield handle


@pytest.mark.parametrize(("fault", "name", "words"), [
    ("flip", "head.weight", "head.weight .*damaged|damaged in transfer: head.weight"),
    ("flip", "base.weight", "damaged in transfer: base.weight"),  # of which a bucket holds a part
    ("flip", "count", "damaged in transfer: count"),  # in the first bucket
    ("without", "head.bias", "version 2 lacks head.bias"),
    ("without", "empty", "version 2 lacks empty"),
    ("twice", "base.weight", "'base.weight' is not part of this push, or was sent twice"),
])  # fmt: skip
def test_a_spoilt_push_is_refused_by_name_and_the_next_one_mends_it(buckets, fault, name, words):
    target, source = Net(2), Net(3)
    receiver = ModuleReceiver(target)
    peer = Direct(receiver)
    push(ModuleWeights(Net(1), 1, buckets), peer)
    faulty = Faulty(source, 2, buckets)
    assert push(faulty, peer) == 2 and equal(source, target), "control: without a fault"
    setattr(faulty, fault, name)
    with torch.no_grad():
        source.head.weight.add_(1.0)
    with pytest.raises(WeightsRejectedError, match=words):
        push(faulty, peer)
    # Rejected at the first bucket, nothing was changed; later, nobody may act.
    assert receiver.version == (2 if name == "count" else None)
    if receiver.version is None:
        with pytest.raises(
            WeightsRejectedError, match="replaces some tensors of version 2, but the receiver has no complete"
        ):
            push(ModuleWeights(source, 3, buckets), peer, base=2)
    assert push(ModuleWeights(source, 3, buckets), peer) == 3 == receiver.version and equal(source, target)


def test_nobody_acts_between_begin_and_commit(buckets):
    receiver, weights = ModuleReceiver(Net(2)), ModuleWeights(Net(1), 5, buckets)
    push(weights, Direct(receiver))
    receiver.start_push(PushHeader(6, weights.manifest))
    assert receiver.version is None
    mapped = {}
    for handle in ModuleWeights(Net(1), 6, buckets).buckets(False):
        receiver.load(handle)
        assert receiver.version is None and receiver._mapped
        assert all(mapped.setdefault(path, memory) is memory for path, memory in receiver._mapped.items())
    assert receiver.commit() == 6 == receiver.version
    assert not receiver._mapped, "the sender's memory is let go"
    with pytest.raises(WeightsRejectedError, match="push was not started"):
        receiver.commit()
    with pytest.raises(WeightsRejectedError, match="version 6 arrived; expected: none"):
        receiver.load(handle)
    assert receiver.version == 6
    receiver.start_push(PushHeader(7, weights.manifest))
    with pytest.raises(WeightsRejectedError, match="version 6 arrived; expected: 7"):
        receiver.load(handle)


def test_a_push_that_stops_after_a_tensor_leaves_no_weights_to_build_on(buckets):
    source = Net(1)
    receiver, weights = ModuleReceiver(Net(2)), ModuleWeights(source, 5, buckets)
    push(weights, Direct(receiver))
    receiver.start_push(PushHeader(6, base=5))
    receiver.start_push(PushHeader(7, base=5))  # control: nothing has been taken
    receiver.take("head.bias", source.head.bias)
    with pytest.raises(WeightsRejectedError, match="the receiver has no complete weights"):
        receiver.start_push(PushHeader(8, base=5))


def test_a_push_without_a_bucket_is_incomplete_and_nobody_acts_after_it(buckets):
    receiver, weights = ModuleReceiver(Net(2)), ModuleWeights(Net(1), 5, buckets)
    push(weights, Direct(receiver))
    receiver.start_push(PushHeader(6, base=5))
    with pytest.raises(
        WeightsRejectedError, match=r"version 6 lacks count, empty, head.bias, head.weight \(4 in all\)"
    ):
        receiver.commit()
    assert receiver.version is None
    receiver.start_push(PushHeader(7, weights.manifest))  # a complete push mends it
    for handle in ModuleWeights(Net(1), 7, buckets).buckets(False):
        receiver.load(handle)
    assert receiver.commit() == 7 == receiver.version


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(buckets, value):
    source, receiver = Net(1), ModuleReceiver(Net(2))
    with torch.no_grad():
        source.head.bias[1] = value
    with pytest.raises(WeightsRejectedError, match=f"'head.bias' contains {value}"):
        push(ModuleWeights(source, 1, buckets), Direct(receiver))
    assert receiver.version is None


def test_a_source_that_fails_halfway_leaves_no_answer_behind(buckets):
    class Broken(ModuleWeights):
        def tensors(self, names):
            for name, tensor in super().tensors(names):
                if name == "head.bias":
                    raise ValueError("out of memory")
                yield name, tensor

    receiver = ModuleReceiver(Net(2))
    peer = Direct(receiver)
    replies, reply = [], peer.reply
    peer.reply = lambda command: (replies.append(command), reply(command))[1]
    with pytest.raises(ValueError, match="out of memory"):
        push(Broken(Net(1), 1, buckets), peer)
    assert len(replies) == 1 + len(peer.handles) and receiver.version is None


PROCESS = """
import os, signal, sys
from multiprocessing.connection import Connection
sys.path[:0] = sys.argv[1].split(os.pathsep)
import torch
torch.set_num_threads(1)
from weight_peers import Net, Remote, serve
from rlinf.engines.weight_handle import WeightBuckets
from rlinf.engines.weight_transfer import ModuleReceiver, ModuleWeights, push

role, connection, die_at = sys.argv[2], Connection(int(sys.argv[3])), int(sys.argv[4])
if role == "receiver":
    serve(connection, ModuleReceiver(Net(2)), die_at)
else:
    push(ModuleWeights(Net(3), 9, WeightBuckets(1024)), Remote(connection, die_at))
    connection.recv()
"""


@pytest.fixture
def start():
    """Start the other side; it is killed at the end."""
    processes = []

    def start(role, die_at=0):
        mine, theirs = Pipe()
        paths = os.pathsep.join(str(Path(__file__).parents[number]) for number in (1, 2))
        command = [sys.executable, "-c", PROCESS, paths, role, str(theirs.fileno()), str(die_at)]
        processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        theirs.close()
        return mine, processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_receiver_that_is_killed_halfway_is_replaced_and_gets_everything(buckets, start):
    source = Net(3)
    connection, process = start("receiver", die_at=2)
    with pytest.raises((EOFError, ConnectionError)):
        push(ModuleWeights(source, 9, buckets), Remote(connection))
    assert process.wait(60) == -signal.SIGKILL
    connection, _ = start("receiver")
    peer = Remote(connection)
    with pytest.raises(WeightsRejectedError, match="has no complete weights"):
        push(ModuleWeights(source, 10, buckets), peer, base=9)
    assert push(ModuleWeights(source, 10, buckets), peer) == 10
    peer.send("state", None)
    assert peer.reply("state") == {name: tensor.tolist() for name, tensor in source.state_dict().items()}


def test_a_receiver_does_not_act_after_its_sender_was_killed_halfway_until_the_next_push(start):
    receiver = ModuleReceiver(Net(2))
    connection, process = start("sender", die_at=3)
    serve(connection, receiver)
    assert process.wait(60) == -signal.SIGKILL
    assert receiver.version is None and not equal(receiver.module, Net(3))
    connection, process = start("sender")
    connection.send = close_after_commit(connection, receiver)
    serve(connection, receiver)
    assert receiver.version == 9 and equal(receiver.module, Net(3))


def close_after_commit(connection: Connection, receiver: ModuleReceiver):
    """``connection.send`` that closes the connection when the receiver holds weights."""
    send = connection.send

    def closing(answer):
        send(answer)
        if receiver.version is not None:
            connection.close()

    return closing
