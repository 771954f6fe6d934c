"""Bring bf16 weights to a player through Ray's store of objects; the peer is a pair of processes of gloo.

Both sides of the pair make the checks of a push: checksums, finite numbers, names. ``pair without checks`` receives into the
parameters, and ``memcpy`` is one copy of as many bytes in one process. All of them take turns, one torch thread in each process; the
best round counts. The two processes work at the same time, so measure on a machine with two free cores. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlinf.cluster.actor import PlayerActor
from rlinf.cluster.weights import BUCKET_BYTES, WeightStore, stored_buckets
from rlinf.distributed.ray.cluster import import_ray, initialise
from rlinf.engines.weight_transfer import ModuleReceiver, PushHeader, manifest_of

SHARE_OF_STORE = 4
"""Copies of the weights for which the store has room."""


class Layers(nn.Module):
    """Square matrices, all of them trained."""

    def __init__(self, num_layers: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = (torch.randn(width, width, generator=generator).bfloat16() for _ in range(num_layers))
        self.weights = nn.ParameterList(weights)


def pair(port: int, rank: int) -> Any:
    """Return the group of this process and its peer."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    return dist.ProcessGroupGloo(store, rank, 2)


class Receiver(PlayerActor):
    """A player that only takes weights, from the store or from its pair."""

    def make(self, sizes: dict[str, int], port: int) -> None:
        torch.set_num_threads(1)
        self.model = Layers(**sizes, seed=1)
        self.player: Any = ModuleReceiver(self.model)
        self.group = pair(port, 1)

    def take_checked(self, header: PushHeader) -> None:
        """Take buckets over the pair: two sizes, what is in the bucket, its bytes."""
        memory = torch.empty(2 * BUCKET_BYTES, dtype=torch.uint8)
        self.player.begin(header)
        while True:
            sizes = torch.zeros(2, dtype=torch.int64)
            self.group.recv([sizes], 0, 0).wait()
            about, data = torch.empty(int(sizes[0]), dtype=torch.uint8), memory[: int(sizes[1])]
            if not len(data):
                break
            self.group.recv([about], 0, 0).wait()
            self.group.recv([data], 0, 0).wait()
            self.player.load(replace(pickle.loads(about.numpy().tobytes()), data=data.numpy()))
        self.player.commit()

    def take(self) -> None:
        """Take the parameters over the pair, one after the other."""
        for weight in self.model.weights:
            self.group.recv([weight.detach()], 0, 0).wait()

    def sums(self) -> list[float]:
        return sums_of(self.model)


def sums_of(model: Layers) -> list[float]:
    return [float(weight.detach().double().sum()) for weight in model.weights]


def measure(ray: Any, arguments: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    """Time all four ways in turn."""
    sizes = {"num_layers": num_layers, "width": arguments.width}
    model = Layers(**sizes, seed=0)
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    receiver = ray.remote(num_cpus=1)(Receiver).remote()
    made = receiver.make.remote(sizes, port)
    group = pair(port, 0)
    ray.get(made)
    store = WeightStore(model, "benchmark")
    source = torch.cat([weight.detach().flatten() for weight in model.weights])
    target = torch.empty_like(source)
    manifest = manifest_of(model)

    def by_store(version: int) -> None:
        answer = ray.get(receiver.push.remote(store.put(version)))
        if answer != version:
            raise SystemExit(f"the push was refused: {answer}")

    def by_pair(version: int) -> None:
        taken = receiver.take_checked.remote(PushHeader(version, manifest))
        for bucket in stored_buckets(model.state_dict().items(), version):
            about = np.frombuffer(pickle.dumps(replace(bucket, data=np.zeros(0, np.uint8))), np.uint8).copy()
            for each in (np.array([len(about), len(bucket.data)]), about, bucket.data):
                group.send([torch.from_numpy(each)], 1, 0).wait()
        group.send([torch.zeros(2, dtype=torch.int64)], 1, 0).wait()
        ray.get(taken)

    def by_pair_without_checks(_: int) -> None:
        taken = receiver.take.remote()
        for weight in model.weights:
            group.send([weight.detach()], 1, 0).wait()
        ray.get(taken)

    ways: dict[str, Callable[[int], Any]] = {
        "store": by_store,
        "pair": by_pair,
        "pair without checks": by_pair_without_checks,
        "memcpy": lambda _: target.copy_(source),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    version = 0
    for _ in range(arguments.rounds + 1):  # the first round touches every page, and is left out
        for name, way in ways.items():
            version += 1
            start = time.perf_counter()
            way(version)
            times[name].append(time.perf_counter() - start)
            if name != "memcpy" and ray.get(receiver.sums.remote()) != sums_of(model):
                raise SystemExit(f"{name}: the receiver has other weights than the sender")
            with torch.no_grad():
                for weight in model.weights:
                    weight.mul_(1.01)
    best = {name: min(values[1:]) for name, values in times.items()}
    for name, seconds in best.items():
        print(f"{name:20s} {1e3 * seconds:8.1f} ms")
    return {
        "name": "player_weights", "ours": best["store"], "peer": best["pair"], "ratio": best["pair"] / best["store"], "unit": "s",
        "pair_without_checks": best["pair without checks"], "memcpy": best["memcpy"],
        "sizes": {"nbytes": source.nbytes, "bucket_bytes": BUCKET_BYTES, **vars(arguments), **sizes},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200_000_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_layers = max(2, round(arguments.parameters / arguments.width**2))
    room = max(200 << 20, SHARE_OF_STORE * 2 * num_layers * arguments.width**2)
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    ray = import_ray("this benchmark")
    initialise(ray, None, num_cpus=1, object_store_memory=room)
    try:
        print(json.dumps(measure(ray, arguments, num_layers)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
