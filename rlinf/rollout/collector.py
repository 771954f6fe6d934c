"""Plays a policy in vectorised environments and returns a ``RolloutBatch``.

The envs are split into lanes, each a thread that acts and steps in turn: while one lane's simulator runs (MuJoCo and torch
release the GIL), the other's policy does, so cores, or a core and a GPU, stay busy. An iteration starts from fresh
episodes and draws its random numbers from the seed, the iteration and the global env index, so a rollout depends on the
weights and the step alone, not (but for the rounding of matrix products of another shape) on how the envs were split over
lanes or ranks.

Where a simulator is lost (``ChunkStep.lost_env_ids``), what the policy did in that episode stays in the batch, but with
``loss_mask`` false, and the episode begins again under a new id. Where the first episode of an env was lost, all envs of its
process count no results: what had ended by then is mostly quick successes, and so is what ends of the second tries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import VectorEnv
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation, RolloutBatch

ATTEMPT_STRIDE = 1 << 32
"""Distance between the group and episode ids of two rollouts of one iteration."""


@dataclass
class _Lane:
    """Rows for some of the envs, and the thread that plays them and owns their graphics context."""

    env: VectorEnv
    executor: ThreadPoolExecutor


class _Recorder:
    """Observations of a rollout, written by all lanes into arrays ``[T, B, ...]`` that are the batch's in the end."""

    def __init__(self, num_chunks: int, num_envs: int) -> None:
        self.shape = (num_chunks, num_envs)
        self.images: dict[str, np.ndarray] = {}
        self.state: np.ndarray | None = None
        self.instruction = [[""] * num_envs for _ in range(num_chunks)]

    def allocate(self, example: Observation) -> None:
        """Make the arrays, for rows like those of ``example``; 0 where nothing is written."""
        self.images = {name: np.zeros((*self.shape, *x.shape[1:]), x.dtype) for name, x in example.images.items()}
        if example.state is not None:
            self.state = np.zeros((*self.shape, *example.state.shape[1:]), example.state.dtype)

    def write(self, t: int, columns: slice, observation: Observation) -> None:
        """Record the first rows of ``observation``, as many as there are ``columns``."""
        count = columns.stop - columns.start
        for name, image in observation.images.items():
            self.images[name][t, columns] = image[:count]
        if self.state is not None:
            self.state[t, columns] = observation.state[:count]
        self.instruction[t][columns] = observation.instruction[:count]

    def observation(self) -> Observation:
        """The ``T * B`` rows, time-major."""
        rows = self.shape[0] * self.shape[1]
        return Observation(
            images={name: image.reshape(rows, *image.shape[2:]) for name, image in self.images.items()},
            state=None if self.state is None else self.state.reshape(rows, -1),
            instruction=[sentence for chunk in self.instruction for sentence in chunk],
        )


class RolloutCollector:
    """Collects rollouts of ``num_chunks`` policy calls from every env of this rank.

    Args:
        make_env: ``make_env(num_envs) -> VectorEnv`` with the wanted auto-reset mode.
        sampler: Chooses episodes.
        num_envs: Environments of all ranks.
        num_chunks: Policy calls per env.
        temperature: Of the action distribution.
        num_lanes: Threads that play; each gets its share of torch's threads.
        rank, num_ranks: This process plays the ``rank``-th block of envs.
        autocast: Makes the context in which the policy runs.
        offload_envs: Free graphics memory after each rollout.
    """

    def __init__(
        self,
        make_env: Callable[[int], VectorEnv],
        sampler: EpisodeSampler,
        *,
        num_envs: int,
        num_chunks: int,
        temperature: float,
        num_lanes: int = 2,
        rank: int = 0,
        num_ranks: int = 1,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        offload_envs: bool = False,
    ) -> None:
        self.sampler = sampler
        self.num_envs = num_envs
        self.num_chunks = num_chunks
        self.temperature = temperature
        self.autocast = autocast
        self.offload_envs = offload_envs
        self.rank, self.num_ranks = rank, num_ranks
        self._stop = Event()
        self.lanes = [
            _Lane(make_env(len(rows)), ThreadPoolExecutor(1, thread_name_prefix="rollout"))
            for rows in np.array_split(np.arange(num_envs // num_ranks), num_lanes)
        ]

    def close(self) -> None:
        """Close the envs in the threads that own their graphics contexts; a rollout that still runs ends with its chunk."""
        self._stop.set()
        closings = [lane.executor.submit(lane.env.close) for lane in self.lanes]
        for lane in self.lanes:
            lane.executor.shutdown()
        _results(closings)

    def collect(
        self,
        model: ActionModel,
        step: int,
        policy_version: int,
        needs_values: bool,
        attempt: int = 0,
        env_ids: np.ndarray | None = None,
    ) -> RolloutBatch:
        """Play one rollout.

        Without auto-reset, the policy acts only for rows whose episodes still run; what follows an episode is 0 and not valid.

        Args:
            model: In evaluation mode.
            step: Iteration; fixes episodes and random numbers.
            policy_version: Recorded with every sample.
            needs_values: Compute ``bootstrap_values``.
            attempt: Number of the rollout within the iteration; group and episode ids of two attempts differ.
            env_ids: int64, the envs of all ranks that play, which needs ``auto_reset=False``; None: all.

        Returns:
            Time-major batch of this rank's share of ``env_ids``, in their order, without the trainer's fields. All ranks play
            equally many: the last env is played again where they do not divide, and its repeated episodes are not counted.

        Raises:
            Exception: What was raised in a lane; the others end with the chunk that they are in.
        """
        generator = torch.Generator().manual_seed(derive_seed(self.sampler.seed, "actions", step, attempt))
        uniforms = torch.rand(self.num_chunks, self.num_envs, model.num_uniforms, generator=generator)
        uniforms.clamp_min_(torch.finfo(torch.float32).tiny)  # the open interval (0, 1)
        env_ids = np.arange(self.num_envs) if env_ids is None else env_ids
        places = np.arange(-(-len(env_ids) // self.num_ranks) * self.num_ranks).reshape(self.num_ranks, -1)[self.rank]
        recorder = _Recorder(self.num_chunks, len(places))
        num_threads = torch.get_num_threads()
        self._stop = stop = Event()
        pairs, first = [], 0
        for lane, part in zip(self.lanes, np.array_split(places, len(self.lanes)), strict=True):
            ids, repeated = env_ids[part.clip(max=len(env_ids) - 1)], part >= len(env_ids)
            columns, first = slice(first, first + len(part)), first + len(part)
            if len(part):
                pairs.append((lane, _Rollout(self, lane, ids, repeated, columns, model, recorder, uniforms[:, ids], step, attempt,
                                             policy_version, num_threads)))  # fmt: skip
        try:
            recorder.allocate(_results([lane.executor.submit(rollout.start) for lane, rollout in pairs])[0])
            parts = _results([lane.executor.submit(rollout.play, needs_values, stop) for lane, rollout in pairs])
        except BaseException:
            stop.set()
            raise
        finally:
            torch.set_num_threads(num_threads)
        return RolloutBatch.concatenate(parts, recorder.observation())


def _results(futures: list[Future]) -> list[Any]:
    """Wait until all are done, or one has raised, which is raised here."""
    wait(futures, return_when=FIRST_EXCEPTION)
    return [future.result() for future in futures if future.done()]


class _Rollout:
    """One lane's part of one rollout."""

    def __init__(
        self, collector: RolloutCollector, lane: _Lane, env_ids: np.ndarray, repeated: np.ndarray, columns: slice,
        model: ActionModel, recorder: _Recorder, uniforms: Tensor, step: int, attempt: int, policy_version: int,
        num_threads: int,
    ) -> None:  # fmt: skip
        self.collector, self.env, self.env_ids, self.model = collector, lane.env, env_ids, model
        self.recorder, self.columns = recorder, columns
        self.uniforms, self.policy_version = uniforms, policy_version
        self.step, self.attempt = step, attempt
        self.num_threads = max(1, num_threads // len(collector.lanes))
        self.positions = np.zeros(len(env_ids), dtype=np.int64)
        self.num_begun = np.zeros(len(env_ids), dtype=np.int64)  # as positions, and one more for each lost episode
        self.void_episodes: list[int] = []
        self.disturbed = np.zeros(self.env.num_envs, dtype=bool)
        self.disturbed[: len(env_ids)] = repeated
        self.specs: dict[int, EpisodeSpec] = {}

    def start(self) -> Observation:
        """Reset every env to the first episode of this iteration."""
        sampler = self.collector.sampler
        episodes = [sampler.spec(self.step, int(i), 0, self.attempt) for i in self.env_ids]
        idle = [None] * (self.env.num_envs - len(episodes))
        options = {"episodes": [*episodes, *idle], "next_episode": self._next_episode}
        self.observation, _ = self.env.reset(options=options)
        return self.observation

    def _next_episode(self, row: int) -> EpisodeSpec:
        self.positions[row] += 1
        self.num_begun[row] += 1
        return self.collector.sampler.spec(self.step, int(self.env_ids[row]), int(self.positions[row]), self.attempt)

    @torch.no_grad()
    def play(self, needs_values: bool, stop: Event) -> RolloutBatch:
        """Act and step ``num_chunks`` times, or until ``stop`` is set.

        Raises:
            CancelledError: It was.
        """
        if not stop.is_set():  # else the other threads go on with all of torch's threads
            torch.set_num_threads(self.num_threads)
        model, temperature = self.model, self.collector.temperature
        count = len(self.env_ids)
        alive = np.ones(count, dtype=bool)
        chunks: list[ChunkStep] = []
        tokens, logprobs, values, alives, episode_ids, episodes = [], [], [], [], [], []
        with self.collector.autocast():
            for t in range(self.collector.num_chunks):
                if stop.is_set():
                    raise CancelledError
                live = np.flatnonzero(alive)
                if len(live):
                    self.recorder.write(t, self.columns, self.observation)
                    seen = self.observation if len(live) == self.env.num_envs else self.observation.select(live)
                    prediction = model.predict_action_batch(
                        do_sample=True,
                        temperature=temperature,
                        uniforms=self.uniforms[t, live],
                        **model.preprocess(seen),
                    )
                    tokens.append(_spread(prediction.sequences[:, -model.num_sampled :].cpu(), live, count))
                    logprobs.append(_spread(model.rollout_logprobs(prediction, temperature).cpu(), live, count))
                    values.append(_spread(prediction.values.cpu(), live, count))
                    actions = _spread(prediction.actions.cpu(), live, self.env.num_envs).numpy()
                else:
                    tokens.append(torch.zeros_like(tokens[-1]))
                    logprobs.append(torch.zeros_like(logprobs[-1]))
                    values.append(torch.zeros_like(values[-1]))
                alives.append(alive)
                episode_ids.append(self._episode_ids())
                first = self.positions == 0
                chunk = self.env.chunk_step(actions)  # where no episode runs, no simulator steps
                ended = zip(chunk.final_env_ids, chunk.episodes, strict=True)
                episodes += [(row, episode) for row, episode in ended if first[row]]
                chunks.append(chunk)
                self.void_episodes += episode_ids[-1][chunk.lost_env_ids].tolist()
                lost = chunk.lost_env_ids[self.positions[chunk.lost_env_ids] == 0]
                self.disturbed[self.env.rows_lost_with(lost)] = True
                self.num_begun[chunk.lost_env_ids] += 1
                self.observation = chunk.observation
                if not self.env.auto_reset:
                    alive = alive & ~(chunk.terminated | chunk.truncated)[:count]
            batch = self._batch(chunks, alives, episode_ids, tokens, logprobs)
            batch.episodes = [episode for row, episode in episodes if not self.disturbed[row]]
            if needs_values:
                self._fill_bootstrap(chunks, batch)
                batch.rollout_values = torch.stack(values) if model.predicts_values else None
        if self.collector.offload_envs:
            self.env.offload()
        return batch

    def _episode_ids(self) -> np.ndarray:
        """Number the present episodes uniquely within the iteration, over all ranks, and remember their specs."""
        ids = self.num_begun * self.collector.num_envs + self.env_ids + self.attempt * ATTEMPT_STRIDE
        for number, spec in zip(ids.tolist(), self.env.current_specs(), strict=False):  # idle rows come last
            self.specs.setdefault(number, spec)
        return ids

    def _batch(
        self, chunks: list[ChunkStep], alives: list[np.ndarray], episode_ids: list[np.ndarray],
        tokens: list[Tensor], logprobs: list[Tensor],
    ) -> RolloutBatch:  # fmt: skip
        def stack(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.stack(arrays)[:, : len(self.env_ids)])

        shape = (len(chunks), len(self.env_ids))
        sampler = self.collector.sampler
        ids = stack(episode_ids)
        groups = torch.tensor([sampler.group_of(int(i)) + self.attempt * ATTEMPT_STRIDE for i in self.env_ids])
        return RolloutBatch(
            observation=self.observation,  # replaced by the rows of all lanes
            action_tokens=torch.stack(tokens),
            rollout_logprobs=torch.stack(logprobs),
            action_rewards=stack([chunk.rewards for chunk in chunks]),
            action_mask=stack([chunk.executed for chunk in chunks]),
            loss_mask=stack(alives) & ~torch.isin(ids, torch.tensor(self.void_episodes, dtype=torch.int64)),
            terminated=stack([chunk.terminated for chunk in chunks]),
            truncated=stack([chunk.truncated for chunk in chunks]),
            bootstrap_values=torch.zeros(shape),
            group_ids=groups.expand(shape).contiguous(),
            episode_ids=ids,
            policy_version=torch.full(shape, self.policy_version, dtype=torch.int64),
            specs=self.specs,
        )

    def _fill_bootstrap(self, chunks: list[ChunkStep], batch: RolloutBatch) -> None:
        """Value the true final observation of every truncated episode, and what follows the last chunk."""
        where: list[tuple[int, int]] = []
        observations: list[Observation] = []
        for t, chunk in enumerate(chunks):
            rows = [k for k, env in enumerate(chunk.final_env_ids) if chunk.truncated[env]]
            if rows:
                observations.append(chunk.final_observation.select(rows))
                where += [(t, int(chunk.final_env_ids[k])) for k in rows]
        ended = batch.terminated[-1] | batch.truncated[-1]
        running = torch.nonzero(batch.loss_mask[-1] & ~ended).flatten().tolist()
        if running:
            observations.append(self.observation.select(running))
            where += [(len(chunks) - 1, row) for row in running]
        if not where:
            return
        final = Observation.concatenate(observations)
        block = len(self.env_ids)
        for start in range(0, len(where), block):
            rows = where[start : start + block]
            inputs = self.model.preprocess(final.select(np.arange(start, start + len(rows))))
            values = self.model.predict_values(**inputs).cpu()
            batch.bootstrap_values[[t for t, _ in rows], [row for _, row in rows]] = values


def _spread(values: Tensor, rows: np.ndarray, count: int) -> Tensor:
    """Put ``values`` into the rows ``rows`` of ``count``; the others are 0."""
    if len(rows) == count:
        return values
    spread = values.new_zeros(count, *values.shape[1:])
    spread[rows] = values
    return spread
