"""From a configuration to a finished run folder: builds the parts, runs the phases, writes summary and report."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from rlinf.algorithms import ALGORITHMS
from rlinf.checkpoints import checkpoint as checkpoints
from rlinf.commands.evaluate import episode_list
from rlinf.commands.open_checkpoint import open_checkpoint, statistics_of_env
from rlinf.config.plugins import load_plugins
from rlinf.config.saved_code import code_overrides
from rlinf.config.schema import RunConfig
from rlinf.data.formats import open_dataset
from rlinf.data.rows import BatchSource
from rlinf.distributed.fsdp import shard
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import any_rank, rank, resolve_device, set_num_threads, world_size
from rlinf.envs import make_env
from rlinf.envs.config import default_num_worker_threads, with_share_of_cores
from rlinf.errors import CheckpointError, ConfigError, NonFiniteError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.fingerprint import NUM_EPISODES, compare_fingerprints, take_fingerprint
from rlinf.evaluation.report import write_report
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import locked_folder, write_text
from rlinf.manifest import Manifest
from rlinf.models import build_policy
from rlinf.options import override_text, to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.demonstrations import collect_demonstrations
from rlinf.rollout.parity import EXCEEDED
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.rollout.vllm_policy import VllmPolicy
from rlinf.rollout.weight_sync import WeightSync, frozen_copy
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker, read_metrics
from rlinf.training.outcome import SUMMARY_TAGS, closing_table, summary_of, write_failed_batch
from rlinf.training.stop_signal import StopRequested, StopSignal
from rlinf.training.train_worker import TrainWorker, sft_trainer_config
from rlinf.training.trainer import LoopState, Trainer

logger = logging.getLogger("rlinf")

REFERENCE_FILE = "reference.safetensors"
"""The policy with which RL began, in the run folder of a run with a KL penalty."""


class Run:
    """One rank of one run. ``train`` and ``sft`` start it on every rank.

    Args:
        config: Validated configuration with ``output_dir`` set.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.is_writer = rank() == 0
        self.device = resolve_device(config.cluster.device, 1)  # of this rank, which sees one GPU
        set_num_threads(config.cluster.num_threads, config.cluster.num_processes)
        seed_everything(config.seed)
        self.stop_signal = StopSignal(announce=self.is_writer)
        env_config = with_share_of_cores(config.env, world_size())
        self.resumed_from = None
        if config.resume:
            self.resumed_from = checkpoints.on_rank_zero(
                lambda: checkpoints.resolve_checkpoint(config.resume), f"read {config.resume}"
            )
        phase = "sft" if config.sft.max_steps > 0 else "rl"
        saved: dict[str, Any] = {}
        if self.resumed_from is not None:
            saved = checkpoints.read_loop_state(self.resumed_from)
            phase = saved["phase"]
        num_envs = config.evaluation.num_envs
        if (
            phase != "sft" or config.sft.dataset is not None
        ):  # the order of demonstrations that are played depends on it
            num_envs = max(-(-num_envs // world_size()), min(num_envs, NUM_EPISODES))
        self.eval_env = make_env(env_config, num_envs, auto_reset=False)
        self.dataset = open_dataset(config.sft, self.eval_env) if phase == "sft" and config.sft.dataset else None
        digest = None if self.dataset is None else self.dataset.digest()
        if phase == "sft" and saved.get("dataset", digest) != digest:
            raise CheckpointError(
                f"{self.resumed_from} has cloned other demonstrations than those of sft.dataset={override_text(config.sft.dataset)} "
                "(other rows, tasks or statistics). Set sft.dataset=<the dataset of the run>, or begin a new run with "
                f"init_from={config.resume} resume=null output_dir=<a new folder>"
            )
        self.fingerprint = take_fingerprint(self.eval_env) if self.is_writer and config.evaluation.probe else None
        self.model = self._build_model()
        sharded = world_size() > 1 if config.trainer.sharding == "auto" else config.trainer.sharding == "fsdp2"
        rollout_model = frozen_copy(self.model) if sharded else self.model
        if sharded:
            shard(self.model, self.device)
        self.generator = self._make_generator(rollout_model)
        self.sync = WeightSync(self.model, rollout_model, self.generator)
        self.worker = TrainWorker(
            self.model,
            sft_trainer_config(config.trainer, config.sft) if phase == "sft" else config.trainer,
            temperature=config.rollout.temperature,
            micro_batch_size=config.model.micro_batch_size,
            val_micro_batch_size=config.model.val_micro_batch_size,
            precision=config.model.precision,
        )
        self.state = self._initial_state(phase)
        if phase == "sft":
            self.state.dataset = digest
        self.tracker = self._open_tracker() if self.is_writer else None
        self.progress = Progress(enabled=self.is_writer, updates=config.tracking.progress)

    def _build_model(self) -> torch.nn.Module:
        """Build the policy again, or from the checkpoint that is resumed or started from, whose conditions must fit."""
        config = self.config
        source = self.resumed_from
        if source is None and config.init_from is not None:
            source = config.init_from
        if source is None:
            return build_policy(config, statistics_of_env(config, self.eval_env, self.dataset)).to(self.device)
        # A new run may go on in another env or precision; a resumed one may not.
        free = [] if self.resumed_from is not None else ["env", "precision", "lora", "renderer"]
        allowed = [*config.evaluation.allow_mismatch, *free]
        opened = open_checkpoint(source, config, allowed, resumes=self.resumed_from is not None)
        for line in compare_fingerprints(opened.manifest.probe, self.fingerprint):
            logger.warning("the simulator has changed since %s was made: %s", opened.folder, line)
        return opened.policy.to(self.device)

    def _make_generator(self, rollout_model: torch.nn.Module) -> VllmPolicy | None:
        """Return what plays in the place of ``rollout_model``, where the configuration asks for it."""
        config = self.config.rollout
        if config.backend == "torch" or self.config.trainer.max_steps == 0:
            return None
        return VllmPolicy(rollout_model, config.vllm, config.num_envs // world_size(), torch.get_num_threads())

    def make_reference(self) -> torch.nn.Module | None:
        """Return a frozen copy of the policy with which RL began, for the KL penalty; kept on disk for a resumed run.

        Raises:
            CheckpointError: The run that is resumed did not keep it.
        """
        if self.config.algorithm.kl_coef == 0:
            return None
        reference = frozen_copy(self.sync.rollout_model)
        run_folder = self.folder if self.resumed_from is None else self.resumed_from.parent.parent
        if self.state.step > 0:
            path = run_folder / REFERENCE_FILE
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, which a run writes that begins RL with a KL penalty. Copy it from that run's folder, or "
                    "set algorithm.kl_coef=0"
                )
            reference.load_state_dict(load_file(path))
        if self.is_writer and (self.state.step == 0 or run_folder.resolve() != self.folder.resolve()):
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in reference.state_dict().items()}
            save_file(tensors, self.folder / f".{REFERENCE_FILE}.tmp")
            os.replace(self.folder / f".{REFERENCE_FILE}.tmp", self.folder / REFERENCE_FILE)
        return reference

    def _initial_state(self, phase: str) -> LoopState:
        if self.resumed_from is None:
            return LoopState(phase=phase)
        loaded = checkpoints.load_checkpoint(self.resumed_from, model=self.model, optimizer=self.worker.optimizer)
        state = LoopState(**loaded)
        self.worker.train_step.num_steps = state.sft_step if phase == "sft" else state.policy_version - state.sft_step
        return state

    def _open_tracker(self) -> Tracker:
        state = self.state
        resumed = self.resumed_from is not None
        if resumed and self.resumed_from.parent.resolve() == (self.folder / "checkpoints").resolve():
            checkpoints.set_aside_later(self.resumed_from)
        tracker = Tracker(
            self.folder,
            self.config.tracking,
            to_mapping(self.config),
            run_id=state.tracker_run_id,
            resume_step=(state.sft_step if state.phase == "sft" else state.step) if resumed else None,
            resume_phase=state.phase,
        )
        state.tracker_run_id = tracker.run_id
        return tracker

    def evaluate(self, tag: str) -> EvaluationResult | None:
        """Evaluate the rollout policy on the held-out episodes, each rank its share (a collective call); rank 0 returns the result.

        Until the next time the env is offloaded.
        """
        config = self.config.evaluation
        final = tag in SUMMARY_TAGS.values()
        folder = self.folder / "eval" / tag
        try:
            with self.worker.autocast():
                result = evaluate_policy(
                    self.sync.rollout_model,
                    self.eval_env,
                    episode_list(self.eval_env, config.split, config.num_episodes),
                    greedy=config.greedy,
                    temperature=self.config.rollout.temperature,
                    seed=self.config.seed,
                    video_folder=folder / "videos" if final and config.num_videos_per_task else None,
                    num_videos_per_task=config.num_videos_per_task,
                    video_size=config.video_size,
                    rank=rank(),
                    num_ranks=world_size(),
                    together=self.stop_signal.together,
                )
        except StopRequested:  # the trainer saves, and stops all ranks
            return None
        finally:
            self.eval_env.offload()
        if not self.is_writer:
            return None
        result.to_json(folder / "result.json")
        self._manifest(self.state.policy_version).save(folder)
        self.progress.note(f"eval {tag}: {result.successes}/{result.episodes} = {result.success_rate:.1%} "
                           f"(95 % {result.interval[0]:.1%} - {result.interval[1]:.1%})")  # fmt: skip
        return result

    def execute(self) -> None:
        """Run behaviour cloning and RL as configured, then write summary and report."""
        config = self.config
        trainer = Trainer(
            config,
            worker=self.worker,
            collector=self._collector(),
            algorithm=ALGORITHMS.get(config.algorithm.name)(config.algorithm),
            sync=self.sync,
            make_reference=self.make_reference,
            evaluate=self.evaluate,
            save=self.save,
            log=self._log,
            progress=self.progress.update,
            should_stop=lambda: self.stop_signal.number is not None,
            state=self.state,
        )
        try:
            if self.generator is not None:
                self.generator.engine.start()  # its faults show before the hours of cloning
            if self.state.phase == "sft":
                trainer.run_sft(self.demonstrations)
            trainer.evaluate_phase("before_rl" if config.trainer.max_steps > 0 else "after_sft")
            if config.trainer.max_steps > 0:
                trainer.run_rl()
                trainer.evaluate_phase("after_rl")
        except NonFiniteError as error:
            if self.worker.failed_batch is not None:
                folder = self.folder / "failed_batch"
                if self.is_writer:
                    write_failed_batch(self.worker.failed_batch, folder)
                error.add_note(f"Report of the batch: {folder}")
            raise
        finally:
            trainer.collector.close()
            if self.generator is not None:
                self.generator.close()
            self.eval_env.close()
            if self.tracker is not None:
                self.tracker.close()
            self.progress.close()
        if self.is_writer:
            self.write_summary()

    def _collector(self) -> RolloutCollector:
        config = self.config
        sampler = EpisodeSampler(
            self.eval_env.episode_specs("train"),
            len(self.eval_env.task_names),
            num_groups=config.rollout.num_envs // config.rollout.group_size,
            group_size=config.rollout.group_size,
            seed=config.seed,
            init_states=config.rollout.init_states,
        )
        # A simulation on the GPU steps all of its rows at once: two of half the size would take as long each, one after the other.
        envs_per_rank = config.rollout.num_envs // world_size()
        num_worker_threads = config.rollout.num_lanes or default_num_worker_threads(config.env, envs_per_rank)
        num_worker_threads = 1 if self.eval_env.on_gpu else num_worker_threads
        env_config = with_share_of_cores(config.env, num_worker_threads * world_size())
        return RolloutCollector(
            lambda num_envs: make_env(env_config, num_envs, auto_reset=config.rollout.auto_reset),
            sampler,
            num_envs=config.rollout.num_envs,
            num_chunks=config.rollout.num_chunks,
            temperature=config.rollout.temperature,
            num_worker_threads=num_worker_threads,
            autocast=self.worker.autocast,
            offload_envs=config.rollout.offload_envs,
            rank=rank(),
            num_ranks=world_size(),
        )

    def demonstrations(self) -> BatchSource:
        """Return the dataset, or let the scripted expert play (the same on every rank)."""
        config = self.config
        if self.dataset is not None:
            self.dataset.chunk_len = self.model.sft_chunk_len
            self.progress.note(
                f"{self.dataset.num_episodes} demonstrations, {len(self.dataset)} rows in {config.sft.dataset}"
            )
            return self.dataset
        with suppress(StopRequested), self.stop_signal.at_once():
            demonstrations = collect_demonstrations(
                self.eval_env, config.sft.num_demonstrations, config.sft.expert, self.model.sft_chunk_len, config.seed
            )
        if any_rank(
            self.stop_signal.number is not None
        ):  # else a rank that was done before would wait for those that stop
            raise StopRequested("stopped by a signal")
        self.progress.note(f"{len(demonstrations.episodes)} demonstrations, {len(demonstrations)} rows; the demonstrator "
                           f"succeeds in {demonstrations.success_rate:.1%}")  # fmt: skip
        return demonstrations

    def save(self, state: LoopState) -> Path | None:
        """Write a checkpoint of the present state (a collective call)."""
        step = state.sft_step if state.phase == "sft" else state.step
        name = f"{state.phase}_{step:06d}"
        best = state.best_evaluation({name, *self._saved_names()})
        return checkpoints.save_checkpoint(
            self.folder / "checkpoints" / name,
            model=self.model,
            optimizer=self.worker.optimizer,
            loop_state=asdict(state),
            run_config=to_mapping(self.config),
            manifest=self._manifest(state.policy_version),
            max_keep=self.config.trainer.max_keep,
            best=None if best is None else state.evaluations[best]["checkpoint"],
        )

    def _saved_names(self) -> list[str]:
        return [path.parent.name for path in self.folder.glob(f"checkpoints/*/{checkpoints.STATE_FILE}")]

    def _manifest(self, policy_version: int) -> Manifest:
        return build_manifest(
            self.config, self.sync.rollout_model, policy_version=policy_version, fingerprint=self.fingerprint
        )

    def _log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        if self.tracker is not None:
            self.tracker.log(step, metrics, phase)

    def write_summary(self) -> None:
        """Write ``summary.json`` and the report, and print the closing table."""
        best = self.state.best_evaluation(self._saved_names())
        summary = summary_of(self.config.experiment_name, self.config.seed, self.state, best)
        summary["parity_exceeded"] = sum(line.get(EXCEEDED, 0) > 0 for line in read_metrics(self.folder))
        write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
        report = write_report(self.folder)
        print(closing_table(summary), f"report: {report}", sep="\n", flush=True)


def _execute_rank(config: RunConfig) -> None:
    load_plugins(config.plugins)
    transformers_logging.disable_progress_bar()
    run = Run(config)
    try:
        with run.stop_signal.heard():
            run.execute()
    except StopRequested as stop:
        if run.is_writer:
            saved = any(map(checkpoints.is_checkpoint, (run.folder / "checkpoints").glob("*")))
            words = f"rlinf train resume={run.folder} {code_overrides(to_mapping(config))}".rstrip()
            way_on = f"continue with: {words}" if saved else "nothing had been trained yet"
            print(f"\n{stop}; {way_on}", file=sys.stderr, flush=True)
        number = run.stop_signal.number
        sys.exit(1 if number is None else 128 + number)  # None: another rank has heard it


def train(config: RunConfig) -> Path:
    """Run an experiment: cloning if ``sft.max_steps`` > 0, evaluation, RL, evaluation, report.

    Returns:
        The run folder.

    Raises:
        ConfigError: Another run writes there; or vLLM is to play in a process whose GPU memory it could not share.
    """
    cluster = config.cluster
    device = resolve_device(cluster.device, cluster.num_processes)
    if device == "cuda" and config.rollout.backend == "torch":  # what an engine shares must not be in such segments
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    elif device == "cuda":
        _check_segments()
    alone = config.trainer.sharding == "fsdp2"
    with locked_folder(Path(config.output_dir)):
        launch(_execute_rank, config, cluster.num_processes, device, process_group=alone, timeout_s=cluster.timeout_s)
    return Path(config.output_dir)


def _check_segments() -> None:
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(key, "")
        if "expandable_segments:true" in value.lower():
            raise ConfigError(
                f"{key} is '{value}', set by a run before in this Python process or by you; required with rollout.backend=vllm: no "
                "expandable segments, whose memory cannot be shared with the engine. Start this run in a new Python process "
                "without the variable, or set rollout.backend=torch"
            )


def sft(config: RunConfig) -> Path:
    """Run the behaviour cloning of an experiment only."""
    return train(replace(config, trainer=replace(config.trainer, max_steps=0)))
