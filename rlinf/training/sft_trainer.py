"""Behaviour cloning. Every rank runs it."""

from __future__ import annotations

import time
from contextlib import suppress

from torch import Tensor

from rlinf.data.augment import augment
from rlinf.data.prefetch import Prefetcher
from rlinf.data.rows import BatchSource, shuffled_rows
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.deadlines import waiting
from rlinf.distributed.process_group import any_rank
from rlinf.rollout.demonstrations import collect_demonstrations
from rlinf.seeding import derive_seed
from rlinf.training.session import Session
from rlinf.training.stop_signal import StopRequested
from rlinf.training.train_worker import own_rows
from rlinf.types import Observation


class SFTTrainer:
    """Clone demonstrations.

    Args:
        session: The run; its evaluation env is where the scripted expert plays.
        dataset: Stored demonstrations; None: the expert plays them.
    """

    def __init__(self, session: Session, dataset: StoredDemonstrations | None = None) -> None:
        self.session, self.dataset = session, dataset

    @waiting("update")
    def fit(self) -> None:
        """Clone from ``state.sft_step`` on; of each minibatch, a rank reads the rows that it trains on."""
        if not self._goes_on():
            return
        session, state = self.session, self.session.state
        config, run_seed = session.config.sft, session.config.seed
        start = time.monotonic()
        demonstrations, demonstrator = self._demonstrations()
        if state.sft_step == 0:  # a resumed run has paid for them before
            state.train_wall_s += time.monotonic() - start
        seed = derive_seed(run_seed, "sft")
        mine = own_rows(config.batch_size)[0].numpy()
        waits, times = [], []  # seconds of the steps since the last line

        def read(step: int) -> tuple[Observation, Tensor]:
            rows = shuffled_rows(len(demonstrations), step, config.batch_size, seed)[mine]
            observation, actions = demonstrations.rows(rows)
            return augment(observation, config.augment, derive_seed(run_seed, "sft augment", step), mine), actions

        with Prefetcher(read, state.sft_step, config.num_workers if config.dataset is not None else 0) as batches:
            session.evaluate_if_due("sft", config.eval_every, last=False)
            session.stop_if_asked()
            while self._goes_on():
                start = time.monotonic()
                step = state.sft_step
                noise = derive_seed(run_seed, "sft noise", step)
                with session.profile_window.step("sft", step):
                    observation, actions = batches.next()
                    waits.append(time.monotonic() - start)
                    with waiting("update"):
                        metrics = session.worker.sft_update(observation, actions, config.batch_size, step, noise)
                state.sft_step += 1
                state.policy_version += 1
                times.append(time.monotonic() - start)
                state.train_wall_s += times[-1]
                last = not self._goes_on()
                if step % 10 == 0 or last:
                    named = {f"sft/{name}": value for name, value in metrics.items()}
                    named |= {"time/update_s": times[-1], "time/total_s": state.train_wall_s}
                    if step == 0:
                        named |= demonstrator
                    named |= {"time/data_wait_s": sum(waits) / len(waits)}
                    named |= {"throughput/data_wait_fraction": sum(waits) / sum(times)}
                    session.log(step, named | {"throughput/samples_per_s": config.batch_size / times[-1]})
                    waits, times = [], []
                num_steps = max(config.max_steps, state.sft_step)
                session.progress.update("sft", state.sft_step, num_steps, loss=metrics["loss"])
                session.evaluate_if_due("sft", config.eval_every, last)
                session.checkpoint_if_due(last)

    def _goes_on(self) -> bool:
        config, state = self.session.config.sft, self.session.state
        within_time = config.time_limit_s is not None and state.train_wall_s < config.time_limit_s
        return state.sft_step < config.max_steps or any_rank(within_time)

    @waiting("rollout")
    def _demonstrations(self) -> tuple[BatchSource, dict[str, float]]:
        """Return the dataset, or let the scripted expert play (the same on every rank); with the metric of how often that succeeds."""
        session, config = self.session, self.session.config.sft
        chunk_len = session.worker.model.sft_chunk_len
        if self.dataset is not None:
            self.dataset.chunk_len = chunk_len
            found = f"{self.dataset.num_episodes} demonstrations, {len(self.dataset)} rows in {config.dataset}"
            session.progress.note(found)
            return self.dataset, {}
        env, stop_signal = session.evaluator.env, session.stop_signal
        with suppress(StopRequested), stop_signal.at_once():
            played = collect_demonstrations(
                env, config.num_demonstrations, config.expert, chunk_len, session.config.seed
            )
        # Asked of all ranks: one that was done before would wait for those that stop.
        if any_rank(stop_signal.number is not None):
            raise StopRequested("stopped by a signal")
        session.progress.note(
            f"{len(played.episodes)} demonstrations, {len(played)} rows; the demonstrator succeeds in {played.success_rate:.1%}"
        )
        return played, {"sft/demonstrator_success_rate": played.success_rate}
