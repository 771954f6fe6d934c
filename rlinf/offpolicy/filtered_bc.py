"""Filtered behaviour cloning: an iteration samples episodes, stores the successful ones and clones all stored ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.base import AnyAlgorithm, Updates
from rlinf.algorithms.config import AnyAlgorithmConfig, FilteredBCConfig
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.config.schema import RunConfig
from rlinf.data.augment import augment
from rlinf.data.config import SFTConfig
from rlinf.data.filters import filtered_rows, needs_outcomes
from rlinf.data.formats import open_dataset
from rlinf.data.rows import BatchSource, Prefetcher, shuffled_rows
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.envs import ENVS
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, reject
from rlinf.evaluation.evaluator import BatchedPolicy
from rlinf.models.precision import evaluation_mode
from rlinf.optim.schedule import learning_rate
from rlinf.options import require_values
from rlinf.preflight.compatibility import check_recording
from rlinf.preflight.validation import check_micro_batch, check_sft
from rlinf.rollout.demonstrations import run_episodes
from rlinf.run_folder import INITIAL_FILE, SUCCESSES_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext
from rlinf.training.recording import PolicyDemonstrator, dataset_writer, write_episode
from rlinf.training.rl_trainer import stored_reference
from rlinf.training.stop_signal import StopRequested
from rlinf.training.train_worker import rl_trainer_config
from rlinf.types import ClassAndConfig, EpisodeResult, EpisodeSpec, Observation

IN_THIS_PROCESS = {
    "cluster.placement": "colocated",
    "cluster.max_staleness": 0,
    "rollout.backend": "torch",
    "rollout.worker_processes": 0,
}


class FilteredBC(AnyAlgorithm):
    """Clone the policy's own successes (reward-ranked fine-tuning, Dong et al. 2023, with a reward of 0 or 1)."""

    config_class: ClassVar[type[AnyAlgorithmConfig]] = FilteredBCConfig
    runs_episodes: ClassVar[bool] = True

    @classmethod
    def make_trainer(cls, context: TrainerContext, env: VectorEnv, workers: RolloutWorkers | None) -> FilteredBCTrainer:
        return FilteredBCTrainer(context, env)

    @classmethod
    def check(cls, config: RunConfig, policy: ClassAndConfig | None) -> None:
        name, env, sft = "algorithm.name=filtered_bc", config.env, config.sft
        require_values(
            config,
            name,
            ("cluster.num_processes", 1, "one rank, which runs the episodes"),
            *((key, value, "episodes in the process that trains") for key, value in IN_THIS_PROCESS.items()),
            ("sft.advantage_top_fraction", None, "rows without labels"),
        )
        if config.trainer.on_collapse == "rollback":
            reject(f"{name} with trainer.on_collapse=rollback", "stop or continue", "trainer.on_collapse=stop")
        if env.success_classifier is None and not ENVS.get(env.name).reports_success(env):
            reject(
                f"{name} with env.name={env.name}, which is not known to report success",
                "one that does",
                "algorithm=ppo",
            )
        if cast(FilteredBCConfig, config.algorithm).restart and sft.max_steps > 0 and sft.dataset is None:
            problem = f"algorithm.restart=true with sft.max_steps={sft.max_steps} and sft.dataset=null, whose clone would be lost"
            reject(
                problem,
                "stored demonstrations",
                "sft.dataset=<a folder by `rlinf collect`>, or algorithm.restart=false",
            )
        check_sft(config, policy)
        check_micro_batch(config, config.trainer.minibatch_size, "trainer.minibatch_size")
        check_recording(config, name)

    @classmethod
    def updates(cls, config: RunConfig) -> Updates:
        algorithm = cast(FilteredBCConfig, config.algorithm)
        longest = ENVS.get(config.env.name).longest_horizon(config.env)
        steps = f"{algorithm.num_updates} steps of {config.trainer.minibatch_size}"
        table = {"rollout": f"{algorithm.num_episodes} episodes, then {steps} on the successful ones"}
        return Updates(algorithm.num_updates, table, algorithm.num_episodes * longest)

    @classmethod
    def buffer_bytes(cls, config: Any, model: Any, call_bytes: int) -> int:
        # Finished batches of episodes are on disk; the running one is in memory.
        longest = ENVS.get(config.env.name).longest_horizon(config.env)
        return config.evaluation.num_envs * longest * call_bytes


class FilteredBCTrainer(ActionTrainer):
    """Alternates between sampling episodes and cloning; successful episodes are stored as a LeRobotDataset per iteration.

    Args:
        env: Env without auto-reset, which runs the episodes.
    """

    def __init__(self, parts: TrainerContext, env: VectorEnv) -> None:
        super().__init__(parts)
        self.env, self.config = env, cast(FilteredBCConfig, parts.config.algorithm)
        self.datasets: list[BatchSource] = []
        self._specs: Sequence[EpisodeSpec] = ()
        # Before cloning, because that is where an iteration restarts.
        fix = (
            "it contains the weights before cloning, and is written by `rlinf train` with algorithm.restart=true. "
            "Copy it from the run's folder, or set algorithm.restart=false"
        )
        new, model = parts.loop.resumed_from is None, parts.worker.model
        self._initial = stored_reference(parts.loop, model, INITIAL_FILE, new, fix) if self.config.restart else None
        state = parts.loop.state.trainer
        # Digests of the stored datasets, by folder name; a signal may have come between storing and cloning, which is then repeated.
        stored, step = state.get("successes", {}), parts.loop.state.step
        self.digests: dict[str, str] = {name: digest for name, digest in stored.items() if int(name) < step}
        # Successes and episodes of each task's last iteration.
        self.counts: dict[str, list[int]] = dict(state.get("tasks", {}))

    def begin(self) -> None:
        """Open the demonstrations and the stored successes, then evaluate the initial policy."""
        state, config = self.loop.state, self.parts.config
        if state.phase != "rl":
            state.phase = "rl"
            self.worker.start_phase(rl_trainer_config(config.trainer, state.rollbacks))
        if config.sft.dataset is not None:
            demonstrations = open_dataset(config.sft, self.env, outcomes=needs_outcomes(config.sft))
            demonstrations.chunk_len = self.worker.model.sft_chunk_len
            self.datasets.append(filtered_rows(demonstrations, config.sft))
        for name, digest in self.digests.items():
            self._add_stored(name, digest)
        self._specs = self.env.episode_specs("train")
        super().begin()

    def loop_state(self) -> dict[str, Any]:
        """Return the digests of the stored successes, and the tasks' counts."""
        return {"successes": self.digests, "tasks": self.counts}

    def iteration(self, step: int) -> dict[str, float]:
        """Sample episodes, store the successful ones, and clone everything stored so far."""
        state, clock = self.loop.state, Clock()
        self.sync.push(state.policy_version)
        clock.lap("sync")
        try:
            with self.loop.stop_signal.interrupting():
                results = self._sample(step)
        except StopRequested as stop:  # sampling changes no training state, and a resumed run repeats it
            self.loop.save_unsaved()
            raise StopRequested(f"{stop} after step {state.done} of phase rl") from None
        clock.lap("rollout")
        env_steps = sum(result.num_env_steps for result in results)
        state.env_steps += env_steps
        metrics = {
            "rollout/env_steps_total": state.env_steps,
            "rollout/num_episodes": len(results),
            "rollout/success_rate": float(np.mean([result.success for result in results])),
            "rollout/return_mean": float(np.mean([result.episode_return for result in results])),
            "rollout/episode_len": env_steps / len(results),
            "rollout/actions_clipped_fraction": float(np.mean([r.actions_clipped_fraction or 0.0 for r in results])),
            "rollout/actions_max_abs": max(result.actions_max_abs or 0.0 for result in results),
        }
        if self.datasets:
            metrics |= self._clone(step)
        else:
            self.loop.progress.note("no episode has succeeded yet, so the policy is unchanged")
        clock.lap("update")
        seconds = clock.total()
        return metrics | {"throughput/env_steps_per_s": env_steps / seconds} | clock.metrics()

    @deadline("rollout")
    def _sample(self, step: int) -> list[EpisodeResult]:
        """Run the iteration's episodes, store the successful ones and count them per task."""
        config, env, model = self.parts.config, self.env, self.sync.rollout_model
        seed = derive_seed(config.seed, "filtered_bc", step)
        specs = draw_specs(self._specs, self._weights(), self.config.num_episodes, seed)
        policy = BatchedPolicy(model, env.stream_names, False, config.rollout.temperature, seed)
        name = f"{step:06d}"
        folder = self.loop.folder / SUCCESSES_FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)  # of an iteration that a resumed run repeats
        writer = dataset_writer(config, env, folder, has_executed=False)
        results: list[EpisodeResult] = []
        try:
            for batch_specs in batches(specs, env.num_envs):
                with evaluation_mode(model), self.worker.autocast():
                    batch = run_episodes(env, batch_specs, PolicyDemonstrator(policy, batch_specs))
                results += batch.results
                for slot in np.flatnonzero([result.success for result in batch.results]).tolist():
                    write_episode(writer, batch, slot)
                heartbeat()
                success_rate = float(np.mean([result.success for result in results]))
                self.loop.progress.update("episodes", len(results), len(specs), success_rate)
            if any(result.success for result in results):
                writer.close()
                self._add_stored(name)
        finally:
            writer.abort()  # has no effect after close
            env.offload()
        for task in sorted({result.task for result in results}):
            outcomes = [result.success for result in results if result.task == task]
            self.counts[task] = [sum(outcomes), len(outcomes)]
        return results

    def _clone(self, step: int) -> dict[str, float]:
        """Take the iteration's optimiser steps on all stored episodes and the demonstrations."""
        config, state, rows = self.parts.config, self.loop.state, JoinedRows(self.datasets)
        size, num_updates = config.trainer.minibatch_size, self.config.num_updates
        seed = derive_seed(config.seed, "filtered_bc updates", step)
        if self._initial is not None:
            self._initial.restore()
            self.worker.end_phase()  # with the masters of 16-bit weights
            self.worker.start_phase(rl_trainer_config(config.trainer, state.rollbacks))

        def read(update: int) -> tuple[Observation, Tensor]:
            observation, actions = rows.rows(shuffled_rows(len(rows), update, size, seed))
            return augment(
                observation, config.sft.augment, derive_seed(seed, "augment", update), np.arange(size)
            ), actions

        sums: dict[str, float] = {}
        with Prefetcher(read, 0, config.sft.num_workers) as batches_of_rows:
            for update in range(num_updates):
                observation, actions = batches_of_rows.next()
                self.worker.train_step.decay = learning_rate(update, num_updates, decay=config.trainer.lr_decay)
                results = self.worker.sft_update(
                    observation, actions, size, step, derive_seed(seed, "noise", update), "rl"
                )
                for name, value in results.items():
                    sums[name] = sums.get(name, 0.0) + value / num_updates
                state.policy_version += 1
                self.loop.progress.update("updates", update + 1, num_updates, loss=results["loss"])
        return {f"train/{name}": value for name, value in sums.items()}

    def _add_stored(self, name: str, digest: str | None = None) -> None:
        """Add successful episodes of this run; if they are in the folder of a resumed run, copy them.

        Raise CheckpointError if they are missing, or differ from ``digest``.
        """
        folder, resumed_from = self.loop.folder / SUCCESSES_FOLDER / name, self.loop.resumed_from
        origin = folder if resumed_from is None else resumed_from.parent.parent / SUCCESSES_FOLDER / name
        fix = "or start a new run with init_from=<checkpoint> resume=null output_dir=<a new folder>"
        if digest is not None and not origin.is_dir():
            raise CheckpointError(f"{origin} is missing; it contains successful episodes of the run. Copy it, {fix}")
        if digest is not None and origin.resolve() != folder.resolve():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(origin, folder)
        # Unlike demonstrations, a policy's actions may contradict the env's conventions.
        dataset = open_dataset(SFTConfig(), self.env, str(folder), checks_statistics=False)
        dataset.chunk_len = self.worker.model.sft_chunk_len
        if digest not in (None, dataset.digest()):
            raise CheckpointError(f"{origin} contains other episodes than the resumed run used. Restore it, {fix}")
        self.digests[name] = dataset.digest()
        self.datasets.append(dataset)

    def _weights(self) -> np.ndarray:
        """Return the probability of each task, float64 ``[T]``."""
        weights = np.ones(len(self.env.task_names))
        if self.config.task_sampling == "failures":
            counts = [self.counts.get(task, [0, 0]) for task in self.env.task_names]
            # The expected failure rate under a uniform prior (Laplace), so that no task is given up or left out.
            weights = np.array([1 - (successes + 1) / (episodes + 2) for successes, episodes in counts])
        return weights / weights.sum()


class JoinedRows:
    """The rows of several datasets, one after the other."""

    def __init__(self, datasets: Sequence[BatchSource]) -> None:
        self.datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, index: np.ndarray) -> tuple[Observation, Tensor]:
        """Return the rows ``index`` (int64 ``[B]``), ordered by dataset, and their actions ``[B, C, D]``."""
        numbers = np.searchsorted(self._ends, index, side="right")
        parts = [
            self.datasets[k].rows(index[numbers == k] - (self._ends[k] - len(self.datasets[k])))
            for k in np.unique(numbers).tolist()
        ]
        observations, actions = zip(*parts, strict=True)
        return Observation.concatenate(observations), torch.cat(actions)


def draw_specs(
    available: Sequence[EpisodeSpec], weights: np.ndarray, num_episodes: int, seed: int
) -> list[EpisodeSpec]:
    """Draw episodes, sorted by task.

    A task of weight ``w`` (which sum to 1) gets ``num_episodes * w`` episodes, rounded up or down so that the sum is ``num_episodes``.
    ``available`` alternates between the tasks.
    """
    generator = np.random.default_rng(seed)
    num_tasks = len(weights)
    # Systematic sampling: one random offset, then equal steps through the cumulated weights.
    ends = np.append(np.cumsum(weights)[:-1], 1.0) * num_episodes + generator.random()
    counts = np.diff(np.floor(ends).astype(int), prepend=0)
    specs = []
    for task, count in enumerate(counts.tolist()):
        num_rounds = len(available) // num_tasks
        rounds = np.concatenate([generator.permutation(num_rounds) for _ in range(-(-count // num_rounds))])[:count]
        for index, number in enumerate(rounds.tolist()):
            spec = available[number * num_tasks + task]
            # A repeated episode needs a different seed; otherwise its actions would be the same.
            specs.append(replace(spec, seed=spec.seed + index // num_rounds))
    return specs


def batches(specs: Sequence[EpisodeSpec], num_envs: int) -> list[list[EpisodeSpec]]:
    """Split episodes that are sorted by task so that an env rarely changes its task, which would rebuild its scene."""
    num_batches = -(-len(specs) // num_envs)
    return [list(specs[number::num_batches]) for number in range(num_batches)]
