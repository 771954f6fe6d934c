"""Trainer for reinforcement learning; runs on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.running_moments import CLIP, RunningMoments, discounted_sums
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.cluster.rollouts import make_collector
from rlinf.distributed.deferred import open_tensors
from rlinf.distributed.process_group import gather_objects, maximum, rank, sum_counts, sum_env_groups
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, ConfigError
from rlinf.optim.reference import Reference
from rlinf.optim.schedule import learning_rate
from rlinf.preflight.derived import parity_gate
from rlinf.rollout.collector import Collector
from rlinf.rollout.parity import EXCEEDED, importance_ratios
from rlinf.run_folder import REFERENCE_FILE
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, Clock, TrainerContext
from rlinf.training.loop import Loop
from rlinf.training.rollout_queue import RolloutQueue
from rlinf.training.train_worker import MinibatchPlan, rl_trainer_config
from rlinf.types import RolloutBatch


@runtime_checkable
class MakesTrainer(Protocol):
    """An algorithm with its own trainer, such as SAC or a plug-in's."""

    @classmethod
    def make_trainer(cls, context: TrainerContext, env: VectorEnv, workers: RolloutWorkers | None) -> ActionTrainer:
        """Build the trainer.

        ``env`` is the evaluation env. ``workers`` collect rollouts; if None, this rank collects them.
        """


def make_trainer(parts: TrainerContext, env: VectorEnv, workers: RolloutWorkers | None) -> ActionTrainer:
    """Build the trainer of the run's algorithm: its own if it has one (``MakesTrainer``), otherwise ``RLTrainer``."""
    config = parts.config
    algorithm = ALGORITHMS.get(config.algorithm.name)
    if isinstance(algorithm, MakesTrainer):
        return algorithm.make_trainer(parts, env, workers)
    if not issubclass(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} is {algorithm.__name__}, which has no trainer; expected a subclass of Algorithm, or "
            "the class method make_trainer (docs/adding_an_algorithm.md). Fix the class, or set algorithm=ppo"
        )
    collector = make_collector(config, env, parts.sync.rollout_model, parts.worker.autocast, workers)
    return RLTrainer(parts, collector, algorithm(cast(AlgorithmConfig, config.algorithm)))


class RLTrainer(ActionTrainer):
    """Trains a policy on its own rollouts with a policy-gradient algorithm."""

    collector: Collector

    def __init__(self, parts: TrainerContext, collector: Collector, algorithm: Algorithm) -> None:
        super().__init__(parts, collector)
        self.algorithm = algorithm
        self.gate = parity_gate(parts.config)
        self.return_moments = RunningMoments(1) if algorithm.config.scale_rewards else None
        self.reference: Reference | None = None
        self.rollouts = RolloutQueue(parts, collector, algorithm.needs_values, self.num_steps)

    def begin(self) -> None:
        """Evaluate the initial policy, then start RL with a new optimiser, or resume it."""
        loop, state, trainer = self.loop, self.loop.state, self.parts.config.trainer
        if state.phase != "rl":
            state.phase = "rl"
            self.worker.start_phase(rl_trainer_config(trainer, state.rollbacks))
        self.rollouts.submit_again()  # must precede the first checkpoint, which saves the pending rollouts
        if self.return_moments is not None:
            loop.restore(self._reward_scale())
        if trainer.on_collapse == "rollback" and state.policy_checkpoint == state.start:
            state.start_saved = True  # the run is rolled back to this checkpoint if no later one is better
            loop.save()
        super().begin()
        self.sync.push(state.policy_version)
        self.reference = self._make_reference()

    def _make_reference(self) -> Reference | None:
        """Store RL's initial weights for the KL penalty, in memory and, for resumed runs, on disk (a collective call)."""
        if not self.algorithm.needs_reference:
            return None
        fix = "it contains the reference weights for the KL penalty. Copy it from the run's folder, or set algorithm.kl_coef=0"
        return stored_reference(self.loop, self.worker.model, REFERENCE_FILE, self.loop.state.step == 0, fix)

    def iteration(self, step: int) -> dict[str, float]:
        """Run one iteration of reinforcement learning and return its metrics."""
        config, state, algorithm = self.parts.config, self.loop.state, self.algorithm
        clock, env_steps_before = Clock(), state.env_steps
        self.worker.train_step.decay = self.decayed(step)
        algorithm.clip_fraction = learning_rate(step, self.num_steps, decay=algorithm.config.clip_decay)
        self.rollouts.submit(step, step)
        clock.lap("sync")
        batch = self.rollouts.collect(step)
        self._resample(batch, step)
        clock.lap("rollout")
        self.rollouts.submit(step + config.cluster.max_staleness, step)
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
        valid_rows = batch.loss_mask.clone()  # compute_advantages may drop samples
        metrics |= check_equal_on_ranks(algorithm.compute_advantages(batch))
        flat, seed = batch.flatten(), derive_seed(config.seed, "minibatches", step)
        plan = MinibatchPlan(batch.loss_mask, self.collector.env_groups, config.trainer.minibatch_size, seed)
        updates: list[dict[str, float]] = []
        for epoch in range(algorithm.config.update_epochs):
            for minibatch in plan.epoch(epoch):
                updates.append(self.worker.update(flat, minibatch, algorithm, step))
                if len(updates) == 1:
                    self.gate.check_first_update(updates[0], step)
        self._count_states(batch, valid_rows, len(updates))
        state.policy_version += len(updates)
        if updates and not algorithm.policy_is_frozen(step):
            self.rollouts.policy_changed()
        clock.lap("update")
        metrics["rollout/env_steps_total"] = state.env_steps
        metrics["throughput/env_steps_per_s"] = (state.env_steps - env_steps_before) / clock.total()
        metrics["throughput/samples_per_s"] = plan.num_rows * algorithm.config.update_epochs / clock.seconds["update"]
        for name in updates[0] if updates else ():
            metrics[f"train/{name}"] = sum(update[name] for update in updates) / len(updates)
        return metrics | clock.metrics()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of pending rollouts and the statistics for reward scaling."""
        return self._reward_scale() | self.rollouts.state_dict()

    def _reward_scale(self) -> dict[str, Tensor]:
        """Return the return statistics used for reward scaling, by their names in a checkpoint."""
        moments = {} if self.return_moments is None else self.return_moments.state_dict()
        return {f"return_moments.{name}": tensor for name, tensor in moments.items()}

    def _scale_rewards(self, batch: RolloutBatch) -> dict[str, float]:
        """If ``algorithm.scale_rewards`` is set, divide a rollout's rewards by the std of the running discounted return (collective call).

        As in Engstrom et al. 2020, section 3, the std is over all rollouts including this one. Returns start at 0 in each rollout.
        """
        if self.return_moments is None:
            return {}
        sums = discounted_sums(batch.rewards, batch.episode_ids, self.algorithm.discount)
        self.return_moments.update(sums.unsqueeze(-1), batch.loss_mask)
        scale = float(self.return_moments.std)
        batch.action_rewards = (batch.action_rewards / scale).clamp(-CLIP, CLIP)
        return {"train/reward_scale": scale}

    def _count_states(self, batch: RolloutBatch, valid: Tensor, num_updates: int) -> None:
        """Add a rollout's states to the policy's running statistics, if it has any (a collective call)."""
        # Called after the updates, because a rollout must be scored and trained on with the statistics that it used. Without an update,
        # the weight version does not change, so the statistics must not change either.
        moments = self.model.input_moments
        if moments is not None and num_updates:
            moments.update(torch.from_numpy(batch.observation.state).unflatten(0, valid.shape), valid)
            self.rollouts.policy_changed()

    def _resample(self, batch: RolloutBatch, step: int) -> None:
        """Repeat the rollouts of uninformative groups up to ``max_resamples`` times (dynamic sampling)."""
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
        """Repeat the rollouts of some env groups from different initial states, and keep those that are now informative."""
        more = self.rollouts.repeat(step, attempt, env_groups)
        if more is None:
            return
        num_envs, first = len(batch.group_ids[0]) // len(self.collector.env_groups), self.collector.env_groups.start
        columns = torch.cat([torch.arange(num_envs) + (env_group - first) * num_envs for env_group in env_groups])
        replace_envs(batch, columns, more, ~self.algorithm.uninformative_envs(more))

    def _score(self, batch: RolloutBatch) -> None:
        """Fill in the old log-probabilities and values and, with a KL penalty, the reference log-probabilities."""
        # Using the rollout's own values saves a forward pass; `_check` compares a sample of them with the trainer's.
        if self.algorithm.config.old_logprobs == "rollout":
            batch.old_logprobs, batch.values = self._rollout_numbers(batch)
        else:
            batch.old_logprobs, batch.values = self.worker.evaluate(batch)
        if self.algorithm.needs_reference:
            with self.reference.in_place():
                batch.ref_logprobs, _ = self.worker.evaluate(batch)

    def _rollout_numbers(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Return the rollout's log-probabilities and values in the same format as ``TrainWorker.evaluate``."""
        values = batch.rollout_values
        if values is None and self.algorithm.needs_values:
            raise ConfigError(
                "algorithm.old_logprobs=rollout, but the rollout contains no values; expected a policy that predicts them. "
                "Set algorithm.old_logprobs=trainer"
            )
        values = torch.zeros(batch.loss_mask.shape) if values is None else values
        valid = batch.loss_mask
        return torch.where(valid.unsqueeze(-1), batch.rollout_logprobs, 0.0), torch.where(valid, values, 0.0)

    def _scored_sample(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Return a rollout with one policy call per env, which changes from step to step, scored by the trainer."""
        env_groups = self.collector.env_groups
        first_env = env_groups.start * (batch.loss_mask.shape[1] // len(env_groups))
        sampled = one_call_of_each_env(batch, step + first_env)
        sampled.old_logprobs, sampled.values = self.worker.evaluate(sampled)
        return sampled

    def _check_sample(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Compare rollout and trainer on one policy call per env; if they differ and the run continues, score the complete rollout."""
        sampled = self._scored_sample(batch, step)
        metrics = self.gate.check(sampled, step)
        num_scored, num_valid = sum_counts(int(sampled.loss_mask.sum()), int(batch.loss_mask.sum()))
        if metrics[EXCEEDED]:
            batch.old_logprobs, batch.values = self.worker.evaluate(batch)
            num_scored = num_valid
        return metrics | {"rollout/scored_fraction": num_scored / max(1, num_valid)}

    def _check(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Compare rollout and trainer with the weights used in the rollout, and return the gap and the staleness."""
        pending, version = self.rollouts.remove(step), self.loop.state.policy_version
        if pending.updated:
            self.gate.policy_was_updated()
        if self.algorithm.config.old_logprobs == "rollout":
            metrics = self._check_sample(batch, step)
        elif pending.weights is None or pending.policy_version == version:
            metrics = self.gate.check(batch, step)
        else:  # score a sample with the weights that generated it: with newer ones, the gap would reflect the update, not an error
            with pending.with_weights():
                sampled = self._scored_sample(batch, step)
            metrics = self.gate.check(sampled, step) | importance_ratios(batch)
        metrics["rollout/staleness_iterations"] = pending.lag
        return metrics | {"rollout/staleness_updates": version - pending.policy_version}


def stored_reference(loop: Loop, model: nn.Module, name: str, is_new: bool, fix: str) -> Reference:
    """Copy the model's weights in memory and to the run's folder, or unless ``is_new``, read the file (a collective call).

    Raise CheckpointError with ``fix`` if the file is missing.
    """
    reference = Reference(model)
    run_folder = loop.folder if loop.resumed_from is None else loop.resumed_from.parent.parent
    if not is_new:
        path = run_folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {fix}")
        reference.load(open_tensors([path]))
    if is_new or run_folder.resolve() != loop.folder.resolve():
        tensors = reference.tensors()
        if rank() == 0:
            loop.folder.mkdir(parents=True, exist_ok=True)
            partial = loop.folder / f".{name}.tmp"
            save_file(tensors, partial)
            os.replace(partial, loop.folder / name)
    return reference


def one_call_of_each_env(batch: RolloutBatch, number: int) -> RolloutBatch:
    """Restrict the ``loss_mask`` of a time-major rollout to one of the ``V`` valid policy calls per env ``b``: ``(number + b) mod V``."""
    valid = batch.loss_mask
    count = valid.sum(0)
    wanted = (number + torch.arange(len(count))) % count.clamp_min(1)
    return replace(batch, loss_mask=valid & (valid.cumsum(0) == wanted + 1))


def replace_envs(batch: RolloutBatch, envs: Tensor, more: RolloutBatch, wanted: Tensor) -> None:
    """Replace the columns ``envs`` (int64 ``[K]``) of a time-major batch by columns of ``more`` where ``wanted`` (bool ``[K]``) is true."""
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
            text = new.instruction[t * len(envs) + source]
            seen.instruction[t * batch.loss_mask.shape[1] + target] = text
    batch.episodes += more.episodes
    batch.specs.update(more.specs)


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return success, return, length and clipped actions (``rollout/*``) for each env's first episode, across all ranks."""
    num_envs = batch.loss_mask.shape[1]
    rank_sums = torch.zeros(num_envs, 7, dtype=torch.float64)
    for env, episode in batch.episodes:
        length, clipped = episode.num_env_steps, episode.actions_clipped_fraction or 0.0
        label = (episode.true_success is not None, bool(episode.true_success))
        numbers = (1.0, episode.success, episode.episode_return, length, clipped * length, *label)
        rank_sums[env % num_envs] += torch.tensor(numbers, dtype=torch.float64)
    count, *sums, num_clipped, num_labelled, num_true = sum_env_groups(rank_sums).tolist()
    (largest,) = maximum(max((episode.actions_max_abs or 0.0 for _, episode in batch.episodes), default=0.0))
    num_lost = len(batch.episode_ids.unique()) - len(batch.episode_ids[batch.loss_mask].unique())
    names = ("rollout/success_rate", "rollout/return_mean", "rollout/episode_len")
    means = {name: total / count for name, total in zip(names, sums, strict=True)} if count else {}
    if count:
        means |= {"rollout/actions_clipped_fraction": num_clipped / sums[-1], "rollout/actions_max_abs": largest}
    if num_labelled:
        means["rollout/true_success_rate"] = num_true / num_labelled
    return means | {"rollout/num_episodes": int(count), "rollout/lost_episodes": sum_counts(num_lost)[0]}


def check_equal_on_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """Return an algorithm's metrics if they are equal on all ranks; otherwise raise ConfigError on all ranks."""
    # Otherwise, a mean over one rank's envs could be mistaken for the mean over all envs, and depend on the number of ranks.
    all_ranks = gather_objects({name: float(value) for name, value in metrics.items()})
    for name in sorted({name for rank_metrics in all_ranks for name in rank_metrics}):
        values = [
            repr(rank_metrics[name]) if name in rank_metrics else "missing" for rank_metrics in all_ranks
        ]  # as text, NaN equals NaN
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"{name} is {values[0]} on one rank, but {other} on a second one; required of compute_advantages: equal on all ranks. "
                "It sees only its rank's envs: use masked_mean or masked_normalize from rlinf.algorithms.advantages"
            )
    return metrics
