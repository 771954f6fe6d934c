"""Reinforcement learning. Every rank runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.running_moments import CLIP, RunningMoments, discounted_sums
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.cluster.rollouts import make_collector
from rlinf.distributed import deadlines
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.deferred import open_tensors
from rlinf.distributed.process_group import gather_objects, rank
from rlinf.distributed.sums import maximum, sum_counts, sum_env_groups
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, ConfigError, RLinfError
from rlinf.optim.reference import Reference
from rlinf.optim.schedule import learning_rate
from rlinf.preflight.derived import parity_gate
from rlinf.rollout.collector import Collector
from rlinf.rollout.parity import EXCEEDED, importance_ratios
from rlinf.run_folder import REFERENCE_FILE
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext
from rlinf.training.minibatches import MinibatchPlan
from rlinf.training.state import RolloutAhead
from rlinf.training.train_worker import rl_trainer_config
from rlinf.types import RolloutBatch


@dataclass
class _PendingRollout:
    """A rollout that was asked for.

    Attributes:
        ahead: What a checkpoint keeps of it.
        weights: Those that play it, if the present ones may differ when it is taken.
        handle: For ``Collector.take``.
        since: When it was asked for.
    """

    ahead: RolloutAhead
    weights: Reference | None
    handle: Any
    since: float


def make_rl_trainer(
    algorithm: type[Algorithm], parts: TrainerContext, env: VectorEnv, workers: RolloutWorkers | None
) -> RLTrainer:
    """Make the trainer of a policy-gradient algorithm; ``env`` has the run's settings."""
    config = parts.config
    collector = make_collector(config, env, parts.sync.rollout_model, parts.worker.autocast, workers)
    return RLTrainer(parts, collector, algorithm(cast(AlgorithmConfig, config.algorithm)))


class RLTrainer(ActionTrainer):
    """Improve a policy by its own rollouts.

    With ``cluster.max_staleness = s``, the rollout of an iteration is played with the weights of ``s`` iterations before, while the
    policy is updated: it is submitted before the update of iteration ``step - s``. So each rollout is trained on once, and never later than
    ``s`` iterations after its weights. At the start, the first ``s + 1`` of them are played with the first weights.

    Args:
        parts: Of the run.
        collector: Plays the policy.
        algorithm: Turns rollouts into losses.
    """

    collector: Collector

    def __init__(self, parts: TrainerContext, collector: Collector, algorithm: Algorithm) -> None:
        super().__init__(parts, collector)
        self.algorithm = algorithm
        self.gate = parity_gate(parts.config)
        self.return_moments = RunningMoments(1) if algorithm.config.scale_rewards else None
        self.reference: Reference | None = None
        self._pending: dict[int, _PendingRollout] = {}
        self._updated = False  # the policy, since the last rollout was submitted

    def begin(self) -> None:
        """Start RL with an optimiser of its own, or continue with it, after an evaluation of the policy before it."""
        loop, state, trainer = self.loop, self.loop.state, self.parts.config.trainer
        if state.phase != "rl":
            state.phase = "rl"
            self.worker.start_phase(rl_trainer_config(trainer, state.rollbacks))
        self._resubmit()  # before anything is saved, because a checkpoint has the rollouts under way
        if self.return_moments is not None:
            loop.restore(self._reward_scale())
        if trainer.on_collapse == "rollback" and state.checkpoint_name == state.start:
            state.start_saved = True  # to go back to, if nothing is ever better
            loop.save()
        super().begin()
        self.sync.push(state.policy_version)
        self.reference = self._make_reference()

    def _make_reference(self) -> Reference | None:
        """Keep the weights with which RL started, for the KL penalty, on disk too for a resumed run (a collective call)."""
        loop = self.loop
        if not self.algorithm.needs_reference:
            return None
        reference = Reference(self.worker.model)
        run_folder = loop.folder if loop.resumed_from is None else loop.resumed_from.parent.parent
        if loop.state.step > 0:
            path = run_folder / REFERENCE_FILE
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, which a run writes that starts RL with a KL penalty. Copy it from that run's folder, or "
                    "set algorithm.kl_coef=0"
                )
            reference.load(open_tensors([path]))
        if loop.state.step == 0 or run_folder.resolve() != loop.folder.resolve():
            tensors = reference.tensors()
            if rank() == 0:
                partial = loop.folder / f".{REFERENCE_FILE}.tmp"
                save_file(tensors, partial)
                os.replace(partial, loop.folder / REFERENCE_FILE)
        return reference

    def iteration(self, step: int) -> dict[str, float]:
        """One iteration of reinforcement learning; returns its metrics."""
        config, state, algorithm = self.parts.config, self.loop.state, self.algorithm
        clock, env_steps_before = Clock(), state.env_steps
        self.worker.train_step.decay = self.decayed(step)
        algorithm.clip_fraction = learning_rate(step, self.num_steps, decay=algorithm.config.clip_decay)
        self._submit_until(step, step)
        clock.lap("sync")
        batch = self._collect(step)
        self._resample(batch, step)
        clock.lap("rollout")
        self._submit_until(step + config.cluster.max_staleness, step)
        clock.lap("sync")
        self._score(batch)
        metrics = self._check(batch, step)
        clock.lap("logprob")
        metrics |= rollout_metrics(batch)
        if (span := self.worker.model.state_range) is not None and batch.observation.state is not None:
            valid = batch.loss_mask.flatten().numpy()
            num_far, num_rows = sum_counts(int(span.far(batch.observation.state)[valid].sum()), int(valid.sum()))
            metrics["rollout/states_far_fraction"] = num_far / max(1, num_rows)
        metrics |= self._scale_rewards(batch)
        read = batch.loss_mask.clone()
        metrics |= check_equal_on_ranks(algorithm.compute_advantages(batch))
        flat, seed = batch.flatten(), derive_seed(config.seed, "minibatches", step)
        plan = MinibatchPlan(batch.loss_mask, self.collector.env_groups, config.trainer.minibatch_size, seed)
        updates: list[dict[str, float]] = []
        for epoch in range(algorithm.config.update_epochs):
            for minibatch in plan.epoch(epoch):
                updates.append(self.worker.update(flat, minibatch, algorithm, step))
                if len(updates) == 1:
                    self.gate.check_first_update(updates[0], step)
        self._count_states(batch, read, len(updates))
        state.policy_version += len(updates)
        self._updated |= bool(updates) and not algorithm.policy_is_frozen(step)
        clock.lap("update")
        metrics["rollout/env_steps_total"] = state.env_steps
        metrics["throughput/env_steps_per_s"] = (state.env_steps - env_steps_before) / clock.total()
        metrics["throughput/samples_per_s"] = plan.num_rows * algorithm.config.update_epochs / clock.seconds["update"]
        for name in updates[0] if updates else ():
            metrics[f"train/{name}"] = sum(update[name] for update in updates) / len(updates)
        return metrics | clock.metrics()

    def _submit_until(self, last: int, step: int) -> None:
        """Ask, in iteration ``step``, for the rollouts up to ``last`` that were not asked for, to be played with the present weights."""
        last = min(last, self.num_steps - 1)
        for each in range(max(self._pending, default=step - 1) + 1, last + 1):
            weights = None if each == step else Reference(self.worker.model)
            ahead = RolloutAhead(each, self.loop.state.policy_version, step, self._updated)
            self.sync.push(ahead.policy_version)
            self._pending[each] = _PendingRollout(ahead, weights, self._submit(ahead), time.monotonic())
            self._updated = False

    def _submit(self, ahead: RolloutAhead, attempt: int = 0, env_groups: Sequence[int] | None = None) -> Any:
        """Ask for a rollout, or for some env groups of it again, with the weights that were pushed last."""
        policy, needs_values = self.sync.rollout_policy, self.algorithm.needs_values
        return self.collector.submit(policy, ahead.step, ahead.policy_version, needs_values, attempt, env_groups)

    def _resubmit(self) -> None:
        """Ask again for the rollouts that were under way when the checkpoint that is resumed was written, with their weights."""
        resumed_from, staleness = self.loop.resumed_from, self.parts.config.cluster.max_staleness
        found = [RolloutAhead(**each) for each in self.loop.state.rollouts_ahead]
        if resumed_from is None or any(each.lag > staleness for each in found):
            return  # resumed with a smaller max_staleness: they are played with the present weights instead
        for ahead in found:
            weights = Reference(self.worker.model)
            self.loop.restore({f"{ahead.name}.{name}": part for name, part in weights.parts().items()})
            with weights.in_place():
                self.sync.push(ahead.policy_version)
                self._pending[ahead.step] = _PendingRollout(ahead, weights, self._submit(ahead), time.monotonic())

    def state_dict(self) -> dict[str, Tensor]:
        """Note the rollouts that are under way in the loop's state; return the weights that play them, and the scale of rewards."""
        self.loop.state.rollouts_ahead = [asdict(each.ahead) for each in self._pending.values()]
        return self._reward_scale() | {
            f"{each.ahead.name}.{name}": part
            for each in self._pending.values()
            if each.weights is not None
            for name, part in each.weights.parts().items()
        }

    def _reward_scale(self) -> dict[str, Tensor]:
        """Return the statistics of returns, by which rewards are scaled, under their names in a checkpoint."""
        found = {} if self.return_moments is None else self.return_moments.state_dict()
        return {f"return_moments.{name}": tensor for name, tensor in found.items()}

    def _scale_rewards(self, batch: RolloutBatch) -> dict[str, float]:
        """Divide the rewards of a rollout by one number, under ``algorithm.scale_rewards`` (a collective call).

        It is the deviation of the running discounted return over all rollouts, this one included (Engstrom et al. 2020, section 3).
        One number for all keeps equal returns equal. Returns start at 0 in each rollout, also where episodes continue
        (``rollout.continue_episodes``): their rewards so far are not kept.
        """
        if self.return_moments is None:
            return {}
        sums = discounted_sums(batch.rewards, batch.episode_ids, self.algorithm.discount)
        self.return_moments.update(sums.unsqueeze(-1), batch.loss_mask)
        scale = float(self.return_moments.std)
        batch.action_rewards = (batch.action_rewards / scale).clamp(-CLIP, CLIP)
        return {"train/reward_scale": scale}

    def _count_states(self, batch: RolloutBatch, read: Tensor, num_updates: int) -> None:
        """Count the states of a rollout in the policy's statistics, if it has any (a collective call).

        It follows the updates, so a rollout is scored and learnt from with the statistics with which it was played. ``read`` is the
        ``loss_mask`` before the algorithm has dropped samples. Without an update the weights keep their version, and the policy must, too.
        """
        moments = self.model.input_moments
        if moments is not None and num_updates:
            moments.update(torch.from_numpy(batch.observation.state).unflatten(0, read.shape), read)
            self._updated = True

    @deadline("rollout")
    def _collect(self, step: int, attempt: int = 0, env_groups: Sequence[int] | None = None) -> RolloutBatch | None:
        """Take the rollout of this rank's env groups, or play some of them again (None without any). Count its env steps."""
        state, pending, batch = self.loop.state, self._pending[step], None
        handle, version = pending.handle, pending.ahead.policy_version
        if env_groups is not None:
            with nullcontext() if pending.weights is None else pending.weights.in_place():
                if self.sync.version != version:  # on all ranks
                    self.sync.push(version)
                handle = self._submit(pending.ahead, attempt, env_groups) if env_groups else None
        if handle is not None:
            batch = self.collector.result(handle)
            self.sync.rest()
            played = batch.policy_version.unique().tolist()
            if played != [version]:
                raise RLinfError(
                    f"The rollout of step {step} was played by weights {played}; required: weights {version}"
                )
        state.env_steps += sum_counts(0 if batch is None else int(batch.action_mask.sum()))[0]
        if env_groups is None:
            deadlines.clock.add_rollout(time.monotonic() - pending.since)
        return batch

    def _resample(self, batch: RolloutBatch, step: int) -> None:
        """Play groups that teach nothing again, until every group teaches something or ``max_resamples`` is reached (dynamic sampling)."""
        for attempt in range(1, 1 + self.algorithm.max_resamples):
            uninformative = self.algorithm.uninformative_envs(batch).tensor_split(len(self.collector.env_groups))
            env_groups = [
                env_group
                for env_group, envs in zip(self.collector.env_groups, uninformative, strict=True)
                if envs.any()
            ]
            if sum_counts(len(env_groups)) == (0,):
                break
            self._replace(batch, env_groups, step, attempt)

    def _replace(self, batch: RolloutBatch, env_groups: Sequence[int], step: int, attempt: int) -> None:
        """Play some env groups of a rollout again, from other initial states, and keep those that now teach something."""
        more = self._collect(step, attempt, env_groups)
        if more is None:
            return
        num_envs, first = len(batch.group_ids[0]) // len(self.collector.env_groups), self.collector.env_groups.start
        columns = torch.cat([torch.arange(num_envs) + (env_group - first) * num_envs for env_group in env_groups])
        replace_envs(batch, columns, more, ~self.algorithm.uninformative_envs(more))

    def _score(self, batch: RolloutBatch) -> None:
        """Fill in log-probabilities and values before the update; with a KL penalty also the log-probabilities of the reference.

        Under ``algorithm.old_logprobs=rollout`` they are the rollout's, which ``_check`` compares with a sample of the trainer's.
        """
        if self.algorithm.config.old_logprobs == "rollout":
            batch.old_logprobs, batch.values = self._rollout_numbers(batch)
        else:
            batch.old_logprobs, batch.values = self.worker.evaluate(batch)
        if self.algorithm.needs_reference:
            with self.reference.in_place():
                batch.ref_logprobs, _ = self.worker.evaluate(batch)

    def _rollout_numbers(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Return the rollout's log-probabilities and values as ``TrainWorker.evaluate`` returns the trainer's."""
        values = batch.rollout_values
        if values is None and self.algorithm.needs_values:
            raise ConfigError(
                "algorithm.old_logprobs=rollout, and the rollout has no values; required: a policy that predicts them. "
                "Set algorithm.old_logprobs=trainer"
            )
        values = torch.zeros(batch.loss_mask.shape) if values is None else values
        valid = batch.loss_mask
        return torch.where(valid.unsqueeze(-1), batch.rollout_logprobs, 0.0), torch.where(valid, values, 0.0)

    def _scored_sample(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Return a rollout of one policy call of each env, other ones at each step, with the trainer's numbers of them."""
        env_groups = self.collector.env_groups
        first_env = env_groups.start * (batch.loss_mask.shape[1] // len(env_groups))
        sampled = one_call_of_each_env(batch, step + first_env)
        sampled.old_logprobs, sampled.values = self.worker.evaluate(sampled)
        return sampled

    def _check_sample(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Compare rollout and trainer in one policy call of each env. If they differ and the run continues, score the whole rollout."""
        sampled = self._scored_sample(batch, step)
        metrics = self.gate.check(sampled, step)
        num_scored, num_valid = sum_counts(int(sampled.loss_mask.sum()), int(batch.loss_mask.sum()))
        if metrics[EXCEEDED]:
            batch.old_logprobs, batch.values = self.worker.evaluate(batch)
            num_scored = num_valid
        return metrics | {"rollout/scored_fraction": num_scored / max(1, num_valid)}

    def _check(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Compare rollout and trainer at the weights that have played, and say how old these are.

        Where they have changed meanwhile, the trainer scores one call of each env with them.
        """
        pending, version = self._pending.pop(step), self.loop.state.policy_version
        played = pending.ahead.policy_version
        if pending.ahead.updated:
            self.gate.policy_was_updated()
        if self.algorithm.config.old_logprobs == "rollout":
            metrics = self._check_sample(batch, step)
        elif pending.weights is None or played == version:
            metrics = self.gate.check(batch, step)
        else:
            with pending.weights.in_place():
                sampled = self._scored_sample(batch, step)
            metrics = self.gate.check(sampled, step) | importance_ratios(batch)
        metrics["rollout/staleness_iterations"] = pending.ahead.lag
        return metrics | {"rollout/staleness_updates": version - played}


def one_call_of_each_env(batch: RolloutBatch, number: int) -> RolloutBatch:
    """Return a time-major rollout in which ``loss_mask`` is true for one valid policy call of each env that has any.

    Of the ``V`` valid calls of env ``b`` it is number ``(number + b) mod V``.
    """
    valid = batch.loss_mask
    count = valid.sum(0)
    wanted = (number + torch.arange(len(count))) % count.clamp_min(1)
    return replace(batch, loss_mask=valid & (valid.cumsum(0) == wanted + 1))


def replace_envs(batch: RolloutBatch, envs: Tensor, more: RolloutBatch, wanted: Tensor) -> None:
    """Write the columns of ``more`` that are ``wanted`` over the columns ``envs`` of ``batch`` (time-major).

    Args:
        batch: ``B`` columns.
        envs: int64 ``[K]``, columns of ``batch``.
        more: ``K`` columns, each the env of ``envs`` again.
        wanted: bool ``[K]``, in whole groups.
    """
    num_chunks, sources, targets = len(batch.loss_mask), torch.nonzero(wanted).flatten(), envs[wanted]
    for name, tensor in batch.tensors().items():
        tensor[:, targets] = more.tensors()[name][:, sources]
    seen, new = batch.observation, more.observation
    arrays = [(image, new.images[name]) for name, image in seen.images.items()]
    if seen.state is not None:
        arrays.append((seen.state, new.state))
    for old, other in arrays:
        rows = (num_chunks, -1, *old.shape[1:])
        old.reshape(rows)[:, targets.numpy()] = other.reshape(rows)[:, sources.numpy()]
    for t in range(num_chunks):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            words = new.instruction[t * len(envs) + source]
            seen.instruction[t * batch.loss_mask.shape[1] + target] = words
    batch.episodes += more.episodes
    batch.specs.update(more.specs)


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Success, return, length and cut actions of the first episode of each env of all ranks, and how many were lost (``rollout/*``)."""
    num_envs = batch.loss_mask.shape[1]
    own = torch.zeros(num_envs, 7, dtype=torch.float64)
    for env, episode in batch.episodes:
        length, clipped = episode.num_env_steps, episode.actions_clipped_fraction or 0.0
        truly = (episode.true_success is not None, bool(episode.true_success))
        numbers = (1.0, episode.success, episode.episode_return, length, clipped * length, *truly)
        own[env % num_envs] += torch.tensor(numbers, dtype=torch.float64)
    count, *sums, num_clipped, num_told, num_true = sum_env_groups(own).tolist()
    (largest,) = maximum(max((episode.actions_max_abs or 0.0 for _, episode in batch.episodes), default=0.0))
    num_lost = len(batch.episode_ids.unique()) - len(batch.episode_ids[batch.loss_mask].unique())
    names = ("rollout/success_rate", "rollout/return_mean", "rollout/episode_len")
    means = {name: total / count for name, total in zip(names, sums, strict=True)} if count else {}
    if count:
        means |= {"rollout/actions_clipped_fraction": num_clipped / sums[-1], "rollout/actions_max_abs": largest}
    if num_told:
        means["rollout/true_success_rate"] = num_true / num_told
    return means | {"rollout/num_episodes": int(count), "rollout/lost_episodes": sum_counts(num_lost)[0]}


def check_equal_on_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics of an algorithm if all ranks have the same; else raise ConfigError on all of them.

    A mean over the envs of one rank would otherwise pass for one over all envs, and results would depend on the ranks.
    """
    of_ranks = gather_objects({name: float(value) for name, value in metrics.items()})
    for name in sorted({name for each in of_ranks for name in each}):
        values = [f"{each[name]!r}" if name in each else "missing" for each in of_ranks]  # as text NaN equals NaN
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"{name} is {values[0]} on one rank and {other} on another; required of compute_advantages: the same on all ranks. "
                "It sees the envs of its rank: use masked_mean or masked_normalize of rlinf.algorithms.statistics"
            )
    return metrics
