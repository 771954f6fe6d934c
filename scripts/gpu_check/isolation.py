"""Each rank, simulator and renderer on the GPU that it should be on, and its memory given back at its end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import torch

from gpu_check.openvla import configuration
from gpu_check.rows import GB, NEEDS_GPU, Rows, Setting
from gpu_check.runs import (
    SMALL,
    Watched,
    children_of,
    rl_metrics,
    torchrun,
    train_command,
    until,
    used_bytes,
    used_mib_of_all,
)

GROWN_MIB = 200
"""A GPU on which a process computes or renders has grown by more."""
RUN = ["experiment=quickstart", *SMALL, "trainer.max_steps=1"]
RENDERER = """
import mujoco
from OpenGL import GL
context = mujoco.GLContext(16, 16)
context.make_current()
print(GL.glGetString(GL.GL_RENDERER).decode())
"""


def g2_isolation(rows: Rows, setting: Setting) -> None:
    """Ranks of torchrun and a run of one process stay on their GPUs; renderers and simulations use it and free it."""
    num_gpus = torch.cuda.device_count() if setting.is_gpu else 0
    if setting.is_gpu and num_gpus < 2:
        shared_gpu_row(rows, setting)
    else:
        ranks_rows(rows, setting, 2)
    grown_row(rows, setting, "a run of one process", [], 1, num_gpus)
    renderer_row(rows, setting)
    worker_rows(rows, setting)
    maniskill_rows(rows, setting)


def shared_gpu_row(rows: Rows, setting: Setting) -> None:
    """Two ranks of a real torchrun on one GPU must be rejected before they train."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    command = train_command(setting, setting.folder / "shared", RUN, torchrun(2))
    done = subprocess.run(command, cwd=setting.folder, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n")
    said = "has the same GPU" in done.stderr or "need a GPU each" in done.stderr
    rows.holds("two ranks of torchrun on one GPU are rejected", done.returncode != 0 and said, True)


def ranks_rows(rows: Rows, setting: Setting, ranks: int) -> None:
    """Ranks of a real torchrun train, each on its own GPU."""
    grown_row(rows, setting, f"a run of {ranks} ranks of torchrun", torchrun(ranks), ranks, torch.cuda.device_count())


def grown_row(rows: Rows, setting: Setting, run: str, start: list[str], expected: int, num_gpus: int) -> None:
    """Count the GPUs on which memory grows during a run."""
    folder = setting.folder / run.replace(" ", "_")
    with Watched(used_mib_of_all if setting.is_gpu else lambda: None, most_of_each) as watched:
        subprocess.run(train_command(setting, folder, RUN, start or None), check=True, cwd=setting.folder)
    rows.holds(f"iterations of {run}", len(rl_metrics(folder)), 1)
    what = f"GPUs whose memory grows during {run}"
    if not setting.is_gpu:
        rows.not_measured(what, NEEDS_GPU)
    elif watched.before is None or not watched.last:
        rows.not_measured(what, "not visible here: nvidia-smi shows no memory")
    else:
        grown = sum(b - a > GROWN_MIB for a, b in zip(watched.before, watched.last, strict=True))
        if num_gpus < 2 and len(watched.before) < 2:
            rows.not_measured(what, f"not visible here: the machine shows one GPU ({grown} grew)")
        else:
            rows.holds(what, grown, expected)


def most_of_each(one: list[int] | None, other: list[int] | None) -> list[int] | None:
    """Return the larger number of each GPU; None: not known."""
    return [max(pair) for pair in zip(one, other, strict=True)] if one and other else None


def renderer_row(rows: Rows, setting: Setting) -> None:
    """MuJoCo's images come from the GPU."""
    what = "MuJoCo's renderer (GL_RENDERER)"
    if importlib.util.find_spec("mujoco") is None:
        rows.not_measured(what, "needs the package mujoco")
        return
    from rlinf.envs.graphics.backend import choose_backend

    choose_backend()  # sets the variables that the process below inherits
    done = subprocess.run([sys.executable, "-c", RENDERER], capture_output=True, text=True)
    name = done.stdout.strip() or f"none: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    rows.state(what, name)
    if setting.is_gpu:
        rows.holds(f"{what} is NVIDIA's", "NVIDIA" in name, True)
    else:
        rows.not_measured(f"{what} is NVIDIA's", NEEDS_GPU)


def worker_rows(rows: Rows, setting: Setting) -> None:
    """A simulator process that renders takes little memory of the GPU, and a killed one leaves none behind."""
    taken, left = "GPU memory of one simulator process", "GPU memory that a killed simulator process leaves"
    if importlib.util.find_spec("metaworld") is None:
        for what in (taken, left):
            rows.not_measured(what, "needs the extra metaworld")
        return
    from rlinf.envs import make_env

    config = replace(configuration(["model=mlp", "env=metaworld"]).env, num_processes=1)
    before, known = used_bytes() if setting.is_gpu else 0, set(children_of(os.getpid()))
    env = make_env(config, 2, auto_reset=False)
    env.reset(seed=0)
    workers = set(children_of(os.getpid())) - known
    if not workers:
        raise RuntimeError("an env with one simulator process has none")
    used = used_bytes() - before if setting.is_gpu else 0
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    if not setting.is_gpu:
        for what in (taken, left):
            rows.not_measured(what, NEEDS_GPU)
    else:
        rows.at_most(taken, used / GB, 0.5, " GB")
        until(lambda: used_bytes() - before < 0.05 * GB, 10)
        rows.at_most(left, (used_bytes() - before) / GB, 0.05, " GB")
    env.close()


def maniskill_rows(rows: Rows, setting: Setting) -> None:
    """256 rows of ManiSkill on the GPU."""
    what, share = "seconds to reset 256 rows of maniskill_gpu", "fraction of its memory that offload returns"
    if not setting.is_gpu or importlib.util.find_spec("mani_skill") is None:
        for each in (what, share):
            rows.not_measured(each, "needs a GPU and the extra maniskill")
        return
    from rlinf.api import make_env

    before = used_bytes()
    env = make_env("maniskill_gpu", 256, auto_reset=False)
    env.reset(seed=0)
    start = time.monotonic()
    env.reset(seed=1)
    rows.at_most(what, time.monotonic() - start, 0.5)
    held = used_bytes()
    rows.state("GPU memory of 256 rows of maniskill_gpu", f"{(held - before) / GB:.2f} GB")
    env.offload()
    rows.at_least(share, (held - used_bytes()) / max(held - before, 1), 0.5)
    env.reset(seed=2)
    env.close()
