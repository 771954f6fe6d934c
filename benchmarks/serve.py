"""Measures the cost of `rlinf serve`: a round trip with two cameras versus a local call, and eight clients versus one at a time.

The server is the command in a separate process, and clients connect over loopback. Round trips alternate with calls in this process,
which use the same observations, policy and number of rows and must return bitwise identical actions. ``overhead_ms`` is the
difference of the medians (expected at most 5). For clients, ``ours`` is the observations per second with all clients at once, and
``peer`` with one at a time on the same server, where each call is padded to the same number of rows. ``peer_unfilled`` is one at a time
without padding, on a server with ``max_batch=1``; ``ratio_unfilled`` is the gain over this best case for one client at a time.

Finally, prompts of ``--prompt-mib`` MiB are sent to a server with default limits while a second client continues to send requests.
Measured are the milliseconds from the last byte to the rejection (expected at most 50), the server's additional memory (at most 70 MiB),
and the second client's 99th percentile relative to normal (at most 2). The prompt is a frame from a small buffer, to save CPU time.

    python benchmarks/serve.py [--image-size 224] [--calls 200] [--clients 8] [--rounds 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.commands.open_checkpoint import open_checkpoint
from rlinf.commands.serve import PolicyRows, ServeConfig
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs import make_env
from rlinf.models import build_policy
from rlinf.options import to_mapping
from rlinf.policy import Policy
from rlinf.preflight.conditions import build_manifest
from rlinf.serving.client import PolicyClient

LIMIT_MS = 5.0
CAMERAS = ("front", "wrist")


def make_checkpoint(folder: Path, args: argparse.Namespace) -> RunConfig:
    """Write a checkpoint of the small OpenVLA with random weights and two cameras."""
    config = build_config(
        compose_config(
            ["model=openvla_tiny", "model.init_config.num_images_in_input=2", "env=tabletop", f"env.image_size={args.image_size}",
             f"env.cameras=[{','.join(CAMERAS)}]", f"cluster.device={args.device}", f"cluster.num_threads={args.threads}", "output_dir=unused"]
        )
    )  # fmt: skip
    env = make_env(config.env, 1, auto_reset=False)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    env.close()
    manifest = build_manifest(config, model, policy_version=0)
    save_checkpoint(folder, model=model, optimizer=None, loop_state={"step": 0}, run_config=to_mapping(config), manifest=manifest)  # fmt: skip
    return config


@contextmanager
def served(checkpoint: Path, max_batch: int) -> Iterator[tuple[str, int]]:
    """Start `rlinf serve`; yield its URL and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "rlinf",
        "serve",
        f"checkpoint={checkpoint}",
        f"port={port}",
        f"max_batch={max_batch}",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"ws://127.0.0.1:{port}", server.pid
    finally:
        server.terminate()
        server.wait(60)


def observations(number: int, size: int) -> list[dict[str, Any]]:
    """Return requests with incompressible noise images."""
    generator = np.random.default_rng(0)
    return [
        {
            "images": {name: generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for name in CAMERAS},
            "prompt": "reach the red block",
        }
        for _ in range(number)
    ]


def milliseconds(call: Any) -> tuple[float, Any]:
    """Return the duration of a call in milliseconds, and its result."""
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


def round_trips(url: str, rows: PolicyRows, args: argparse.Namespace) -> dict[str, float]:
    """Return the medians of a round trip and of a call in this process."""
    client, times = PolicyClient(url, 600, 600), {"served": [], "in_process": []}
    for number, request in enumerate(observations(args.calls + 5, args.image_size)):
        remote_ms, reply = milliseconds(lambda: client.ask(request))  # noqa: B023
        local_ms, (actions,) = milliseconds(lambda: rows.act([rows.read(request)]))  # noqa: B023
        if not np.array_equal(reply["actions"], actions):
            raise SystemExit("the server's actions differ from this process's")
        if number >= 5:  # the first ones warm up
            times["served"].append(remote_ms)
            times["in_process"].append(local_ms)
    client.close()
    return {name: statistics.median(each) for name, each in times.items()}


def per_second(url: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the best observations per second over rounds, for all clients at once and for one at a time."""
    requests, share = observations(args.clients, args.image_size), max(1, args.calls // args.clients)
    at_once, in_turn = [], []
    for _ in range(args.rounds):
        with ThreadPoolExecutor(args.clients) as pool:
            clients = list(pool.map(lambda _: PolicyClient(url, 600, 600), requests))
            at_once.append(milliseconds(lambda: list(pool.map(play, clients, requests, [share] * args.clients)))[0])  # noqa: B023
            for client in clients:  # a client that is connected and silent would be waited for
                client.close()
        client = PolicyClient(url, 600, 600)
        in_turn.append(milliseconds(lambda: [play(client, request, share) for request in requests])[0])  # noqa: B023
        client.close()
    count = 1000 * args.clients * share
    return count / min(at_once), count / min(in_turn)


def play(client: PolicyClient, request: dict[str, Any], share: int) -> None:
    """Send several requests."""
    for _ in range(share):
        client.ask(request)


def memory_mib(pid: int, name: str) -> float:
    """Return ``VmRSS``, the memory of a process, or ``VmHWM``, its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def rejection_ms(url: str, size: int) -> float:
    """Send a prompt of ``size`` bytes; return the milliseconds from its last byte to its rejection."""
    with connect(url, compression=None, proxy=None) as client:
        client.recv()
        message = b"\x81\xa6prompt\xdb" + struct.pack(">I", size)
        chunk = b"x" * 2**18
        client.socket.sendall(b"\x82\xff" + struct.pack(">Q", len(message) + size) + bytes(4) + message)
        try:
            for _ in range(size // len(chunk)):
                start = time.perf_counter()
                client.socket.sendall(chunk)
            if not isinstance(client.recv(), str):
                raise SystemExit("a long prompt was accepted")
        except (ConnectionClosed, OSError):  # the latter: it was rejected before all of it was sent
            pass
        return 1000 * (time.perf_counter() - start)


def long_prompts(url: str, pid: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one client alone and alongside prompts of ``args.prompt_mib``. Peak memory is only available on Linux."""
    client, request, size = PolicyClient(url, 600, 600), observations(1, args.image_size)[0], args.prompt_mib * 2**20
    usual = [milliseconds(lambda: client.ask(request))[0] for _ in range(args.calls + 5)][5:]
    before = memory_mib(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [rejection_ms(url, size) for _ in range(args.rounds)])
        beside = []
        while not sent.done() or len(beside) < args.calls:
            beside.append(milliseconds(lambda: client.ask(request))[0])
        client.close()
        measured = {"rejected_ms": max(sent.result()), "limit_ms": 50, "memory_mib": memory_mib(pid, "VmHWM") - before}
    p99 = [float(np.percentile(each, 99)) for each in (beside, usual)]
    return measured | {"limit_mib": 70, "p99_ms": p99[0], "usual_p99_ms": p99[1], "ratio": p99[0] / p99[1], "limit": 2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoints" / "rl_000000"
        config = make_checkpoint(checkpoint, args)
        model = open_checkpoint(checkpoint, config).policy.to(args.device).eval()
        with served(checkpoint, 1) as (url, _):
            rows = PolicyRows(Policy(model, config), ServeConfig(max_batch=1))
            medians = round_trips(url, rows, args)
            _, unfilled = per_second(url, args)
        overhead = medians["served"] - medians["in_process"]
        print(
            json.dumps({"name": "serve_round_trip_ms", **medians, "overhead_ms": overhead, "limit_ms": LIMIT_MS}),
            flush=True,
        )
        with served(checkpoint, args.clients) as (url, pid):
            ours, peer = per_second(url, args)
            print(json.dumps({"name": "serve_long_prompt", **long_prompts(url, pid, args)}), flush=True)
    line = {
        "name": f"observations per second, {args.clients} clients at once against one after the other",
        "ours": round(ours, 2), "peer": round(peer, 2), "ratio": round(ours / peer, 2), "peer_unfilled": round(unfilled, 2),
        "ratio_unfilled": round(ours / unfilled, 2),
        "overhead_ms": round(overhead, 2), "limit_ms": LIMIT_MS, "served_ms": round(medians["served"], 2),
        "in_process_ms": round(medians["in_process"], 2),
        "sizes": {
            "image_size": args.image_size, "cameras": len(CAMERAS), "calls": args.calls, "clients": args.clients,
            "rounds": args.rounds, "threads": args.threads, "device": args.device,
        },
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
