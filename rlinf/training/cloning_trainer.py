"""Trainer for behaviour cloning; runs on every rank."""

import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.augment import augment
from rlinf.data.config import BAD, GOOD
from rlinf.data.filters import filtered_rows
from rlinf.data.formats import SKIP
from rlinf.data.recap import label_rows
from rlinf.data.rows import BatchSource, Prefetcher, shuffled_rows
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.distributed.process_group import any_rank, broadcast_object, gather_objects, rank, world_size
from rlinf.errors import ConfigError, UnreadableRowError
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import evaluation_mode
from rlinf.optim.schedule import learning_rate
from rlinf.rollout.demonstrations import collect_demonstrations
from rlinf.seeding import derive_seed
from rlinf.training.action_trainer import ActionTrainer, TrainerContext
from rlinf.training.loop import Update
from rlinf.training.stop_signal import StopRequested
from rlinf.training.train_worker import rank_rows
from rlinf.types import Observation

logger = logging.getLogger("rlinf")

LOG_EVERY = 10
"""Number of steps between logged lines of metrics."""


class CloningTrainer(ActionTrainer):
    """Behaviour cloning; each rank reads only the minibatch rows that it trains on.

    Args:
        dataset: Stored demonstrations. If None, the expert collects them.
        last_tag: Tag of the evaluation after the last step; None if RL follows, because it starts with an evaluation.
    """

    phase = tag = "sft"

    def __init__(
        self, parts: TrainerContext, dataset: StoredDemonstrations | None = None, last_tag: str | None = None
    ) -> None:
        super().__init__(parts)
        self.dataset, self.last_tag = dataset, last_tag
        self._digest: str | None = self.loop.state.trainer.get("dataset")
        # The labels of frames for sft.advantage_top_fraction, as bits in hexadecimal.
        self._saved_labels: str | None = self.loop.state.trainer.get("labels")
        self._waits: list[float] = []  # seconds per step since the last line: waiting for the batch, and in total
        self._times: list[float] = []
        self._batches: Prefetcher | None = None
        self._demonstrator: dict[str, float] = {}

    @property
    def num_steps(self) -> int:
        """Planned number of steps; with ``sft.time_limit_s``, training may continue until the limit."""
        return max(self.parts.config.sft.max_steps, self.loop.state.sft_step)

    def is_done(self) -> bool:
        """Return whether no steps or time are left, or RL has started (a collective call)."""
        config, state = self.parts.config.sft, self.loop.state
        within_time = config.time_limit_s is not None and state.train_wall_s < config.time_limit_s
        return state.phase != "sft" or not (state.sft_step < config.max_steps or any_rank(within_time))

    def begin(self) -> None:
        """Read or collect the demonstrations, unless no steps are left."""
        if self.is_done():
            return
        state, config, run_seed = self.loop.state, self.parts.config.sft, self.parts.config.seed
        start = time.monotonic()
        demonstrations, self._demonstrator = self._demonstrations()
        rows = self.dataset or demonstrations
        metrics, warnings = compare_with_statistics(self.worker.model, rows, self.parts.config.env.name)
        self._demonstrator |= metrics
        for warning in warnings if rank() == 0 else ():
            logger.warning(warning)
        if state.sft_step == 0:  # a resumed run has already counted this time
            state.train_wall_s += time.monotonic() - start
        seed = derive_seed(run_seed, "sft")
        mine = rank_rows(config.batch_size)[0].numpy()

        def read(step: int) -> tuple[Observation, Tensor]:
            rows = shuffled_rows(len(demonstrations), step, config.batch_size, seed)[mine]
            observation, actions = demonstrations.rows(rows)
            return augment(observation, config.augment, derive_seed(run_seed, "sft augment", step), mine), actions

        self._batches = Prefetcher(read, state.sft_step, config.num_workers if config.dataset is not None else 0)

    def update(self, step: int) -> Update:
        """Take an optimiser step."""
        start, config = time.monotonic(), self.parts.config
        observation, actions = self._next_batch()
        self._waits.append(time.monotonic() - start)
        heartbeat()  # separate deadlines apply to the batch and the update
        noise = derive_seed(config.seed, "sft noise", step)
        self.worker.train_step.decay = learning_rate(step, self.num_steps, decay=config.sft.lr_decay)
        results = self.worker.sft_update(observation, actions, config.sft.batch_size, step, noise)
        self.loop.state.policy_version += 1
        self._times.append(time.monotonic() - start)
        metrics = {f"sft/{name}": value for name, value in results.items()} | {"time/update_s": self._times[-1]}
        if step == 0:
            metrics |= self._demonstrator
        metrics["time/data_wait_s"] = sum(self._waits) / len(self._waits)
        metrics["throughput/data_wait_fraction"] = sum(self._waits) / sum(self._times)
        metrics["throughput/samples_per_s"] = config.sft.batch_size / self._times[-1]
        is_logged = step % LOG_EVERY == 0
        if is_logged:
            self._waits, self._times = [], []
        return Update(metrics, {"loss": results["loss"]}, is_logged)

    def _next_batch(self) -> tuple[Observation, Tensor]:
        """Return this rank's rows. If any rank cannot read its rows, save and raise UnreadableRowError on all ranks (a collective call)."""
        reason = None
        try:
            batch = self._batches.next()
        except (UnreadableRowError, OSError) as error:
            reason = str(error)
        if any_rank(reason is not None):
            hint = ""
            if self.loop.state.done:
                self.loop.save_unsaved()
                hint = f", with resume={self.loop.folder}, where all steps so far are saved"
            raise UnreadableRowError(f"{next(filter(None, gather_objects(reason))).rstrip('.')}. {SKIP}{hint}")
        return batch

    def evaluation_due(self, last: bool) -> str | None:
        """Return the tag of the evaluation due after this step according to ``sft.eval_every``; None after the last step."""
        return self._due(self.parts.config.sft.eval_every, last)

    def loop_state(self) -> dict[str, Any]:
        """Return the dataset's hash, which a resumed run must repeat, and the labels of its frames."""
        return {"dataset": self._digest, "labels": self._saved_labels}

    def close(self) -> None:
        """Stop the prefetching threads, and free the demonstrations."""
        if self._batches is not None:
            self._batches.__exit__()
            self._batches = None

    def _labels(self) -> np.ndarray:
        """Return which frames of the dataset are good, bool ``[N]``, according to the initial policy's features."""
        run_seed = self.parts.config.seed
        # Checkpoints contain the labels, because a resumed run must not use features of the partly trained policy.
        if self._saved_labels is None:
            is_good = label_rows(
                self.dataset, self._features(), self.parts.config.sft, derive_seed(run_seed, "advantages")
            )
            is_good = broadcast_object(is_good, 0)  # rounding in the value model differs between CPUs
            self._saved_labels = np.packbits(is_good).tobytes().hex()
            self.loop.progress.note(f"{is_good.sum()} of {len(is_good)} frames are labelled as good")
        bits = np.frombuffer(bytes.fromhex(self._saved_labels), np.uint8)
        return np.unpackbits(bits, count=len(self.dataset)).astype(bool)

    def _features(self) -> torch.Tensor:
        """Compute the policy's features of all frames, without labels in the prompt, on all ranks; float32 ``[N, F]``."""
        sync, dataset, features = self.parts.sync, self.dataset, []
        check_labels_are_read(self.worker.model, dataset.rows(np.arange(1))[0])
        sync.push(self.loop.state.policy_version)
        model, mine = sync.rollout_model, np.array_split(np.arange(len(dataset)), world_size())[rank()]
        size = min(self.parts.config.sft.batch_size, self.worker.micro_batch_size)
        with evaluation_mode(model), self.worker.autocast():
            for rows in np.array_split(mine, -(-len(mine) // size)) if len(mine) else ():
                observation = replace(dataset.rows(rows)[0], suffixes=[""] * len(rows))
                features.append(model.propose(model.preprocess(observation)).features.float().cpu())
                self.loop.progress.update("values", rows[-1] + 1 - mine[0], len(mine))
                heartbeat()
        return torch.cat([part for rank_features in gather_objects(features) for part in rank_features])

    @deadline("rollout")
    def _demonstrations(self) -> tuple[BatchSource, dict[str, float]]:
        """Return the dataset, or the expert's demonstrations (identical on every rank) with their success rate as a metric."""
        config, progress = self.parts.config.sft, self.loop.progress
        chunk_len = self.worker.model.sft_chunk_len
        if self.dataset is not None:
            self.dataset.chunk_len = chunk_len
            is_good = None if config.advantage_top_fraction is None else self._labels()
            source = filtered_rows(self.dataset, config, is_good)
            part = "" if source is self.dataset else f", {len(source)} of them per epoch (sft.filter={config.filter})"
            progress.note(
                f"{self.dataset.num_episodes} demonstrations, {len(self.dataset)} frames in {config.dataset}{part}"
            )
            return source, {}
        env, stop_signal = self.parts.evaluator.env, self.loop.stop_signal
        with suppress(StopRequested), stop_signal.interrupting():
            collected = collect_demonstrations(
                env, config.num_demonstrations, config.expert, chunk_len, self.parts.config.seed
            )
        # All ranks must decide together: a rank that finished before the signal would otherwise wait for the interrupted ranks.
        if any_rank(stop_signal.number is not None):
            raise StopRequested("stopped by a signal")
        progress.note(
            f"{len(collected.episodes)} demonstrations, {len(collected)} frames; the demonstrator succeeds in {collected.success_rate:.1%}"
        )
        return collected, {"sft/demonstrator_success_rate": collected.success_rate}


def compare_with_statistics(model: ActionModel, rows: Any, env_name: str) -> tuple[dict[str, float], list[str]]:
    """Return the maximum fractions of actions and states outside the current statistics, and warnings; see ``Range.compare``.

    ``rows`` are demonstrations with ``actions`` (``[N, D]`` or ``[N, C, D]``) and ``state`` (``[N, S]`` or None).
    """
    metrics: dict[str, float] = {}
    warnings: list[str] = []
    actions = np.asarray(rows.actions)
    first = actions if actions.ndim == 2 else actions[:, 0]
    for name, span, values in (("actions", model.action_range, first), ("states", model.state_range, rows.state)):
        if span is not None and values is not None:
            fraction, new_warnings = span.compare(values, name, model.other_statistics.format(env_name))
            metrics[f"sft/{name}_beyond_statistics"], warnings = fraction, warnings + new_warnings
    return metrics, warnings


@torch.no_grad()
def check_labels_are_read(model: ActionModel, observation: Observation) -> None:
    """Raise ConfigError if a policy's inputs are the same for good and bad labels, e.g. because its tokenizer knows neither label."""
    good, bad = (model.preprocess(replace(observation, suffixes=[label] * len(observation))) for label in (GOOD, BAD))
    if all(torch.equal(good[name], bad[name]) for name in good):
        raise ConfigError(
            f"{type(model).__name__} has equal inputs for '{GOOD}' and '{BAD}', the prompt labels used by sft.advantage_top_fraction; "
            "expected a tokenizer that distinguishes them. Set model=openvla_tiny, or sft.advantage_top_fraction=null sft.filter=successes"
        )
