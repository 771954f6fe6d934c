"""Roll out a policy in vectorised environments and return a ``RolloutBatch``.

The envs are split among worker threads. While one thread's simulator runs, the policy acts in a different thread
(MuJoCo and torch release the GIL). Each iteration starts new episodes. Random numbers derive from the seed, the
iteration and the global env index, so a rollout depends only on the weights and the iteration; splitting envs among
threads or ranks changes only the rounding of matrix products. With ``continue_episodes``, a rollout also depends on
where the previous one ended.

If a simulator is lost (``ChunkStep.lost_env_ids``), its episode restarts with a new id. The lost episode's actions
remain in the batch with ``loss_mask`` false.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass
from functools import partial
from threading import Event
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rlinf.distributed.process_group import rank_range
from rlinf.envs.base import VectorEnv
from rlinf.envs.episodes import EpisodeSampler
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.cuda_stream import CudaStream
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeResult, EpisodeSpec, Observation, RolloutBatch

ATTEMPT_STRIDE = 1 << 32
"""Offset between the group and episode ids of successive attempts at one iteration."""


class Collector(Protocol):
    """Collects one rank's rollouts. The arguments are described in ``RolloutCollector.collect``."""

    env_groups: range

    def submit(
        self, model: Any, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """Request a rollout with the last pushed weights, ``policy_version``; immediately return a handle for ``result``."""

    def result(self, pending: Any) -> RolloutBatch:
        """Wait for a submitted rollout and return it."""

    def wait_until_ready(self) -> None:
        """Wait until the threads, processes or rollout workers have started."""

    def close(self) -> None:
        """Stop the threads, processes or rollout workers."""


class _Recorder:
    """Records a rollout's observations. All worker threads write into the batch's arrays ``[T, B, ...]``."""

    def __init__(self, num_chunks: int, num_envs: int) -> None:
        self.shape = (num_chunks, num_envs)
        self.images: dict[str, np.ndarray] = {}
        self.state: np.ndarray | None = None
        self.instruction = [[""] * num_envs for _ in range(num_chunks)]
        self.is_resized = False

    def allocate(self, example: Observation) -> None:
        """Allocate zero-filled arrays with the shapes and dtypes of ``example``."""
        self.is_resized = example.is_resized
        self.images = {name: np.zeros((*self.shape, *x.shape[1:]), x.dtype) for name, x in example.images.items()}
        if example.state is not None:
            self.state = np.zeros((*self.shape, *example.state.shape[1:]), example.state.dtype)

    def write(self, t: int, columns: np.ndarray, observation: Observation) -> None:
        """Record the observation of the envs ``columns`` at policy call ``t``."""
        for name, image in observation.images.items():
            self.images[name][t, columns] = image
        if self.state is not None:
            self.state[t, columns] = observation.state
        for column, instruction in zip(columns.tolist(), observation.instruction, strict=True):
            self.instruction[t][column] = instruction

    def observation(self) -> Observation:
        """Return all ``T * B`` observations, time-major."""
        rows = self.shape[0] * self.shape[1]
        return Observation(
            images={name: image.reshape(rows, *image.shape[2:]) for name, image in self.images.items()},
            state=None if self.state is None else self.state.reshape(rows, -1),
            instruction=[text for chunk in self.instruction for text in chunk],
            is_resized=self.is_resized,
        )


@dataclass(eq=False)
class RolloutCollector:
    """Collect rollouts with ``num_chunks`` policy calls in each env of this rank; see ``RolloutConfig``.

    Attributes:
        make_env: ``make_env(num_envs) -> VectorEnv`` with the required auto-reset mode.
        num_envs: Number of envs across all ranks, in groups of ``sampler.group_size``.
        num_worker_threads: Number of worker threads, among which torch's threads are divided equally.
        rank, num_ranks: This process steps the envs of its ``rank_range``.
        autocast: Returns the context manager in which the policy runs.
        continue_episodes: Whether episodes running at the end of a rollout continue in the next one.
        device: Device of the policy, ``cpu`` or ``cuda``.
    """

    make_env: Callable[[int], VectorEnv]
    sampler: EpisodeSampler
    _: KW_ONLY
    num_envs: int
    num_chunks: int
    temperature: float
    num_worker_threads: int = 2
    rank: int = 0
    num_ranks: int = 1
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    offload_envs: bool = False
    continue_episodes: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._stop = Event()
        # Whether the last rollout succeeded in all threads, and its episodes continue in the next one.
        self._episodes_continue = False
        self.env_groups = rank_range(self.num_envs // self.sampler.group_size, self.rank, self.num_ranks)
        several = self.num_worker_threads > 1
        self.worker_threads = [
            RolloutThread(
                self,
                env,
                ThreadPoolExecutor(1, thread_name_prefix="rollout"),
                CudaStream(self.device, several and not env.on_gpu),
            )
            for rows in np.array_split(self._envs_of(self.env_groups), self.num_worker_threads)
            for env in [self.make_env(len(rows))]
        ]

    def wait_until_ready(self) -> None:
        """Return immediately, because simulators start with the first episode."""

    def close(self) -> None:
        """Close each env in the thread that owns its graphics context. A running rollout stops after its chunk."""
        self._stop.set()
        closings = [thread.executor.submit(thread.env.close) for thread in self.worker_threads]
        for thread in self.worker_threads:
            thread.executor.shutdown()
        _results(closings)

    def _envs_of(self, env_groups: Sequence[int]) -> np.ndarray:
        size = self.sampler.group_size
        return (np.array(env_groups, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()

    def submit(self, *arguments: Any, **options: Any) -> Callable[[], RolloutBatch]:
        """Return a function that collects the rollout when ``result`` calls it, with the model's weights at that time."""
        return partial(self.collect, *arguments, **options)

    def result(self, pending: Callable[[], RolloutBatch]) -> RolloutBatch:
        return pending()

    @record_function("rollout")
    def collect(
        self, model: ActionModel, step: int, policy_version: int, needs_values: bool, attempt: int = 0,
        env_groups: Sequence[int] | None = None,
    ) -> RolloutBatch:  # fmt: skip
        """Collect a rollout of ``env_groups`` and return it as a time-major batch in their order, without the trainer's fields.

        Without auto-reset, the policy acts only in envs with a running episode. Entries after the end of an episode are 0,
        with ``loss_mask`` false.

        Args:
            model: Policy in evaluation mode.
            step: Iteration, which determines episodes and random numbers.
            policy_version: Recorded with every sample.
            needs_values: Whether to compute ``bootstrap_values``.
            attempt: Number of the rollout within the iteration. Each attempt uses different group and episode ids.
            env_groups: Env groups of this rank (a subset requires ``auto_reset=False``); None: all.
        """
        env_ids = self._envs_of(self.env_groups if env_groups is None else env_groups)
        recorder = _Recorder(self.num_chunks, len(env_ids))
        num_threads = torch.get_num_threads()
        self._stop = stop = Event()
        # If this rollout fails, its episodes are in an unknown state, so the next rollout must reset the envs.
        resets, self._episodes_continue = not self._episodes_continue, False
        requests: list[tuple[RolloutThread, RolloutPart]] = []
        first = 0
        for thread, ids in zip(self.worker_threads, np.array_split(env_ids, len(self.worker_threads)), strict=True):
            if len(ids):
                part = RolloutPart(
                    model, recorder, env_ids=ids, first_column=first, uniforms=self._uniforms(ids, model.num_uniforms, step, attempt),
                    step=step, attempt=attempt, policy_version=policy_version, resets=resets,
                    num_torch_threads=max(1, num_threads // len(self.worker_threads)),
                )  # fmt: skip
                requests.append((thread, part))
                first += len(ids)
        try:
            # All threads reset before any thread steps, because the recorder needs one observation to allocate its arrays.
            first_rows = _results([thread.executor.submit(thread.start, part) for thread, part in requests])[0]
            recorder.allocate(model.resize_images(first_rows.select([0])))
            parts = _results([thread.executor.submit(thread.run, needs_values, stop) for thread, _ in requests])
        except BaseException:
            stop.set()
            raise
        finally:
            torch.set_num_threads(num_threads)
        self._episodes_continue = self.continue_episodes
        for thread, _ in requests:
            thread.forget(keep_observation=self.continue_episodes)
        return RolloutBatch.concatenate(parts, recorder.observation())

    def _uniforms(self, env_ids: np.ndarray, width: int, step: int, attempt: int) -> Tensor:
        """Draw the actions' random numbers in (0, 1), float32 ``[T, B, U]``, from one random stream per env group."""
        size = self.sampler.group_size
        drawn = {}
        for env_group in np.unique(env_ids // size).tolist():
            generator = torch.Generator().manual_seed(
                derive_seed(self.sampler.seed, "actions", step, attempt, env_group)
            )
            drawn[env_group] = torch.rand(self.num_chunks, size, width, generator=generator)
        columns = [drawn[env // size][:, env % size] for env in env_ids.tolist()]
        return torch.stack(columns, 1).clamp_min_(torch.finfo(torch.float32).tiny)


def _results(futures: list[Future]) -> list[Any]:
    """Wait for all results, or raise the first exception without waiting for the remaining futures."""
    wait(futures, return_when=FIRST_EXCEPTION)
    return [future.result() for future in futures if future.done()]


@dataclass
class RolloutPart:
    """One thread's part of a rollout: the request, and what has been recorded so far.

    Attributes:
        env_ids: Global indices of the envs, int64 ``[B]``. Additional envs of the thread stay idle.
        first_column: Position of the first env in the rank's batch.
        uniforms: Random numbers in (0, 1) from which the policy samples, ``[T, B, U]``.
        resets: Whether to start new episodes instead of continuing those of the last rollout.
        positions, num_restarts: Number of finished and of lost episodes in each env, ``[B]``.
        uncounted: Rows of the thread's envs whose results are dropped because a simulator was lost.
    """

    model: ActionModel
    recorder: _Recorder
    _: KW_ONLY
    env_ids: np.ndarray
    first_column: int
    uniforms: Tensor
    step: int
    attempt: int
    policy_version: int
    resets: bool
    num_torch_threads: int

    def __post_init__(self) -> None:
        count = len(self.env_ids)
        self.positions, self.num_restarts = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.uncounted: set[int] = set()
        self.lost_episode_ids: list[int] = []
        self.specs: dict[int, EpisodeSpec] = {}
        self.episodes: list[tuple[int, EpisodeResult]] = []  # the first of each env, by its row
        # Of each policy call: whether an env was running [B], its episode's id [B], the step's outcome, and the policy's outputs.
        self.running: list[np.ndarray] = []
        self.episode_ids: list[np.ndarray] = []
        self.chunks: list[ChunkStep] = []
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.values: list[Tensor] = []


@dataclass(eq=False)
class RolloutThread:
    """A thread that steps some of the rank's envs, whose graphics contexts belong to it, on a CUDA stream of its own.

    Attributes:
        observation: The envs' last observation, in which the next policy call acts, in this rollout or the next one.
        part: The rollout that is running.
    """

    collector: RolloutCollector
    env: VectorEnv
    executor: ThreadPoolExecutor
    stream: CudaStream
    observation: Observation | None = None
    part: RolloutPart | None = None

    def start(self, part: RolloutPart) -> Observation:
        """Reset each env to its first episode of the rollout, unless episodes continue, and return the observation."""
        # The thread itself replaces the part, because a failed rollout may have been stepping here until now.
        self.part, sampler = part, self.collector.sampler
        if part.resets:
            episodes = [sampler.spec(part.step, int(i), 0, part.attempt) for i in part.env_ids]
            idle = [None] * (self.env.num_envs - len(episodes))
            options = {"episodes": [*episodes, *idle], "next_episode": self.next_episode}
            self.observation, _ = self.env.reset(options=options)
        return self.observation

    def forget(self, keep_observation: bool) -> None:
        """Free the memory of the finished rollout."""
        self.part = None
        if not keep_observation:
            self.observation = None

    def next_episode(self, row: int) -> EpisodeSpec:
        """Return the next episode for an env slot, under auto-reset."""
        # If episodes continue, the env calls this in later rollouts too, so it reads the part of the present one.
        part = self.part
        part.positions[row] += 1
        return self.collector.sampler.spec(part.step, int(part.env_ids[row]), int(part.positions[row]), part.attempt)

    @torch.no_grad()
    def run(self, needs_values: bool, stop: Event) -> RolloutBatch:
        """Act and step ``num_chunks`` times; raise CancelledError when ``stop`` is set."""
        part = self.part
        # torch's thread count is global, and `collect` has already restored it after a failure.
        if not stop.is_set():
            torch.set_num_threads(part.num_torch_threads)
        running = np.ones(len(part.env_ids), dtype=bool)
        actions = np.zeros(0)
        with self.collector.autocast(), self.stream.running():
            for t in range(self.collector.num_chunks):
                if stop.is_set():
                    raise CancelledError
                if running.any():
                    actions = self._act(t, np.flatnonzero(running))
                else:  # all envs are idle, so any actions will do
                    for outputs in (part.tokens, part.logprobs, part.values):
                        outputs.append(torch.zeros_like(outputs[-1]))
                part.running.append(running)
                chunk = self._step(actions)
                if not self.env.auto_reset:
                    running = running & ~(chunk.terminated | chunk.truncated)[: len(running)]
            batch = self._batch()
            if needs_values:
                self._fill_bootstrap(batch)
                batch.rollout_values = torch.stack(part.values) if part.model.predicts_values else None
        if self.collector.offload_envs:
            self.env.offload()
        return batch

    def _act(self, t: int, live: np.ndarray) -> np.ndarray:
        """Record the observation and the policy's outputs for the envs ``live``; return actions ``[num_envs, C, D]``, 0 for other envs."""
        part, model, temperature = self.part, self.part.model, self.collector.temperature
        count, num_envs = len(part.env_ids), self.env.num_envs
        observation = self.observation if len(live) == num_envs else self.observation.select(live)
        # Resize once and record the result, so that scoring and updates read the same pixels as the rollout.
        observation = model.resize_images(observation)
        part.recorder.write(t, part.first_column + live, observation)
        uniforms = part.uniforms[t] if len(live) == count else part.uniforms[t, live]
        inputs = {"uniforms": self.stream.send(uniforms), **model.preprocess(observation)}
        with record_function("policy call"):
            prediction = model.predict_action_batch(do_sample=True, temperature=temperature, **inputs)
            tokens = prediction.sequences[:, -model.num_sampled :]
            logprobs = model.rollout_logprobs(prediction, temperature)
            outputs = self.stream.fetch((tokens, logprobs, prediction.values, prediction.actions))
        for recorded, output in zip((part.tokens, part.logprobs, part.values), outputs, strict=False):
            recorded.append(_spread(output, live, count))
        return _spread(outputs[-1], live, num_envs).numpy()

    def _step(self, actions: np.ndarray) -> ChunkStep:
        """Step the envs and record the outcome."""
        part = self.part
        part.episode_ids.append(self._episode_ids())
        is_first = part.positions == 0  # before the step, which starts the next episodes
        chunk = self.env.chunk_step(actions)
        self.observation = chunk.observation
        part.chunks.append(chunk)
        ended = zip(chunk.final_env_ids, chunk.episodes, strict=True)
        part.episodes += [(int(row), episode) for row, episode in ended if is_first[row]]
        if len(lost := chunk.lost_env_ids):
            # A lost episode has no return, so its actions must be excluded from the loss.
            part.lost_episode_ids += part.episode_ids[-1][lost].tolist()
            # Only each env's first episode is used as a result. A crash affects all envs of its process. Episodes that
            # had already ended are mostly quick successes, as are restarts that end in time. Including either would
            # bias the success rate, so all results from the process are dropped.
            part.uncounted.update(self.env.rows_lost_with(lost[part.positions[lost] == 0]).tolist())
            part.num_restarts[lost] += 1  # assigns a new episode id to the restart
        return chunk

    def _episode_ids(self) -> np.ndarray:
        """Return the current episodes' ids, unique within an iteration across ranks, and store their specs."""
        part = self.part
        num_earlier = part.positions + part.num_restarts
        ids = num_earlier * self.collector.num_envs + part.env_ids + part.attempt * ATTEMPT_STRIDE
        for number, spec in zip(ids.tolist(), self.env.current_specs(), strict=False):  # idle rows come last
            part.specs.setdefault(number, spec)
        return ids

    def _batch(self) -> RolloutBatch:
        part, chunks = self.part, self.part.chunks
        count = len(part.env_ids)

        def stack(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.stack(arrays)[:, :count])

        shape, ids = (len(chunks), count), stack(part.episode_ids)
        groups = torch.tensor(part.env_ids // self.collector.sampler.group_size + part.attempt * ATTEMPT_STRIDE)
        batch = RolloutBatch(
            observation=self.observation,  # placeholder that `collect` replaces with the recorder's observations
            action_tokens=torch.stack(part.tokens),
            rollout_logprobs=torch.stack(part.logprobs),
            action_rewards=stack([chunk.rewards for chunk in chunks]),
            action_mask=stack([chunk.executed for chunk in chunks]),
            loss_mask=stack(part.running) & ~torch.isin(ids, torch.tensor(part.lost_episode_ids, dtype=torch.int64)),
            terminated=stack([chunk.terminated for chunk in chunks]),
            truncated=stack([chunk.truncated for chunk in chunks]),
            bootstrap_values=torch.zeros(shape),
            group_ids=groups.expand(shape).contiguous(),
            episode_ids=ids,
            policy_version=torch.full(shape, part.policy_version, dtype=torch.int64),
            specs=part.specs,
        )
        counted = [(row, episode) for row, episode in part.episodes if row not in part.uncounted]
        batch.episodes = [(int(part.env_ids[row]), episode) for row, episode in counted]
        return batch

    def _fill_bootstrap(self, batch: RolloutBatch) -> None:
        """Fill in the values of truncated episodes' final observations and of the observations after the last chunk."""
        part, where, observations = self.part, list[tuple[int, int]](), list[Observation]()
        for t, chunk in enumerate(part.chunks):
            rows = [k for k, env in enumerate(chunk.final_env_ids) if chunk.truncated[env]]
            if rows:
                observations.append(chunk.final_observation.select(rows))
                where += [(t, int(chunk.final_env_ids[k])) for k in rows]
        ended = batch.terminated[-1] | batch.truncated[-1]
        running = torch.nonzero(batch.loss_mask[-1] & ~ended).flatten().tolist()
        if running:
            observations.append(self.observation.select(running))
            where += [(len(part.chunks) - 1, row) for row in running]
        if not where:
            return
        final = Observation.concatenate(observations)
        # Use at most as many rows as in the rollout's policy calls, which are known to fit in memory.
        batch_size = len(part.env_ids)
        for start in range(0, len(where), batch_size):
            places = where[start : start + batch_size]
            inputs = part.model.preprocess(final.select(np.arange(start, start + len(places))))
            (values,) = self.stream.fetch((part.model.predict_values(**inputs),))
            batch.bootstrap_values[[t for t, _ in places], [row for _, row in places]] = values


def _spread(values: Tensor, rows: np.ndarray, count: int) -> Tensor:
    """Return an array of ``count`` rows: ``values`` at the indices ``rows``, 0 elsewhere."""
    if len(rows) == count:
        return values
    spread = values.new_zeros(count, *values.shape[1:])
    spread[rows] = values
    return spread
