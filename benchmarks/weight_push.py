"""Compares a push of bf16 weights to a different process through shared memory with a memcpy of the same bytes.

Both are timed alternately with one torch thread per process, and the best round is reported. The two processes work concurrently, so
on a machine without two free cores, the ratio reflects the sum of their work; the CPU times of both processes are also printed.
The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from rlinf.engines.weight_handle import BUCKET_BYTES, WeightBuckets
from rlinf.engines.weight_transfer import ModuleReceiver, ModuleWeights, push


class Layers(nn.Module):
    """Square matrices; all but the last ``num_trained`` are frozen."""

    def __init__(self, num_layers: int, width: int, num_trained: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = (torch.randn(width, width, generator=generator).bfloat16() for _ in range(num_layers))
        self.weights = nn.ParameterList(weights)
        self.weights[: num_layers - num_trained].requires_grad_(False)


class Remote:
    """A receiver at the other end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, command: str, payload: Any) -> None:
        self.connection.send((command, payload))

    def reply(self, command: str) -> Any:
        return self.connection.recv()


def receive(connection: Connection, sizes: dict[str, int]) -> None:
    """Take pushes until ``stop``; ``sums`` answers with a sum per tensor, ``cpu`` with the seconds of this process."""
    torch.set_num_threads(1)
    model = Layers(**sizes, seed=1)
    receiver = ModuleReceiver(model)
    while True:
        command, payload = connection.recv()
        if command == "stop":
            return
        if command == "cpu":
            connection.send(time.process_time())
        elif command == "sums":
            connection.send([float(weight.detach().double().sum()) for weight in model.weights])
        else:
            connection.send(getattr(receiver, command)(payload))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternately time pushes of all weights, pushes of trained weights, and memcpy."""
    num_layers = max(2, round(arguments.parameters / arguments.width**2))
    sizes = {"num_layers": num_layers, "width": arguments.width, "num_trained": num_layers // 4}
    model = Layers(**sizes, seed=0)
    num_parameters = sum(weight.numel() for weight in model.weights)
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, sizes), daemon=True)
    process.start()
    theirs.close()  # else a receiver that dies leaves the sender waiting for ever
    peer, buckets = Remote(connection), WeightBuckets(arguments.bucket_mib * 1024**2)
    source = torch.cat([weight.detach().flatten() for weight in model.weights])
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {"all": [], "trained": [], "memcpy": []}

    cpu_seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in times}

    def receiver_seconds() -> float:
        connection.send(("cpu", None))
        return connection.recv()

    def timed(name: str, call: Any) -> None:
        received, own, start = receiver_seconds(), time.process_time(), time.perf_counter()
        call()
        times[name].append(time.perf_counter() - start)
        cpu_seconds[name].append((time.process_time() - own, receiver_seconds() - received))

    for version in range(0, 2 * (arguments.rounds + 1), 2):  # the first round touches every page, and is left out
        timed("all", partial(push, ModuleWeights(model, version, buckets), peer))
        timed("trained", partial(push, ModuleWeights(model, version + 1, buckets), peer, base=version))
        timed("memcpy", partial(target.copy_, source))
    connection.send(("sums", None))
    if connection.recv() != [float(weight.detach().double().sum()) for weight in model.weights]:
        raise SystemExit("the receiver's weights differ from the sender's")
    connection.send(("stop", None))
    process.join()
    buckets.close()
    best = {name: min(values[1:]) for name, values in times.items()}
    own, their_own = (min(pair[side] for pair in cpu_seconds["all"][1:]) for side in (0, 1))
    copy = min(pair[0] for pair in cpu_seconds["memcpy"][1:])
    for name, seconds in best.items():
        print(f"{name:8s} {1e3 * seconds:7.1f} ms")
    print(f"CPU time: sender {1e3 * own:.1f} ms, receiver {1e3 * their_own:.1f} ms, memcpy {1e3 * copy:.1f} ms")
    return {
        "name": "weight_push", "ours": best["all"], "peer": best["memcpy"], "ratio": best["memcpy"] / best["all"], "unit": "s",
        "trained_only": best["trained"],
        "cpu": {"sender": own, "receiver": their_own, "memcpy": copy, "ratio": copy / max(own, their_own)},
        "sizes": {"num_parameters": num_parameters, "nbytes": 2 * num_parameters, **vars(arguments), **sizes},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200_000_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES["cpu"] // 1024**2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
