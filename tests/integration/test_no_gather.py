"""Rollouts stay where they were played: what ranks tell each other in an iteration, and the memory that a rank needs."""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import QUIET, run_config
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.commands.train import build
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import gather_objects, rank, world_size
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.steps import SimulatorStep
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import RolloutCollector
from rlinf.training.train_worker import MinibatchPlan
from rlinf.types import ActionPrediction, Observation

SMALL = [
    *QUIET, "model=cnn", "env=tabletop", "env.tasks=[reach]", "env.max_episode_steps=8", "rollout.num_envs=8", "rollout.num_chunks=8",
    "trainer.minibatch_size=32", "model.micro_batch_size=16", "trainer.max_steps=2", "algorithm.critic_warmup_steps=0",
    "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.probe=false", "cluster.num_processes=2",
]  # fmt: skip
OF_WEIGHTS = (
    "torch/distributed/fsdp",
    "torch/distributed/tensor",
    "rlinf/distributed/",
    "rlinf/optim/",
    "weight_push.py",
)
"""Code whose collective calls carry weights and gradients; ``sums.py`` and ``process_group.py`` are not of it."""


class Spy(TorchDispatchMode):
    """Notes the bytes of every collective call, and whether it is one of weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            largest = max((tensor.nbytes for tensor in tensors), default=0)
            self.calls.append((str(func), largest, self._carries_weights()))
        return func(*args, **kwargs or {})

    def _carries_weights(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.endswith(("distributed/process_group.py", "distributed/process_group.py")):
                return False
            if any(part in name for part in OF_WEIGHTS):
                return True
            frame = frame.f_back
        return False


def spied(argument: tuple[Path, bool]) -> None:
    """Run two iterations, and note the collective calls of the second one."""
    folder, gathers = argument
    run = build(run_config(folder, *SMALL))
    trainer = run.rl
    if gathers:  # the planted fault
        check = trainer.gate.check
        trainer.gate.check = lambda batch, step: (gather_objects(batch), check(batch, step))[1]
    trainer.sync.push(0)
    trainer.iteration(0)
    with Spy() as spy:
        trainer.iteration(1)
    images = sum(image[0].nbytes for image in trainer.collector.worker_threads[0].env.reset(
        options={"episodes": [trainer.collector.sampler.spec(0, 0, 0)] * trainer.collector.worker_threads[0].env.num_envs}
    )[0].images.values())  # fmt: skip
    run.close()
    noted = {"calls": spy.calls, "image": images, "weights": sum(p.nbytes for p in trainer.worker.model.parameters())}
    (folder.parent / f"{folder.name} {rank()}").write_text(json.dumps(noted))


def noted_by(folder: Path, gathers: bool) -> list[dict]:
    launch(spied, (folder, gathers), 2, "cpu")
    return [json.loads((folder.parent / f"{folder.name} {r}").read_text()) for r in (0, 1)]


def test_no_rollout_crosses_to_another_rank(tmp_path):
    for noted in noted_by(tmp_path / "plain", gathers=False):
        weights = [size for _, size, carries_weights in noted["calls"] if carries_weights]
        others = [size for _, size, carries_weights in noted["calls"] if not carries_weights]
        assert max(weights) > 2**16 and len(others) > 10, "control: the spy sees gradients, and sums"
        assert max(others) <= 2**16
        print(f"{sum(others)} bytes between two ranks in an iteration, one image has {noted['image']}")
        assert sum(others) < noted["image"], "all together are smaller than one image"


def test_control_a_rollout_that_crosses_is_seen(tmp_path):
    for noted in noted_by(tmp_path / "gathers", gathers=True):
        assert max(size for _, size, carries_weights in noted["calls"] if not carries_weights) > 2**16


NUM_ENVS, PIXELS = 256, 128


class PictureEnv(VectorEnv):
    """Shows images and ends no episode."""

    suite = "images"
    state_dim = 0

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(1), action_high=np.ones(1))
        self.image = np.random.default_rng(0).integers(0, 255, (PIXELS, PIXELS, 3), dtype=np.uint8)

    @classmethod
    def all_task_names(cls, config):
        return ["look"]

    def _reset_env(self, index, spec):
        pass

    def _step_envs(self, ids, actions):
        return SimulatorStep(np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=bool))

    def _observe(self, ids):
        return Observation({"front": np.repeat(self.image[None], len(ids), 0)}, None, ["look"] * len(ids))


class Still(ActionModel, torch.nn.Module):
    evaluate_actions = None
    num_logprobs = num_uniforms = num_sampled = 1
    predicts_values = True

    def preprocess(self, observation):
        return {"rows": torch.zeros(len(observation), 1)}

    def predict_values(self, rows):
        return rows[:, 0]

    def predict_action_batch(self, *, do_sample, temperature, uniforms, rows):
        return ActionPrediction(rows[:, None], rows, rows, rows[:, 0])

    def rollout_logprobs(self, prediction, temperature):
        return prediction.logits


def resident(key: str) -> int:
    """Return the resident bytes of this process now (``VmRSS``) or at their peak (``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def collect_pictures(argument: tuple[Path, int, bool]) -> None:
    """Note by how much a rollout of this rank raises the peak of its memory, to the end of the minibatches."""
    folder, num_chunks, gathers = argument
    config = EnvConfig(name="images", max_episode_steps=2 * num_chunks, success_bonus=0.0, cameras=[])
    env = PictureEnv(config, 1, auto_reset=False)
    sampler = EpisodeSampler(env.episode_specs("train"), 1, num_groups=NUM_ENVS, seed=5)
    collector = RolloutCollector(
        lambda count: PictureEnv(config, count, True), sampler, num_envs=NUM_ENVS, num_chunks=num_chunks, temperature=1.0,
        num_worker_threads=2, rank=rank(), num_ranks=world_size(),
    )  # fmt: skip
    gather_objects(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the former peak
    batch = collector.collect(Still(), 0, 0, needs_values=True)
    held = [gather_objects(batch)] if gathers else []
    flat = batch.flatten()
    plan = MinibatchPlan(batch.loss_mask, collector.env_groups, 256, seed=0)
    for minibatch in plan.epoch(0):
        flat.observation.select(minibatch.rows[:32].numpy())  # a micro-batch
    collector.close()
    assert len(held) == gathers and plan.num_rows == NUM_ENVS * num_chunks
    (folder / f"{rank()} of {world_size()}").write_text(str(resident("VmHWM") - before))


def memory_of(folder: Path, ranks: int, num_chunks: int = 64, gathers: bool = False) -> int:
    """Return the most that a rank needs."""
    argument = (folder, num_chunks, gathers)
    if ranks == 1:  # not in this process: memory that earlier tests have freed would be used again, and raise no peak
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(collect_pictures, argument).result()
    else:
        launch(collect_pictures, argument, ranks, "cpu")
    return max(int((folder / f"{r} of {ranks}").read_text()) for r in range(ranks))


def size_of_pictures(num_chunks: int) -> int:
    return NUM_ENVS * num_chunks * PIXELS**2 * 3


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from /proc of Linux")
def test_a_rank_of_four_needs_a_third_of_the_memory_of_one(tmp_path):
    one, four = memory_of(tmp_path, 1), memory_of(tmp_path, 4)
    print(f"1 rank: {one >> 20} MiB, one of 4 ranks: {four >> 20} MiB ({four / one:.3f})")
    assert one >= size_of_pictures(64)
    assert four <= 0.35 * one


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from /proc of Linux")
def test_control_the_memory_of_a_gathered_rollout_is_seen(tmp_path):
    assert memory_of(tmp_path, 4, num_chunks=16, gathers=True) > size_of_pictures(16)
