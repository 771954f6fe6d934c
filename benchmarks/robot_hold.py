"""Measures the time from `kill -9` of the policy server or camera process to the robot's first hold action.

The robot acts at 20 Hz in real time, with a checkpoint served by `rlinf serve`. Each kill is in the middle of an episode, at a
different time within a step, and after the server has restarted. The camera process sends 30 images per second, of which only the
newest is used, as with `read_latest` of lerobot's cameras. Times are printed in milliseconds; expected at most 200. There is no peer.

    python benchmarks/robot_hold.py [--checkpoint outputs/quickstart/latest] [--kills 10] [--port 8031]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlinf.errors import RLinfError
from rlinf.robot.arm import Arm
from rlinf.robot.cli import robot
from rlinf.robot.config import RobotConfig
from rlinf.robot.loop import RobotEpisodes
from rlinf.types import EnvSpec, EpisodeSpec, Observation

FPS = 20.0
ENVIRONMENT = dict(os.environ)
"""Environment of each server, saved because an evaluation sets a renderer, and servers must all use the same one."""
SENT: list[tuple[float, bool]] = []
"""Time of each action, and whether it is a hold action."""


def watch() -> None:
    """Record each action sent from now on."""
    send = RobotEpisodes._send

    def noted(self: RobotEpisodes, action: np.ndarray | None, last: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        SENT.append((time.monotonic(), action is None))
        return send(self, action, last)

    RobotEpisodes._send = noted


def wait_for(count: int, holds: bool, since: float) -> float:
    """Wait for ``count`` consecutive actions that hold (or do not); return the time of the first one after ``since``."""
    while True:
        after = [(moment, held) for moment, held in SENT[-500:] if moment > since]
        if len(after) >= count and all(held == holds for _, held in after[-count:]):
            return next(moment for moment, held in after if held == holds)
        time.sleep(0.005)


def kill(pid: int) -> float:
    """Kill a process at a random time within a step; return the milliseconds until the robot holds."""
    time.sleep(random.random() / FPS)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return 1e3 * (wait_for(1, True, killed) - killed)


def serve(args: argparse.Namespace) -> subprocess.Popen:
    words = [f"checkpoint={args.checkpoint}", f"port={args.port}", "cluster.num_threads=1"]
    return subprocess.Popen(
        [sys.executable, "-m", "rlinf", "serve", *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )


def policy_kills(args: argparse.Namespace) -> list[float]:
    """Kill the server repeatedly during one long episode."""
    found: list[float] = []
    running = [serve(args)]

    def killer() -> None:
        for _ in range(args.kills):
            wait_for(20, False, time.monotonic())
            found.append(kill(running[0].pid))
            running[0].wait()
            running[0] = serve(args)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=killer, daemon=True).start()
    try:
        robot(
            ["model=remote", f"model.url=ws://127.0.0.1:{args.port}", "env=tabletop", "env.max_episode_steps=100000",
             "env.terminate_on_success=false", "evaluation.num_episodes=2", "evaluation.allow_mismatch=[env]",
             f"output_dir=outputs/robot_hold_{os.getpid()}", f"fps={FPS}"]
        )  # fmt: skip
    except (KeyboardInterrupt, RLinfError) as error:
        print(f"{type(error).__name__} {error}", file=sys.stderr)
    finally:
        running[0].kill()
    return found


class Watched:
    """A robot with one joint, and a camera in a separate process."""

    is_calibrated = True
    action_features: dict[str, Any] = {"joint": float}
    observation_features: dict[str, Any] = {"joint": float, "front": (48, 64, 3)}

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        images, ends = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self.camera = multiprocessing.get_context("spawn").Process(target=film, args=(ends,), daemon=True)
        self.camera.start()
        ends.close()
        self.image, self.seen_s = images.recv(), time.monotonic()
        threading.Thread(target=self.read, args=(images,), daemon=True).start()

    def read(self, images: Any) -> None:
        try:
            while True:
                self.image, self.seen_s = images.recv(), time.monotonic()
        except EOFError:
            pass

    def get_observation(self) -> dict[str, Any]:
        if time.monotonic() - self.seen_s > 0.5:  # maximum age accepted by read_latest
            raise TimeoutError("no image")
        return {"joint": 0.0, "front": self.image}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        return action


def film(ends: Any) -> None:
    for _ in range(100_000):
        ends.send(np.zeros((48, 64, 3), np.uint8))
        time.sleep(1 / 30)


class Constant:
    """A policy that returns eight equal actions."""

    model = SimpleNamespace(action_dim=1, num_observations=1)

    def start_episode(self, spec: EpisodeSpec) -> None:
        return None

    def act(self, row: Observation, streams: Any) -> np.ndarray:
        return np.ones((1, 8, 1), np.float32)


def camera_kills(args: argparse.Namespace) -> list[float]:
    """Kill the camera process repeatedly during one long episode."""
    watched, found = Watched(), []
    table = SimpleNamespace(task_names=["stand"], config=None, horizon_of=lambda config, task: 1_000_000)
    table.reset = lambda options: (SimpleNamespace(instruction=["stand"]), {})

    def killer() -> None:
        for _ in range(args.kills):
            wait_for(20, False, time.monotonic())
            found.append(kill(watched.camera.pid))
            watched.camera.join()
            watched.start()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=killer, daemon=True).start()
    settings = RobotConfig(fps=FPS, relative_dims=[])
    try:
        with RobotEpisodes(
            Constant(), Arm(watched, table), EnvSpec("table", ["front"], ["front"], 64, 1), settings
        ) as episodes:
            episodes.run([EpisodeSpec("table", 0, 0, 0)], lambda result: None)
    except KeyboardInterrupt:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="outputs/quickstart/latest")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--port", type=int, default=8031)
    args = parser.parse_args()
    watch()
    for name, kills in (("camera", camera_kills), ("policy", policy_kills)):
        SENT.clear()
        times = sorted(round(each, 1) for each in kills(args))
        print(
            json.dumps(
                {
                    "name": f"robot_hold_{name}",
                    "kills": len(times),
                    "median_ms": float(np.median(times)),
                    "most_ms": times[-1],
                    "ms": times,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
