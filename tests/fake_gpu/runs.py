"""The work of an experiment on a GPU that is not there: policy calls, scoring, optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from rlinf.algorithms import ALGORITHMS
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs.base import VectorEnv, uniform_statistics
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.steps import SimulatorStep
from rlinf.models.building import get_model_config_and_processor
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.preflight.compatibility import env_spec
from rlinf.preflight.derived import trains_actor
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.weight_push import WeightPush
from rlinf.training.train_worker import MinibatchPlan, TrainWorker
from rlinf.types import Observation, RolloutBatch
from tests.fake_gpu.cases import CASES
from tests.fake_gpu.gpu import Counts, FakeGpu

INSTRUCTION = "push the red block to the left"
STEP = 100
"""An iteration after the warm-up of the critic, in which nothing else learns."""


class StillEnv(VectorEnv):
    """Shows black images of the size that a policy sees, and ends episodes where it is told.

    Args:
        lengths: Env steps of each row's episode; None: longer than any rollout.
    """

    suite = "still"

    def __init__(
        self, config: Any, num_envs: int, auto_reset: bool, *, action_dim: int, image_size: int, state_dim: int,
        lengths: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.size, self.width, self.lengths = image_size, state_dim, lengths
        super().__init__(config, num_envs, auto_reset, -np.ones(action_dim), np.ones(action_dim))
        self.taken = np.zeros(num_envs, dtype=np.int64)

    @classmethod
    def all_task_names(cls, config: Any) -> list[str]:
        return [*(config.tasks or ["still"])]

    @classmethod
    def horizon_of(cls, config: Any, task: str) -> int:
        return 1 << 20

    @property
    def state_dim(self) -> int:
        return self.width

    def _reset_env(self, index: int, spec: Any) -> None:
        self.taken[index] = 0

    def _step_envs(self, ids: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        self.taken[ids] += 1
        done = self.taken[ids] >= (1 << 20 if self.lengths is None else np.array(self.lengths)[ids])
        return SimulatorStep(np.zeros(len(ids), np.float32), np.zeros(len(ids), bool), done)

    def _observe(self, ids: np.ndarray) -> Observation:
        shape = (len(ids), self.size, self.size, 3)
        images = {name: np.zeros(shape, np.uint8) for name in self.config.cameras or ["front"]}
        state = np.zeros((len(ids), self.width), np.float32) if self.width else None
        return Observation(images, state, [INSTRUCTION] * len(ids))

    def close_extras(self, **_: Any) -> None: ...


class InThisThread:
    """An executor without threads: a mode of torch belongs to a thread."""

    def submit(self, function: Any, *args: Any, **options: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*args, **options))
        return future

    def shutdown(self) -> None: ...


class ActionRun:
    """An action policy of random weights on a fake GPU, with the parts of a run around it.

    Args:
        gpu: The present one.
        words: Overrides, as on the command line.
        rows: Envs.
        num_chunks: Policy calls of a rollout.
        lengths: As in ``StillEnv``.
    """

    def __init__(
        self, gpu: FakeGpu, words: list[str], rows: int, num_chunks: int = 1, lengths: list[int] | None = None
    ) -> None:
        self.gpu, self.rows = gpu, rows
        self.config = config = build_config(compose_config([*words, "cluster.device=cpu"]))
        spec = env_spec(config)
        if config.model.model_type in ("openvla", "openvla_oft", "pi0", "hf_vla"):
            widths = {"action": config.model.action_token_len, "proprio": spec.state_dim}
            statistics = {name: uniform_statistics(-np.ones(n), np.ones(n)) for name, n in widths.items() if n}
            config.model.init_config["norm_stats"] = {"still": statistics}
        model = policy_on_meta_device(config)
        model.processor = get_model_config_and_processor(config)[1]
        self.model = gpu.place(model).eval()
        image = config.model.image_size or [spec.image_size]
        shown = {"action_dim": self.model.action_dim, "image_size": image[0], "state_dim": spec.state_dim or 0}

        def make_env(num_envs: int) -> StillEnv:
            return StillEnv(config.env, num_envs, lengths is None, lengths=lengths, **shown)

        self.worker = TrainWorker(
            self.model, None if trains_actor(config) else config.trainer, temperature=1.0, micro_batch_size=config.model.micro_batch_size,
            val_micro_batch_size=config.model.val_micro_batch_size, precision=config.model.precision,
        )  # fmt: skip
        group = getattr(config.algorithm, "group_size", 1) or 1
        env = make_env(1)
        sampler = EpisodeSampler(
            env.episode_specs("train"), len(env.task_names), num_groups=rows // group, group_size=group
        )
        self.collector = RolloutCollector(
            make_env, sampler, num_envs=rows, num_chunks=num_chunks, temperature=1.0, num_worker_threads=1,
            autocast=self.worker.autocast, device="cuda",
        )  # fmt: skip
        for thread in self.collector.worker_threads:
            thread.executor.shutdown()
            thread.executor = InThisThread()
        self.sync = WeightPush(self.model, self.model, merge_adapters=config.rollout.merge_adapters)
        self.sync.push(0)
        if not trains_actor(config):
            self.algorithm = ALGORITHMS.get(config.algorithm.name)(config.algorithm)

    def policy_call(self, needs_values: bool = False) -> Counts:
        """Count a rollout of ``num_chunks`` calls; with ``needs_values``, another pass gives the bootstrap values."""
        with self.gpu.count() as counts:
            self.batch: RolloutBatch = self.collector.collect(self.sync.rollout_policy, 0, 0, needs_values)
        return counts

    def score(self) -> Counts:
        """Count the scoring of the rollout."""
        with self.gpu.count() as counts:
            self.batch.old_logprobs, self.batch.values = self.worker.evaluate(self.batch)
        return counts

    def update(self) -> Counts:
        """Count an optimiser step on the whole rollout; not the first, which makes the optimiser's state."""
        if self.batch.old_logprobs is None:  # without a phase that scores
            self.batch.old_logprobs, self.batch.values = (
                self.batch.rollout_logprobs,
                torch.zeros(self.batch.loss_mask.shape),
            )
        self._warm_up()
        self.algorithm.compute_advantages(self.batch)
        flat = self.batch.flatten()
        plan = MinibatchPlan(self.batch.loss_mask, self.collector.env_groups, len(flat.loss_mask), seed=0)
        with self.gpu.count() as counts:
            for minibatch in plan.epoch(0):
                self.worker.update(flat, minibatch, self.algorithm, STEP)
        return counts

    def sft_step(self) -> Counts:
        """Count a step of behaviour cloning on the observations of the rollout; not the first."""
        self._warm_up()
        observation = self.batch.observation
        actions = torch.zeros(len(observation), self.model.sft_chunk_len, self.model.action_dim)
        with self.gpu.count() as counts:
            self.worker.sft_update(observation, actions, len(observation), 0)
        return counts

    def _warm_up(self) -> None:
        make_state(self.worker.optimizer)
        self.worker._has_learnt = True  # the check of the first gradient

    def push(self) -> Counts:
        """Count a push of weights to the policy that plays, which is the trained one; not the first."""
        for version in range(2):
            with self.gpu.count() as counts:
                self.sync.push(version)
        return counts


def make_state(optimizer: MasterAdamW) -> None:
    """Take a step with gradients of 0, if it is the first one."""
    if not optimizer.state:
        for master in optimizer.masters:
            master.grad = torch.zeros_like(master)
        optimizer.step()
        optimizer.zero_grad()


def count(case: str, phases: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the counts of each phase of ``CASES[case]``, or of some: totals, and the commonest places, as JSON."""
    with FakeGpu() as gpu:
        return {phase: described(counts) for phase, counts in phases_of(case, gpu, phases)}


def phases_of(case: str, gpu: Any, phases: Sequence[str] = ()) -> Iterator[tuple[str, Counts]]:
    """Yield the counts of each phase of ``CASES[case]``, or of some, on a ``FakeGpu`` or a ``RealGpu``."""
    from tests.fake_gpu import more_runs

    chosen = CASES[case]
    kinds = {"ActionRun": ActionRun, "TokenRun": more_runs.TokenRun, "HeadRun": more_runs.HeadRun}
    run = kinds[chosen.run](gpu, chosen.settings, chosen.rows)
    for phase in phases or chosen.phases:
        yield phase, getattr(run, phase)()


def described(counts: Counts) -> dict[str, Any]:
    """Return totals, and the commonest places of each column, as JSON."""
    columns = ("syncs", "d2h", "h2d", "waits", "launches", "ops", "captures")
    places = {name: dict(getattr(counts, name).most_common(40)) for name in columns}
    return counts.totals() | {"peak_at": counts.peak_at, "places": places}
