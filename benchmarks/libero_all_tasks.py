"""Runs one short episode of each task of LIBERO (130) and LIBERO-PRO (160): do all reset, step and render?

An episode starts at recorded state 0, lets objects settle for ten env steps, takes ``--steps`` random actions and renders the last
image. Each task adds one line to ``tasks.jsonl`` in the folder; a task that raises an error adds the error. Run again after an
interruption, the script continues with the tasks that have no line. The last line printed is a JSON object with the counts.

    python benchmarks/libero_all_tasks.py FOLDER [--suites libero_10 libero_goal_swap] [--first 45] [--steps 10] [--size 128]

``--first`` limits each suite to its first tasks: of LIBERO-Plus (``libero_plus_goal``, ...), 45 are the ten tasks and 35 variants.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from PIL import Image

from rlinf.envs.libero.env import LiberoConfig, LiberoSimulator
from rlinf.envs.libero.tasks import SUITES, ProSuite, Suite
from rlinf.types import EpisodeSpec

SEED = 0
MINIMUM_CONTRAST = 10
"""Standard deviation of an image's grey levels below which it counts as blank."""


def run_episode(suite: str, task: str, num_steps: int, size: int, target: Path) -> dict:
    """Run one episode, save its last image, and return what it shows."""
    config = LiberoConfig(
        suite=suite, tasks=[task], cameras=["agentview"], image_size=size, rendering="fast", max_scenes=1, num_processes=0
    )  # fmt: skip
    simulator = LiberoSimulator(config, [task])
    simulator.reset(EpisodeSpec(suite, 0, 0, SEED))
    actions = np.random.default_rng(SEED).uniform(-1, 1, (num_steps, 7))
    successes = [simulator.step(action).success for action in actions]
    view = simulator.observe()
    image = view.images["agentview"]
    Image.fromarray(image).save(target)
    if not np.isfinite(view.state).all() or image.std() < MINIMUM_CONTRAST:
        raise ValueError(f"state {view.state}, standard deviation of the image {image.std():.1f}")
    return {"instruction": view.instruction, "steps": len(successes), "success": any(successes)}


def finished_tasks(path: Path) -> dict[tuple[str, str], dict]:
    """Return the lines of ``path`` by suite and task, and cut off a line whose writing was interrupted."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    complete = [line for line in lines if line.endswith("\n")]
    if len(complete) < len(lines):
        path.write_text("".join(complete), encoding="utf-8")
    results = map(json.loads, complete)
    return {(result["suite"], result["task"]): result for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    usual = [name for name, suite in SUITES.items() if type(suite) in (Suite, ProSuite)]
    parser.add_argument("--suites", nargs="+", default=usual, choices=list(SUITES))
    parser.add_argument("--first", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=128)
    arguments = parser.parse_args()
    path = arguments.folder / "tasks.jsonl"
    (arguments.folder / "images").mkdir(parents=True, exist_ok=True)
    results = finished_tasks(path)
    tasks = [(suite, task) for suite in arguments.suites for task in SUITES[suite].tasks[: arguments.first]]
    for suite, task in tasks:
        if (suite, task) in results:
            continue
        start = time.perf_counter()
        try:
            target = arguments.folder / "images" / f"{suite}__{task}.png"
            outcome = run_episode(suite, task, arguments.steps, arguments.size, target)
        except Exception as error:  # noqa: BLE001 (any error of a simulator is the task's result)
            outcome = {"error": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - start, 2)
        results[suite, task] = {"suite": suite, "task": task, **outcome, "seconds": seconds}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[suite, task]) + "\n")
        print(f"{len(results)}: {suite} {task}: {outcome.get('error', 'ok')}, {seconds:.1f} s", flush=True)
    chosen = [results[key] for key in tasks]
    passed = {suite: sum(row["suite"] == suite and "error" not in row for row in chosen) for suite in arguments.suites}
    counts = {
        "tasks": len(tasks),
        "passed": sum(passed.values()),
        "seconds": round(sum(row["seconds"] for row in chosen)),
    }
    print(json.dumps({**counts, "passed_by_suite": passed}))


if __name__ == "__main__":
    main()
