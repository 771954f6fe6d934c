"""From a configuration to a finished run folder: build the parts, run the trainers."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.algorithms import ALGORITHMS
from rlinf.checkpoints import checkpoint as checkpoints
from rlinf.checkpoints import folders
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.checkpoints.saved_config import read_saved_config
from rlinf.cluster.factory import describe_places, env_maker
from rlinf.cluster.reservation import Reservation, reserved
from rlinf.cluster.rollout_worker import worker_maker
from rlinf.cluster.rollout_workers import RemoteEpisodes, RolloutWorkers
from rlinf.commands.open_checkpoint import open_checkpoint, policy_for
from rlinf.commands.ranks import prepare_rank, reject_expandable_segments
from rlinf.config.saved_code import code_overrides
from rlinf.config.schema import RunConfig
from rlinf.data.filters import needs_outcomes
from rlinf.data.formats import open_dataset
from rlinf.data.stored import StoredDemonstrations
from rlinf.distributed.deadlines import DeadlineError, deadline
from rlinf.distributed.deferred import deferred_parameters
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import (
    Parallel,
    empty_copy,
    make_parallel,
    rank_memory_bytes,
    read_deferred,
    take_weights_of_rank_0,
)
from rlinf.distributed.process_group import (
    barrier,
    broadcast_object,
    local_world_size,
    rank,
    resolve_device,
    set_num_threads,
    world_size,
)
from rlinf.distributed.ray.watch import cluster_lost
from rlinf.distributed.start import started_here
from rlinf.distributed.sums import maximum
from rlinf.engines.config import VllmOptions
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, NonFiniteError, RankKilledError, RLinfError
from rlinf.evaluation.config import TRAINING_SPLIT
from rlinf.evaluation.fingerprint import NUM_EPISODES, compare_fingerprints, take_fingerprint
from rlinf.files import locked_folder
from rlinf.memory import num_cores
from rlinf.models.base_weights import trained_names
from rlinf.models.weights_in_files import check_read, how_read
from rlinf.number_formats import format_count
from rlinf.options import override_text, to_mapping
from rlinf.preflight.derived import format_derived, sharding_choice, trains_actor
from rlinf.preflight.memory import estimate_memory
from rlinf.preflight.placement import Placement, ranks_by_ray
from rlinf.preflight.saved import changes_since
from rlinf.rollout.policy_skeleton import PolicySkeleton
from rlinf.rollout.weight_push import WeightPush
from rlinf.run_folder import CHECKPOINTS_FOLDER, FAILED_BATCH_FOLDER
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker
from rlinf.training.action_trainer import ActionTrainer, TrainerContext
from rlinf.training.cloning_trainer import CloningTrainer, compare_with_statistics
from rlinf.training.collapse import RolledBack, rollbacks_of
from rlinf.training.evaluator import Evaluator
from rlinf.training.loop import Loop
from rlinf.training.outcome import write_failed_batch, write_summary
from rlinf.training.profile_window import ProfileWindow
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal
from rlinf.training.train_worker import TrainWorker, rl_trainer_config, sft_trainer_config

logger = logging.getLogger("rlinf")

MOST_ENVS_PER_CORE = 1024
"""More are warned of: they are more likely a slip of the keyboard than meant."""


@dataclass
class Run:
    """One rank of one run. ``train`` and ``sft`` start it on every rank.

    Attributes:
        parts: What the trainers are made of.
        cloning: Clones; None: the run does no cloning, or has done it.
        rl: Improves the policy; None: the run is one of cloning only.
    """

    parts: TrainerContext
    cloning: CloningTrainer | None
    rl: ActionTrainer | None

    @property
    def loop(self) -> Loop:
        """Runs the trainers."""
        return self.parts.loop

    def close(self) -> None:
        """Close the env of the evaluations and an engine, then what the loop writes to, even if some of that fails."""
        with self._closing():
            pass

    @contextmanager
    def _closing(self) -> Iterator[None]:
        with self.loop, ExitStack() as stack:  # calls the last one first
            stack.callback(self.parts.evaluator.env.close)
            if self.parts.sync.generator is not None:
                stack.callback(self.parts.sync.generator.close)
            for trainer in filter(None, (self.cloning, self.rl)):
                stack.callback(trainer.close)
            yield

    def execute(self) -> None:
        """Run behaviour cloning and RL as configured, then write summary and report."""
        parts, loop, rl = self.parts, self.loop, self.rl
        who = None
        with self._closing(), self._reporting():
            engine = getattr(parts.sync.generator, "engine", None)
            if engine is not None:
                engine.start()  # its faults show before the hours of cloning
            if rl is not None:
                with deadline("start"):
                    rl.wait_until_ready()
                who = rl.rollout_workers()
                if rank() == 0:
                    print(f"rollouts of each rank: played by {who}", flush=True)
            if self.cloning is not None:
                loop.fit(self.cloning)
                self.cloning.close()
            if rl is not None:
                loop.fit(rl)
        if rank() == 0:
            write_summary(parts.config, loop.state, loop.checkpoints.names(), who)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Write the batch whose loss or gradient was not finite."""
        try:
            yield
        except NonFiniteError as error:
            failed, folder = self.parts.worker.failed_batch, self.loop.folder / FAILED_BATCH_FOLDER
            if failed is not None:
                if rank() == failed.rank:
                    write_failed_batch(failed, folder)
                barrier()  # the first rank that fails ends the others, so all wait until the report is there
                error.add_note(f"Report of the batch: {folder}")
            raise


@deadline("start")
def build(config: RunConfig, reservation: Reservation | None = None) -> Run:
    """Build the parts of one rank. The configuration is validated and has its ``output_dir``."""
    device = resolve_device(config.cluster.device, 1)  # of this rank, which sees one GPU
    memory = -int(*maximum(-rank_memory_bytes(device, local_world_size())))  # of the poorest rank
    set_num_threads(config.cluster.num_threads, local_world_size())
    recomputed = _fit_to_gpu(config, memory) if device == "cuda" else 0
    seed_everything(config.seed, config.trainer.deterministic)
    resumed_from, state = _where_to_begin(config)
    has_rollout_workers = reservation is not None and reservation.group is not None
    if reservation is not None and (has_rollout_workers or config.cluster.num_env_workers):
        reservation.join()  # env nodes are in the same cluster
    env = _evaluation_env(config, state)
    if rank() == 0 and config.cluster.num_env_workers:
        print(f"simulators: {describe_places(env)}", flush=True)
    dataset = _dataset(config, env, state, resumed_from)
    with torch.random.fork_rng(devices=[]):  # only rank 0 takes it, and an env may draw from torch's generator
        fingerprint = take_fingerprint(env) if rank() == 0 and config.evaluation.probe else None
    model, fps = _policy(config, env, dataset, resumed_from, fingerprint)
    if dataset is not None:
        compare_with_statistics(model, dataset, config.env.name)
    if recomputed:
        from rlinf.models.layers import find_layers, set_training_options  # imports torch's compiler

        if find_layers(model):
            set_training_options(model, recomputed=recomputed, compiled=config.model.compile)
    parallel, sync = _on_ranks(config, model, device, memory, reservation if has_rollout_workers else None)
    workers = sync.generator if isinstance(sync.generator, RolloutWorkers) else None
    worker = _worker(config, parallel, state)
    if resumed_from is not None:
        checkpoints.load_checkpoint(resumed_from, model=model, optimizer=worker.optimizer)
    stop_signal = StopSignal(announce=rank() == 0)
    folder = Path(config.output_dir)
    loop = Loop(
        state,
        folder,
        config.trainer,
        to_mapping(config),
        checkpoints=CheckpointManager(
            folder, save_mode=config.trainer.save_mode, max_keep=config.trainer.max_keep, latest=_latest_of(folder)
        ),
        stop_signal=stop_signal,
        progress=Progress(enabled=rank() == 0, updates=config.tracking.progress),
        resumed_from=resumed_from,
    )
    phase = "rl" if config.trainer.max_steps > 0 else "sft"
    loop.profile_window = ProfileWindow(config.trainer.profile_steps, phase, folder, rank())
    episodes = None if workers is None else RemoteEpisodes(workers, config.evaluation.num_envs)
    evaluator = Evaluator(config, env, stop_signal, worker.autocast, episodes)
    parts = TrainerContext(config, loop, worker, sync, evaluator, fingerprint, fps)
    if config.trainer.max_steps == 0:
        run = Run(parts, CloningTrainer(parts, dataset, last_tag="after_sft"), None)
    else:
        cloning = CloningTrainer(parts, dataset) if state.phase == "sft" else None
        run = Run(parts, cloning, ALGORITHMS.get(config.algorithm.name).make_trainer(parts, env, workers))
    loop.tracker = _tracker(config, state, resumed_from) if rank() == 0 else None  # the first to write into the folder
    return run


def _latest_of(folder: Path) -> Path | None:
    """Return what ``outputs/<experiment>/latest`` or ``multirun/<experiment>/latest`` is to name: a run, or the sweep around it."""
    names = [path.name for path in folder.absolute().parents]
    return folder if names[1:2] == ["outputs"] else folder.parent if names[2:3] == ["multirun"] else None


def _fit_to_gpu(config: RunConfig, memory: int) -> bool | int:
    """Return how many blocks are recomputed on a GPU of ``memory`` bytes. Raise ConfigError if the run does not fit there.

    Rank 0 estimates, which takes up to a minute, and all ranks return or raise its result.
    """
    recomputed, rejection = broadcast_object(_ask_gpu(config, memory) if rank() == 0 else None, 0)
    if rejection is not None:
        raise rejection
    return recomputed


def _ask_gpu(config: RunConfig, memory: int) -> tuple[bool | int, RLinfError | None]:
    from rlinf.preflight.gpu_memory import fit_to_gpu, measure  # imports torch's compiler

    try:
        measured = measure(config)
        recomputed = fit_to_gpu(config, memory, measured)
    except RLinfError as rejection:
        return 0, rejection
    if measured.unknown:
        print(f"memory of passes: unknown: {measured.unknown}", flush=True)
    if recomputed:
        which = "all blocks" if recomputed is True else f"the first {format_count(recomputed, 'block')}"
        chosen = measured.unknown and config.model.gradient_checkpointing == "auto"
        fix = "; if memory suffices without, set model.gradient_checkpointing=false" if chosen else ""
        print(f"activations: {which} are recomputed{fix}", flush=True)
    return recomputed, None


def _where_to_begin(config: RunConfig) -> tuple[Path | None, LoopState]:
    """Return the checkpoint that is resumed, if any, and the state of the run."""
    if config.resume is None:
        start = config.model.model_path
        if config.init_from is not None:  # `latest` may soon be another one
            start = _find_checkpoint(config.init_from)
        phase = "sft" if config.sft.max_steps > 0 else "rl"
        return None, LoopState(phase=phase, start=None if start is None else str(start))
    folder = _find_checkpoint(config.resume)
    saved, typed = folders.read_loop_state(folder), config.trainer.learning_rate
    state = LoopState(**saved | {"rollbacks": rollbacks_of(folder, saved, typed)})
    if rank() == 0 and state.rollbacks and config.trainer.max_steps > 0:
        rate = rl_trainer_config(config.trainer, state.rollbacks).learning_rate
        print(
            f"learning rate of RL: {rate:g} = {typed:g} / 2^{state.rollbacks}, because the run has gone back to its best "
            "checkpoint; another trainer.learning_rate is taken as it is",
            flush=True,
        )
    return folder, state


def _find_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint (a collective call)."""
    return checkpoints.on_rank_zero(lambda: folders.resolve_checkpoint(path), f"read {path}")


def _evaluation_env(config: RunConfig, state: LoopState) -> VectorEnv:
    num_envs = config.evaluation.num_envs
    # While the expert plays, every rank has all of them: the order of the demonstrations depends on their number.
    if state.phase != "sft" or config.sft.dataset is not None:
        num_envs = max(-(-num_envs // world_size()), min(num_envs, NUM_EPISODES))
    return env_maker(config, local_world_size())(num_envs, auto_reset=False)


def _dataset(
    config: RunConfig, env: VectorEnv, state: LoopState, resumed_from: Path | None
) -> StoredDemonstrations | None:
    """Open the dataset that is cloned; raise CheckpointError if the resumed run has cloned another one. Record its hash in the state."""
    if state.phase != "sft":
        return None
    sft = config.sft
    dataset = open_dataset(sft, env, outcomes=needs_outcomes(sft)) if sft.dataset else None
    digest = None if dataset is None else dataset.digest()
    if needs_outcomes(sft):
        digest = f"{digest} {sft.filter} {sft.intervention_weight}"
    if sft.advantage_top_fraction is not None:
        digest = f"{digest} {sft.advantage_top_fraction} {sft.advantage_steps}"
    if resumed_from is not None and state.dataset != digest:
        raise CheckpointError(
            f"{resumed_from} has cloned other demonstrations than sft.dataset={override_text(config.sft.dataset)} "
            "(other rows, tasks or statistics). Set sft.dataset=<the dataset of the run>, or start a new run with "
            f"init_from={config.resume} resume=null output_dir=<a new folder>"
        )
    state.dataset = digest
    return dataset


def _policy(
    config: RunConfig,
    env: VectorEnv,
    dataset: StoredDemonstrations | None,
    resumed_from: Path | None,
    fingerprint: dict[str, Any] | None,
) -> tuple[torch.nn.Module, float | None]:
    """Build the policy, or load the one that is resumed or started with, whose conditions must fit.

    Also return the rate of the dataset that it clones, or had cloned before.
    """
    source, trainer = resumed_from or config.init_from, config.trainer
    fps = None if dataset is None else dataset.info.fps
    # Ranks that share the weights read them once it is known who holds what.
    may_shard = trainer.sharding == "auto" and world_size() > 1 and not trains_actor(config)
    deferred = trainer.sharding == "fsdp2" or trainer.cpu_offload or may_shard
    if source is None:
        return policy_for(config, env, dataset, deferred), fps
    # A new run may continue in another env or precision; a resumed one may not.
    free = [] if resumed_from is not None else ["env", "precision", "lora", "renderer"]
    if resumed_from is None and config.sft.max_steps > 0 and config.sft.advantage_top_fraction is not None:
        free.append("preprocessing.prompt_suffix")  # which this run teaches
    allowed = [*config.evaluation.allow_mismatch, *free]
    opened = open_checkpoint(source, config, allowed, resumes=resumed_from is not None, deferred=deferred)
    for line in compare_fingerprints(opened.manifest.probe, fingerprint):
        logger.warning("the simulator has changed since %s was made: %s", opened.folder, line)
    return opened.policy, opened.manifest.fps if dataset is None else fps


def _on_ranks(
    config: RunConfig, model: torch.nn.Module, device: str, memory: int, reservation: Reservation | None
) -> tuple[Parallel, WeightPush]:
    """Replicate or shard the policy, and make the rollout worker: the policy itself, or copies that the first push fills.

    ``memory`` are the bytes of a rank.
    """
    trainer, rollout = config.trainer, config.rollout
    choice = sharding_choice(config, model, world_size(), memory)
    if rank() == 0:
        print(f"{choice}; {how_read(model)}" if choice.sharded else choice, flush=True)
    sources = deferred_parameters(model)
    if not choice.sharded:
        read_deferred(model, sources, "cpu")
    take_weights_of_rank_0(model)
    trained = trained_names(model)
    shell = None if reservation is None else PolicySkeleton.of(model)
    has_engine = shell is None and rollout.backend == "vllm" and trainer.max_steps > 0
    options = _engine_options(config, model, memory) if has_engine and device == "cuda" else rollout.vllm
    # Where rollout workers have the copies, a rank's own copy describes the policy and holds no numbers.
    rollout_model = empty_copy(model, device if shell is None else "meta") if choice.sharded else model
    parallel = make_parallel(
        model, device, choice.sharded, shard_size=trainer.shard_size, cpu_offload=trainer.cpu_offload
    )
    checkpoints.on_every_rank(lambda: check_read(model, sources), "read the weights")
    generator: Any = None
    if shell is not None:
        placement = Placement.of(config)
        generator = RolloutWorkers(
            worker_maker(config, shell, placement), config.cluster, placement, reservation, model
        )
    elif has_engine:
        from rlinf.rollout.vllm_policy import VllmPolicy  # imports transformers

        envs_per_rank = rollout.num_envs // world_size()
        generator = VllmPolicy(rollout_model, options, envs_per_rank, torch.get_num_threads(), trained)
    return parallel, WeightPush(model, rollout_model, generator)


def _engine_options(config: RunConfig, model: torch.nn.Module, memory: int) -> VllmOptions:
    from rlinf.preflight.gpu_memory import engine_options  # imports torch's compiler

    return engine_options(config, estimate_memory(config, memory, model), memory)


def _worker(config: RunConfig, parallel: Parallel, state: LoopState) -> TrainWorker:
    in_sft = state.phase == "sft"
    rl = rl_trainer_config(config.trainer, state.rollbacks)
    settings = sft_trainer_config(config.trainer, config.sft) if in_sft else rl
    is_frozen = not in_sft and ALGORITHMS.get(config.algorithm.name).freezes_policy  # masters would be for nothing
    worker = TrainWorker(
        parallel.model,
        None if is_frozen else settings,
        temperature=config.rollout.temperature,
        micro_batch_size=config.model.micro_batch_size,
        val_micro_batch_size=config.model.val_micro_batch_size,
        precision=config.model.precision,
        parallel=parallel,
    )
    if worker.train_step is not None:
        worker.train_step.num_steps = state.sft_step if in_sft else state.policy_version - state.sft_step
    return worker


def _tracker(config: RunConfig, state: LoopState, resumed_from: Path | None) -> Tracker:
    folder = Path(config.output_dir)
    if resumed_from is not None and resumed_from.parent.resolve() == (folder / CHECKPOINTS_FOLDER).resolve():
        checkpoints.set_aside_later(resumed_from)
    tracker = Tracker(
        folder,
        config.tracking,
        to_mapping(config),
        run_id=state.tracker_run_id,
        resume_step=None if resumed_from is None else state.done,
        resume_phase=state.phase,
    )
    state.tracker_run_id = tracker.run_id
    return tracker


def _execute_rank(work: tuple[RunConfig, Reservation | None]) -> None:
    config, reservation = work
    prepare_rank(config)
    has_engine = config.rollout.backend == "vllm" and (reservation is None or reservation.group is None)
    if has_engine and resolve_device(config.cluster.device, 1) == "cuda":
        reject_expandable_segments()
    run = build(config, reservation)
    if rank() == 0:
        announce(config)
    while (back := _execute(run, config)) is not None:
        config = replace(config, resume=str(back.checkpoint), init_from=None)
        if rank() == 0:  # at once: a run that is killed while it builds must not resume the checkpoints that it left
            checkpoints.set_aside_later(back.checkpoint)
        run = build(config, reservation)


def announce(config: RunConfig) -> None:
    """Print the numbers of a run that starts, what a resumed one changes, and what may be a slip of the keyboard."""
    print(format_derived(config), flush=True)
    if config.resume is not None:
        folder = folders.resolve_checkpoint(config.resume)
        for change in changes_since(read_saved_config(folder), config):
            print(f"changed since {folder.name}: {change}", flush=True)
    ranks, cores = started_here(config.cluster.num_processes), num_cores()
    if ranks > cores and not ranks_by_ray(config) and resolve_device(config.cluster.device, 1) == "cpu":
        print(f"warning: cluster.num_processes={ranks}, and this machine has {cores} cores for them", flush=True)
    envs_per_core = config.rollout.num_envs / cores
    if config.trainer.max_steps > 0 and envs_per_core > MOST_ENVS_PER_CORE:
        given = f"rollout.num_envs={config.rollout.num_envs} is {envs_per_core:,.0f} envs for each of {cores} cores"
        print(f"warning: {given}, which simulate them one after the other; each takes memory too", flush=True)
    if config.evaluation.split == "train":
        print(f"warning: {TRAINING_SPLIT}", flush=True)


def _execute(run: Run, config: RunConfig) -> RolledBack | None:
    """Execute one rank; returns where the run continues if it goes back, which a resumed run would do as well."""
    stop_signal = run.loop.stop_signal
    try:
        with stop_signal.handled():
            run.execute()
        return None
    except RolledBack as back:
        return back.with_traceback(None)  # which holds the policy
    except StopRequested as stop:
        if rank() == 0:
            words = f"rlinf train resume={run.loop.folder} {code_overrides(to_mapping(config))}".rstrip()
            way_on = f"continue with: {words}" if run.loop.checkpoints.names() else "nothing had been trained yet"
            print(f"\n{stop}; {way_on}", file=sys.stderr, flush=True)
        number = stop_signal.number
        sys.exit(1 if number is None else 128 + number)  # None: another rank received the signal


def train(config: RunConfig) -> Path:
    """Run an experiment: cloning if ``sft.max_steps`` > 0, evaluation, RL, evaluation, report.

    Where Ray has started the ranks and one is lost, all start again from the newest checkpoint,
    ``cluster.max_restarts`` times at most, and twice at most from the same one. Return the run folder. Raise
    ConfigError if another run writes there, or vLLM is to play in a process whose GPU memory it could not share;
    RankKilledError or DeadlineError if a rank was lost or silent and all may not start again.
    """
    with locked_folder(Path(config.output_dir)), reserved(config) as reservation:
        passed = _passed_over(config) if ranks_by_ray(config) else {}
        begun: list[str | None] = []
        for num_restarts in itertools.count():
            try:
                _launch(config, reservation)
                break
            except (RankKilledError, DeadlineError) as error:
                limit = config.cluster.max_restarts
                if not ranks_by_ray(config) or num_restarts == limit or cluster_lost() is not None:
                    raise
                try:
                    config = _resumed(config, passed)
                except CheckpointError as damage:
                    error.add_note(f"The ranks did not start again: {damage}")
                    raise error from None
                if begun[-2:] == [config.resume] * 2:
                    error.add_note(
                        f"The ranks did not start again: they had twice from {config.resume or 'the beginning'}, and got no further"
                    )
                    raise
                begun.append(config.resume)
                goes_on = f"from {config.resume}" if config.resume else "from the start: there is no checkpoint yet"
                logger.warning(
                    "%s\nAll ranks start again %s (%d of %d times).", error, goes_on, num_restarts + 1, limit
                )
    return Path(config.output_dir)


def _launch(config: RunConfig, reservation: Reservation | None) -> None:
    """Run an experiment on its ranks."""
    cluster = config.cluster
    alone = config.trainer.sharding == "fsdp2" or config.trainer.cpu_offload
    folders = (Path.cwd(), Path(config.output_dir))
    places = None if reservation is None else reservation.rank_places(cluster.deadlines.start, folders)
    if places is None:
        device = resolve_device(cluster.device, started_here(cluster.num_processes))
    else:
        device = "cuda" if reservation.ranks_on_gpu else "cpu"
    if device == "cuda" and config.rollout.backend == "torch":  # what an engine shares must not be in such segments
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    work = (config, reservation)
    launch(_execute_rank, work, cluster.num_processes, device, alone, asdict(cluster.deadlines), places)


def _passed_over(config: RunConfig) -> dict[Path, int]:
    """Return the checkpoints of this run's folder that are later than the one that it resumes, with their inodes."""
    begins = None if config.resume is None else folders.resolve_checkpoint(config.resume)
    if begins is None or begins.parent.resolve() != (Path(config.output_dir) / CHECKPOINTS_FOLDER).resolve():
        return {}
    return {path: path.stat().st_ino for path in folders.later_checkpoints(begins)}


def _resumed(config: RunConfig, passed: Mapping[Path, int]) -> RunConfig:
    """Return the configuration with which a run continues from its newest checkpoint, or starts again if it has none.

    Raise CheckpointError if all checkpoints are damaged.

    Args:
        passed: Checkpoints that the run has passed over. It sets them aside when it has read all that it needs, and may have
            been lost before.
    """
    if any(path.exists() and path.stat().st_ino == inode for path, inode in passed.items()):
        return config
    if not folders.has_checkpoints(Path(config.output_dir)):
        return config
    return replace(config, resume=str(folders.resolve_checkpoint(config.output_dir)), init_from=None)


def sft(config: RunConfig) -> Path:
    """Run the behaviour cloning of an experiment only."""
    return train(replace(config, trainer=replace(config.trainer, max_steps=0)))
