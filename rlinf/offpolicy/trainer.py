"""Off-policy reinforcement learning of an actor, on a frozen policy or alone: act, store, update after every few env steps."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import LARGEST_SCALE, OffPolicyConfig
from rlinf.checkpoints.base_store import keep_base
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.checkpoints.trainer_state import read_entries, read_tensors
from rlinf.cluster.factory import env_maker, episode_sampler
from rlinf.data.formats import open_dataset
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import gather_objects, local_world_size, rank, world_size
from rlinf.distributed.sums import rank_range
from rlinf.distributed.transfers import to_device
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, NonFiniteError, RLinfError
from rlinf.evaluation.result import actions_clipped
from rlinf.models.base_weights import tensors_digest
from rlinf.models.embodiment.actor_policy import ActorPolicy, check_bounds, make_actor
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.sampling import standard_normal
from rlinf.offpolicy.controls import note_warmup
from rlinf.offpolicy.corrections import Corrections
from rlinf.offpolicy.envs_of_ranks import CallOutcome, Said, joined
from rlinf.offpolicy.learner import OffPolicyLearner
from rlinf.offpolicy.offline import Offline, take_over_replay
from rlinf.offpolicy.replay import ReplayBuffer
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import TRAINER_FOLDER
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext
from rlinf.types import BaseActions, EpisodeResult, EpisodeSpec, Observation

logger = logging.getLogger("rlinf")

LEARNER, REPLAY, LOOP, OFFLINE = "learner.", "replay.", "loop.", "offline."
"""Beginnings of the names of what a checkpoint keeps."""


def make_offpolicy_trainer(algorithm: type[OffPolicyLearner], parts: TrainerContext) -> OffPolicyTrainer:
    """Make the trainer of an off-policy algorithm, and the envs in which this rank plays."""
    config = parts.config
    env = env_maker(config, local_world_size())(config.rollout.num_envs // world_size(), auto_reset=True)
    folder = cast(OffPolicyConfig, config.algorithm).offline_dataset
    demonstrations = None if folder is None else open_dataset(config.sft, env, folder, outcomes=True)
    sampler = episode_sampler(config, env)
    return OffPolicyTrainer(parts, env, sampler, algorithm, parts.worker.autocast, demonstrations)


class OffPolicyTrainer(ActionTrainer):
    """Improve a frozen policy by an actor that learns from a replay buffer.

    Every iteration starts with fresh episodes, so that a checkpoint need not hold simulators. An episode that still runs at the end of
    an iteration is cut: its last observation is stored, and the critic values it.

    Every rank plays its fraction of the envs and learns of all: what came of a policy call is joined, and then each rank does the same with
    equal numbers. With ``algorithm.overlap``, a thread makes the updates that are owed while the envs play the next policy call, whose
    actions were chosen before. So results do not depend on how fast either is.

    Args:
        env: Where this rank plays, with auto-reset.
        make_learner: Makes the learner of an actor: the class of the algorithm.
        autocast: Makes the context in which the frozen policy computes.
        demonstrations: Dataset of which a fraction of each batch is drawn, if any.
    """

    def __init__(
        self,
        parts: TrainerContext,
        env: VectorEnv,
        sampler: EpisodeSampler,
        make_learner: type[OffPolicyLearner],
        autocast: Callable[[], AbstractContextManager],
        demonstrations: StoredDemonstrations | None = None,
    ) -> None:
        super().__init__(parts)
        self.env, self.sampler, self.autocast = env, sampler, autocast
        self._bounds = torch.from_numpy(env.action_low), torch.from_numpy(env.action_high)
        check_bounds(*self._bounds)  # now, not after the hours of cloning
        self.make_learner, self.demonstrations = make_learner, demonstrations
        self.offline: Offline | None = None
        self.config = cast(OffPolicyConfig, parts.config.algorithm)
        self.owed = 0.0  # updates that env steps have earned and that were not made yet
        self.num_base_calls = 0  # observations of which the frozen policy was asked
        self.largest_return = 0.0  # discounted, in absolute value, from any step of an episode to its end
        self._warned: set[str] = set()
        self._is_noted = False  # what the warm-up has shown
        self._starts_as_base = False  # the actor is new and changes nothing yet
        num_envs = parts.config.rollout.num_envs
        self._own = rank_range(num_envs, rank(), world_size())  # envs of this rank
        self._corrections = Corrections(env.task_names)
        self._seen: Observation  # by the envs of this rank, at present
        self._proposal: BaseActions | None = None  # what the frozen policy says of that
        self._updating = ThreadPoolExecutor(1, "update") if self.config.overlap else None
        self.policy: ActorPolicy
        self.learner: OffPolicyLearner
        self.replay: ReplayBuffer

    def begin(self) -> None:
        """Start with a new actor or the one of the checkpoint, and evaluate it."""
        loop = self.loop
        self.worker.end_phase()
        self.make_parts(self.worker.model)
        self.sync = WeightPush(self.policy, self.policy)
        super().begin()
        self.sync.push(loop.state.policy_version)

    @property
    def model(self) -> ActorPolicy:
        """The policy with its actor, which is evaluated and saved."""
        return self.policy

    @property
    def optimizer(self) -> None:
        """None: ``state_dict`` has all that learns."""
        return None

    def rollout_workers(self) -> str:
        """Return in words who plays the envs of a rank."""
        return "the thread that updates" if self._updating is None else "a thread next to the one that updates"

    def close(self) -> None:
        """Wait for the updates that are under way, and close the env."""
        if self._updating is not None:
            self._updating.shutdown(cancel_futures=True)
        self.env.close()

    def make_parts(self, model: ActionModel) -> None:
        """Make actor, learner and buffer, or restore them from the checkpoint."""
        loop, run = self.loop, self.parts.config
        config, seed, rollout = self.config, run.seed, run.rollout
        if isinstance(model, ActorPolicy):
            self.policy = model
        else:
            with torch.random.fork_rng(devices=[]):
                # The tag is part of every published seed, so it outlives the name that actors had.
                torch.manual_seed(derive_seed(seed, "head"))
                actor = make_actor(config.actor, model.feature_dim, model, self.make_learner.noise_std(config))
            self.policy = ActorPolicy(model, actor, *self._bounds)
            self._starts_as_base = actor.starts_as_base
        self.policy.eval()
        keep_base(self.policy, loop.folder, loop.resumed_from if loop.state.step > 0 else None)
        actor = self.policy.actor
        self.learner = self.make_learner(config, actor, seed)
        if self.policy.critics is not None:  # of a policy whose actor chooses by them
            self.learner.begin_with(self.policy.critics)
        self.policy.critics = self.learner.critics if actor.critics_choose else None
        self.replay = ReplayBuffer(
            config.replay_capacity,
            rollout.num_envs,
            feature_dim=actor.feature_dim,
            num_candidates=actor.num_candidates,
            base_dim=actor.base_dim,
            output_dim=actor.output_dim,
            chunk_len=self.policy.action_chunks_len,
            seed=derive_seed(seed, "replay"),
            feature_dtype=self.policy.base.feature_dtype,
        )
        if self.policy.base_sha256 is None:
            self.policy.base_sha256 = tensors_digest(self.policy.base.state_dict())
        if self.demonstrations is not None:
            self._take(self.demonstrations)
        if loop.state.step > 0:
            self._load()
        elif config.replay_from is not None:
            folder = resolve_checkpoint(config.replay_from)
            manifest = build_manifest(run, self.policy, policy_version=0)
            more = take_over_replay(folder, self.replay, self.policy, manifest, REPLAY, [f"{LOOP}largest_return"])
            self.largest_return = max(self.largest_return, float(more[f"{LOOP}largest_return"]))
            loop.progress.note(f"the buffer starts with {self.replay.num_transitions} transitions of {folder}")

    def _take(self, dataset: StoredDemonstrations) -> None:
        """Ask the frozen policy about demonstrations, unless its answers are on disk."""
        self.offline = Offline(self.parts, dataset, self.policy, self.autocast)
        self.demonstrations = None  # of which only its images would still be held
        self.loop.progress.note(str(self.offline.data))
        for one in self.offline.data.episodes:
            largest = largest_value(one.rewards.tolist(), self.config.gamma, is_cut=not one.terminated)
            self.largest_return = max(self.largest_return, largest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return learner, replay buffer and counters."""
        loop = {
            "owed": torch.tensor(self.owed, dtype=torch.float64),
            "num_base_calls": torch.tensor(self.num_base_calls),
            "largest_return": torch.tensor(self.largest_return, dtype=torch.float64),
            "is_noted": torch.tensor(self._is_noted),
            "starts_as_base": torch.tensor(self._starts_as_base),
        }
        parts = {LEARNER: self.learner.state_dict(), REPLAY: self.replay.state_dict(), LOOP: loop}
        parts |= {} if self.offline is None else {OFFLINE: self.offline.state_dict()}
        return {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}

    def _load(self) -> None:
        """Read what ``state_dict`` returned from the checkpoint that is resumed."""
        folder = self.loop.resumed_from / TRAINER_FOLDER
        held = {}
        for name, entry in read_entries(folder).items():
            if name.startswith(REPLAY):  # into the buffer itself: twice it might not fit into memory
                held[name] = self.replay.room_for(name.removeprefix(REPLAY), entry.size, entry.properties.dtype)
            elif name.startswith((LEARNER, LOOP, OFFLINE)):
                held[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_tensors(folder, held)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}

        if self.offline is not None:
            self.offline.load_state_dict(part(OFFLINE), folder.parent)
        try:
            self.replay.load_state_dict(part(REPLAY))
            self.learner.load_state_dict(part(LEARNER))
            loop = part(LOOP)
            self.owed, self.num_base_calls = float(loop["owed"]), int(loop["num_base_calls"])
            self.largest_return = float(loop["largest_return"])
            self._is_noted = bool(loop.get("is_noted", False))  # older checkpoints do not tell
            self._starts_as_base = bool(loop.get("starts_as_base", False))
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} does not hold what algorithm.name={self.config.name} with these settings continues with: {error}. Use the "
                "algorithm section of its config.yaml, or start a new run with its policy: "
                f"init_from={folder.parent} resume=null output_dir=<a new folder>"
            ) from error

    def iteration(self, step: int) -> dict[str, float]:
        """Play ``rollout.num_chunks`` policy calls of each env, and update in between; return metrics."""
        state, clock, num_calls = self.loop.state, Clock(), self.parts.config.rollout.num_chunks
        self.learner.decay(self.decayed(step))
        before, updates, staleness = state.env_steps, _Means(), 0
        if not self._is_noted and before >= self.config.learning_starts:
            self._is_noted = True
            note_warmup(self.parts, self._starts_as_base)
        episodes = _Episodes(self.parts.config.rollout.num_envs, self.config.gamma)
        self._corrections = Corrections(self.env.task_names)
        said = self._begin_episodes(step)
        shape = (num_calls, self.parts.config.rollout.num_envs, self.policy.actor.noise_dim)
        for call, uniforms in enumerate(self._draw(*shape, purpose=("actions", step))):
            self._observe(said)
            clock.lap("rollout")
            if self._updating is None:
                self._update(updates)
                clock.lap("update")
            actions, greedy = self._decide(said, uniforms, episodes)
            played = self.learner.num_updates
            under_way = None if self._updating is None else self._updating.submit(self._update, updates)
            outcome = self._play(step, call, actions, greedy, is_last=call + 1 == num_calls)
            clock.lap("rollout")
            if under_way is not None:
                under_way.result()
                clock.lap("update")
                staleness = max(staleness, self.learner.num_updates - played)
            self._store(actions, outcome, episodes)
            said = outcome.following
        self._observe(said)  # what follows the last actions, valued like any other
        clock.lap("rollout")
        self._update(updates)
        clock.lap("update")
        self.learner.check_finite()
        self._check_equal_on_ranks()
        self.largest_return = max(self.largest_return, episodes.largest_return)
        metrics = episodes.metrics() | {f"train/{name}": value for name, value in updates.means().items()}
        metrics |= self._corrections.metrics()
        metrics |= {
            "rollout/env_steps_total": state.env_steps,
            "rollout/base_policy_queries": self.num_base_calls,
            "rollout/transitions": self.replay.num_transitions,
            "rollout/staleness_updates": staleness,
            "train/updates_total": self.learner.num_updates,
            "throughput/env_steps_per_s": (state.env_steps - before) / clock.total(),
        }
        metrics |= {} if self.offline is None else self.offline.metrics()
        if self.policy.actor.is_standalone:
            metrics.pop(
                "train/action_saturation", None
            )  # its numbers are actions, at the bounds of the env: no scale cuts them
        if rank() == 0:
            self._warn(metrics)
        return metrics | clock.metrics()

    def _check_equal_on_ranks(self) -> None:
        """Raise RLinfError on all ranks unless they have equal actors: they have all made the same updates."""
        weights = torch.cat([parameter.detach().flatten().cpu() for parameter in self.policy.actor.parameters()])
        if len(set(gather_objects(zlib.crc32(weights.numpy().tobytes())))) > 1:
            raise RLinfError(
                "The actors of the ranks are no longer equal: the same updates have other roundings on other processors. Use machines "
                "or GPUs of one kind, or set cluster.num_processes=1"
            )

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Warn once of critics that diverge, and of an actor that is at its bound."""
        buffers = [self.replay] if self.offline is None else [self.replay, self.offline.data.replay]
        expected = metrics.get("train/q_mean", 0.0)
        possible = max(largest_return(buffer, self.config.gamma) for buffer in buffers)
        possible = min(possible, self.largest_return or math.inf)  # a reward that is paid once allows much less
        if abs(expected) > 2 * possible > 0:
            self._warn_once(
                "train/q_mean",
                f"the critics expect {expected:.3g} on average (train/q_mean), and episodes so far allow {possible:.3g} at most: they "
                "diverge. Set algorithm.learning_rate or algorithm.utd_ratio to less",
            )
        share, actor = metrics.get("train/action_saturation", 0.0), self.config.actor
        if share > 0.5 and actor.scale < LARGEST_SCALE:
            self._warn_once(
                "train/action_saturation",
                f"{share:.0%} of the numbers of the actor are at their bound (train/action_saturation): corrections cannot become larger. "
                f"Set algorithm.actor.scale={min(LARGEST_SCALE, 2 * actor.scale):g}",
            )

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            logger.warning("%s", text)
            self._warned.add(name)

    def _begin_episodes(self, step: int) -> Said:
        """Start the first episode of each env in this iteration."""
        first, positions = self._own.start, np.zeros(len(self._own), dtype=np.int64)

        def following(row: int) -> EpisodeSpec:
            positions[row] += 1
            return begun(row)

        def begun(row: int) -> EpisodeSpec:
            spec = self.sampler.spec(step, first + row, int(positions[row]))
            self._corrections.begin(row, spec.task_id)
            return spec

        specs = [begun(row) for row in range(len(self._own))]
        self._seen = self.env.reset(options={"episodes": specs, "next_episode": following})[0]
        rows = np.arange(len(specs))
        self._proposal = self._propose(self._seen, rows, "candidates", step, 0)
        return joined(gather_objects(self._said(rows, self._proposal)))

    def _draw(self, *shape: int, purpose: tuple[str | int, ...]) -> Tensor:
        """Draw float32 numbers in (0, 1), the same on all ranks."""
        generator = torch.Generator().manual_seed(derive_seed(self.parts.config.seed, *purpose))
        return torch.rand(shape, generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)

    def _propose(self, observation: Observation, rows: np.ndarray, *purpose: str | int) -> BaseActions | None:
        """Ask the frozen policy, once, about observations of this rank's envs ``rows``; None without any.

        ``purpose`` names the random numbers of its candidates.
        """
        if not len(rows):
            return None
        shape = (self.parts.config.rollout.num_envs, self.policy.num_base_uniforms)
        uniforms = self._draw(*shape, purpose=purpose)[self._own.start + rows].to(self.policy.device)
        with self.autocast():
            return self.policy.query_base(self.policy.preprocess(observation), uniforms)

    def _said(self, rows: np.ndarray, proposal: BaseActions | None) -> Said:
        """Return what other ranks are told of a proposal for this rank's envs ``rows``."""
        policy, envs = self.policy, torch.from_numpy(self._own.start + rows)
        if proposal is None:
            chunks = torch.empty(0, policy.actor.num_candidates, policy.action_chunks_len, policy.action_dim)
            return Said(envs, torch.empty(0, policy.actor.feature_dim, dtype=policy.base.feature_dtype), chunks)
        features = proposal.features.cpu()
        if not bool(features.isfinite().all()):
            rows_of = (~features.isfinite().all(1)).sum()
            raise NonFiniteError(
                f"The frozen policy gives features that are not finite for {rows_of} of {len(rows)} observations "
                f"(model.features={self.parts.config.model.features}, model.precision={self.parts.config.model.precision}). "
                "Set model.precision=fp32, or look at its weights with `rlinf diagnose`"
            )
        return Said(envs, features, proposal.chunks.cpu())

    def _observe(self, said: Said) -> None:
        """Store observations. Those of an episode that was cut are followed by no action."""
        if len(said.envs):
            self.num_base_calls += len(said.envs)
            self.replay.observe(said.envs, said.features, self.policy.base_inputs(said.chunks.to(self.policy.device)))

    def _is_warm_up(self) -> bool:
        return self.loop.state.env_steps < self.config.learning_starts

    @torch.no_grad()
    def _decide(self, said: Said, uniforms: Tensor, episodes: _Episodes) -> tuple[Tensor, Tensor]:
        """Return the actions ``[B, A]`` of all envs, in halves of the range of the env, and those without noise."""
        device, actor = self.policy.device, self.policy.actor
        features, uniforms = to_device(said.features, device), to_device(uniforms, device)
        base = self.policy.base_inputs(to_device(said.chunks, device))
        greedy, _ = self.policy.select_action(features, base, None)
        if self._is_warm_up():
            actions = actor.compose(base, 2 * uniforms[:, : actor.output_dim] - 1)
        else:
            actions, chosen = self.policy.select_action(features, base, standard_normal(uniforms))
            episodes.add_choices(chosen, base.shape[1] if actor.critics_choose else 0)
        if episodes.values is None:
            episodes.values = self.learner.values(actor.encoder(features), base, actions).cpu().numpy()
        return actions, greedy

    @deadline("rollout")
    def _play(self, step: int, call: int, actions: Tensor, greedy: Tensor, is_last: bool) -> CallOutcome:
        """Act in the envs of this rank, and ask about what they show then; return what came of it in the envs of all ranks.

        After the last policy call of an iteration, only episodes that continue are asked about.
        """
        own = slice(self._own.start, self._own.stop)
        with self.autocast():  # an actor that steers lets the frozen policy continue
            executed = self.policy.env_actions(self._proposal, actions[own])
        self._note_corrections(executed, greedy[own])
        self._proposal = None  # and with it what the policy computed of the images, before it sees the next ones
        chunk = self.env.chunk_step(executed.cpu().numpy())
        self._seen, rows = chunk.observation, np.arange(len(self._own))
        if is_last:
            rows = np.setdiff1d(rows, [*chunk.final_env_ids, *chunk.lost_env_ids])
            self._seen = self._seen.select(rows)
        self._proposal = self._propose(self._seen, rows, "candidates", step, call + 1)
        cut, envs, last = chunk.truncated[chunk.final_env_ids], self._own.start, None
        if cut.any():
            seen = chunk.final_observation.select(np.flatnonzero(cut))
            last = self._propose(seen, chunk.final_env_ids[cut], "last candidates", step, call)
        outcome = CallOutcome(
            chunk.rewards, chunk.executed, chunk.terminated, chunk.final_env_ids + envs, cut, chunk.episodes,
            chunk.lost_env_ids + envs, self._said(chunk.final_env_ids[cut], last), self._said(rows, self._proposal),
        )  # fmt: skip
        return joined(gather_objects(outcome))

    def _note_corrections(self, executed: Tensor, greedy: Tensor) -> None:
        """Note what the actor changes in the envs of this rank: without its noise, unless the policy would have to sample again."""
        if self._is_warm_up() or not self.policy.actor.base_dim:
            return
        base = self.policy.normalize(self._proposal.chunks)[:, 0]
        changed = self.policy.normalize(executed.unsqueeze(1))[:, 0] if self.policy.actor.sets_noise else greedy
        self._corrections.add(base, changed)

    def _store(self, actions: Tensor, outcome: CallOutcome, episodes: _Episodes) -> None:
        """Store actions and their outcome."""
        state, is_warm_up = self.loop.state, self._is_warm_up()
        kept = np.setdiff1d(np.arange(len(actions)), outcome.lost)
        self.replay.act(
            torch.from_numpy(kept), actions[kept], torch.from_numpy(outcome.rewards[kept]),
            torch.from_numpy(outcome.executed[kept]), torch.from_numpy(outcome.terminated[kept]),
        )  # fmt: skip
        self._observe(outcome.last)
        num_steps = int(outcome.executed.sum())
        if not is_warm_up:
            self.owed += self.config.utd_ratio * num_steps
        state.env_steps += num_steps
        episodes.add(outcome)

    def _update(self, updates: _Means) -> None:
        """Make the updates that are owed."""
        num_offline = self.config.num_offline_rows
        while self.owed >= 1.0:
            batch = self.replay.sample(self.config.batch_size - num_offline, self.config.gamma, self.config.n_step)
            if self.offline is not None:
                batch = self.offline.join(batch)
            updates.add(self.learner.update(batch, num_offline))
            self.owed -= 1.0
            self.loop.state.policy_version += 1


def largest_return(replay: ReplayBuffer, gamma: float) -> float:
    """Return what an episode without an end could reach if each step had the largest |reward| of the buffer."""
    largest = float(replay.rewards.abs().max())
    return largest / (1 - gamma) if gamma < 1 else math.inf


def largest_value(rewards: Sequence[float], gamma: float, is_cut: bool) -> float:
    """Return the largest ``|sum g^k r_k|`` from any step of an episode on.

    One that was cut counts as if it were repeated for ever, because the critics value what would follow.
    """
    whole = sum(gamma**step * reward for step, reward in enumerate(rewards))
    weight = 1 - gamma ** len(rewards)
    value = 0.0 if not is_cut or whole == 0 else whole / weight if weight > 0 else math.inf
    largest = abs(value)
    for reward in reversed(rewards):
        value = reward + gamma * value
        largest = max(largest, abs(value))
    return largest


class _Means:
    """Means of the metrics of updates, each over the updates that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (torch.zeros(()), 0))
            self._sums[name] = (total + value.cpu(), count + 1)

    def means(self) -> dict[str, float]:
        return {name: float(total) / count for name, (total, count) in self._sums.items()}


class _Episodes:
    """The first episode of each env of an iteration: later ones, mostly quick successes, would flatter."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma, self.results = gamma, list[EpisodeResult]()
        self.calibration = list[tuple[float, float]]()  # value of the first action, discounted return
        self._first = np.ones(num_envs, dtype=bool)  # the first episode still runs
        self.values: np.ndarray | None = None  # of the first actions
        self._returns, self._powers = np.zeros(num_envs), np.ones(num_envs)
        self.num_lost = 0
        self.largest_return = 0.0  # of all episodes that ended, as ``largest_value`` counts it
        self._rewards: list[list[float]] = [
            [] for _ in range(num_envs)
        ]  # of the executed env steps of the present episodes
        self._choices: list[Tensor] = []  # bool: a chunk of the frozen policy was chosen as it is

    def add_choices(self, chosen: Tensor, num_candidates: int) -> None:
        """Add which options were chosen, of which the frozen policy gives the first ``num_candidates``."""
        if num_candidates:
            self._choices.append(chosen < num_candidates)

    def add(self, outcome: CallOutcome) -> None:
        """Add what came of a policy call."""
        rewards, executed, ended, lost = outcome.rewards, outcome.executed, outcome.ended, outcome.lost
        for column in range(rewards.shape[1]):
            self._returns += self._powers * rewards[:, column]
            self._powers *= np.where(executed[:, column], self.gamma, 1.0)
        for row, done in enumerate(executed):
            self._rewards[row] += rewards[row, done].tolist()
        for row, is_cut in zip(ended, outcome.cut, strict=True):
            self.largest_return = max(self.largest_return, largest_value(self._rewards[row], self.gamma, is_cut))
        for row in (*ended, *lost):
            self._rewards[row] = []
        self.num_lost += len(lost)
        self._first[lost] = False
        for row, episode in zip(ended, outcome.episodes, strict=True):
            if self._first[row]:
                self.results.append(episode)
                self.calibration.append((float(self.values[row]), float(self._returns[row])))
        self._first[ended] = False

    def metrics(self) -> dict[str, float]:
        """Return success, return and length, and what the critic expected of the first actions."""
        metrics: dict[str, float] = {"rollout/num_episodes": len(self.results), "rollout/lost_episodes": self.num_lost}
        if self.results:
            rows = [(one.success, one.episode_return, one.num_env_steps) for one in self.results]
            names = ("rollout/success_rate", "rollout/return_mean", "rollout/episode_len")
            metrics |= dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
            told = [one.true_success for one in self.results if one.true_success is not None]
            metrics |= {"rollout/true_success_rate": float(np.mean(told))} if told else {}
            of_bounds = ("rollout/actions_clipped_fraction", "rollout/actions_max_abs")
            of_actions = zip(of_bounds, actions_clipped(self.results), strict=True)
            metrics |= {name: value for name, value in of_actions if value is not None}
            expected, reached = np.mean(self.calibration, axis=0).tolist()
            metrics |= {"train/q_initial": expected, "train/return_initial": reached}
        if self._choices:
            metrics["rollout/base_action_fraction"] = torch.cat(self._choices).float().mean().item()
        return metrics
