"""Compares the CPU time of rendering the SO-101 arm with simplified meshes and with the package's meshes and settings.

    python benchmarks/so101_images.py --save images.png

Requires Python 3.12 and ``bash scripts/setup.sh --arms``. Both variants render the same states with the same code. The
last line is a JSON object; ``ours`` and ``peer`` are milliseconds per image for the slowest camera.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from PIL import Image

from rlinf.envs.so101.env import CAMERAS, SO101Config, SO101Simulator
from rlinf.types import EpisodeSpec

NUM_EXPERT_STEPS = 45


def measure(rendering: str, size: int, count: int) -> tuple[dict[str, float], np.ndarray]:
    """Return the CPU time per image in milliseconds by camera, and the images side by side."""
    simulator = SO101Simulator(SO101Config(cameras=["side"], rendering=rendering), ["PickLift"])
    simulator.reset(EpisodeSpec("so101", 0, 4, 0))
    for _ in range(NUM_EXPERT_STEPS):
        simulator.step(simulator.expert_action())
    times, images = {}, []
    for camera in CAMERAS:
        simulator.config.cameras = [camera]
        images.append(simulator.render(size))  # the first one opens the graphics context
        begin = time.process_time()
        for _ in range(count):
            simulator.render(size)
        times[camera] = 1000 * (time.process_time() - begin) / count
    return times, np.concatenate(images, axis=1)


def main() -> None:
    """Print the time per camera and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64, help="image height and width in pixels")
    parser.add_argument("--count", type=int, default=50, help="images per camera (a tenth with full meshes)")
    parser.add_argument("--save", help="image file to write, with full above fast")
    arguments = parser.parse_args()
    fast, light = measure("fast", arguments.size, arguments.count)
    full, heavy = measure("full", arguments.size, max(1, arguments.count // 10))
    for camera in CAMERAS:
        print(f"{camera}: {fast[camera]:.1f} ms (fast), {full[camera]:.1f} ms (full)")
    if arguments.save:
        Image.fromarray(np.concatenate([heavy, light])).save(arguments.save)
    ours, peer = max(fast.values()), max(full.values())
    report = {"name": "so101_images", "ours": round(ours, 2), "peer": round(peer, 2), "ratio": round(peer / ours, 1)}
    print(json.dumps(report | {"size": arguments.size}))


if __name__ == "__main__":
    main()
