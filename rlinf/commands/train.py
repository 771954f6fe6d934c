"""Training, from a configuration to a finished run folder: builds all components and runs the trainers."""

import gc
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
from rlinf.checkpoints.folders import read_saved_config
from rlinf.cluster.factory import describe_places, env_maker
from rlinf.cluster.reservation import Reservation, reserved
from rlinf.cluster.rollout_worker import worker_maker
from rlinf.cluster.rollout_workers import RemoteEpisodes, RolloutWorkers
from rlinf.commands.fresh import evaluate_chosen
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
    maximum,
    rank,
    resolve_device,
    set_num_threads,
    world_size,
)
from rlinf.distributed.ray.watch import cluster_lost
from rlinf.distributed.start import started_here
from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, NonFiniteError, RankKilledError, RLinfError
from rlinf.evaluation.config import TRAINING_SPLIT
from rlinf.evaluation.fingerprint import NUM_EPISODES, compare_fingerprints, take_fingerprint
from rlinf.files import Json, locked_folder
from rlinf.memory import num_cores
from rlinf.models.base_weights import trained_names
from rlinf.models.weights_in_files import check_read, how_read
from rlinf.number_formats import format_count
from rlinf.options import override_text, to_mapping
from rlinf.preflight.derived import format_derived, sharding_choice, trains_actor
from rlinf.preflight.memory import estimate_memory
from rlinf.preflight.placement import Placement, ranks_by_ray
from rlinf.preflight.saved import changes_since
from rlinf.rollout.config import VllmOptions
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
from rlinf.training.rl_trainer import make_trainer
from rlinf.training.state import LoopState
from rlinf.training.stop_signal import StopRequested, StopSignal
from rlinf.training.train_worker import TrainWorker, rl_trainer_config, sft_trainer_config

logger = logging.getLogger("rlinf")

MOST_ENVS_PER_CORE = 1024
"""Above this number, a warning is printed because it is probably a typo."""


@dataclass
class Run:
    """One rank of a run.

    Attributes:
        parts: Components that the trainers have in common.
        cloning: None: not configured, or done.
        rl: None: ``rlinf sft``.
        fresh: Numbers of the episodes for the chosen checkpoint, see ``EvaluationConfig.fresh_episodes``.
        rollout_workers: Describes this rank's rollout workers once RL has started.
    """

    parts: TrainerContext
    cloning: CloningTrainer | None
    rl: ActionTrainer | None
    fresh: range = range(0)
    rollout_workers: str | None = None

    @property
    def loop(self) -> Loop:
        """The run's training loop."""
        return self.parts.loop

    def close(self) -> None:
        """Close trainers, engine, evaluation env and loop, even if one of them fails."""
        with self._closing():
            pass

    @contextmanager
    def _closing(self) -> Iterator[None]:
        # The stack closes in reverse order: trainers first, because their threads still use the engine and the env.
        with self.loop, ExitStack() as stack:
            stack.callback(self.parts.evaluator.env.close)
            if self.parts.sync.generator is not None:
                stack.callback(self.parts.sync.generator.close)
            for trainer in filter(None, (self.cloning, self.rl)):
                stack.callback(trainer.close)
            yield

    def execute(self) -> None:
        """Run behaviour cloning and RL as configured."""
        parts, loop, rl = self.parts, self.loop, self.rl
        with self._closing(), self._reporting():
            # Start the engine and rollout workers before cloning, which may take hours, so that their errors appear immediately.
            engine = getattr(parts.sync.generator, "engine", None)
            if engine is not None:
                engine.start()
            if rl is not None:
                with deadline("start"):
                    rl.wait_until_ready()
                self.rollout_workers = rl.rollout_workers()
                if rank() == 0 and self.rollout_workers is not None:
                    print(f"rollout workers per rank: {self.rollout_workers}", flush=True)
            if self.cloning is not None:
                loop.fit(self.cloning)
                self.cloning.close()
            if rl is not None:
                loop.fit(rl)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """If a loss or gradient is not finite, write its batch to a folder."""
        try:
            yield
        except NonFiniteError as error:
            failed, folder = self.parts.worker.failed_batch, self.loop.folder / FAILED_BATCH_FOLDER
            if failed is not None:
                if rank() == failed.rank:
                    write_failed_batch(failed, folder)
                # All ranks end as soon as one exits, so wait until the report is written.
                barrier()
                error.add_note(f"Report of the batch: {folder}")
            raise


@deadline("start")
def build(config: RunConfig, reservation: Reservation | None = None) -> Run:
    """Build one rank's components from a validated configuration whose ``output_dir`` is set."""
    # Memory, env, dataset, policy, ranks, worker, loop: each depends on those before it.
    # - Memory: a run that does not fit ends before simulators start and weights are read; sharding depends on the smallest GPU. The
    #   estimate builds a model and draws random numbers on rank 0 only, so the seed is set after it.
    # - Env: the number of envs depends on the phase of the state. Env workers are in the Ray cluster of the reservation.
    # - Dataset: its cameras, state and actions are checked against the env.
    # - Policy: needs action bounds (env), statistics (dataset), and the fingerprint, to compare it with a checkpoint's.
    # - Ranks: sharding replaces the policy's parameters, so the worker's optimiser comes later; a checkpoint is read into the shards.
    # - Tracker: last, because it writes metrics, and a run that fails to build must not leave any.
    device = resolve_device(config.cluster.device, 1)  # of this rank, which sees one GPU
    memory = -int(*maximum(-rank_memory_bytes(device, local_world_size())))
    set_num_threads(config.cluster.num_threads, local_world_size())
    recomputed = _fit_to_gpu(config, memory) if device == "cuda" else 0
    seed_everything(config.seed, config.trainer.deterministic)
    resumed_from, state = _starting_point(config)
    has_rollout_workers = reservation is not None and reservation.group is not None
    if reservation is not None and (has_rollout_workers or config.cluster.num_env_workers):
        reservation.join()
    env = _evaluation_env(config, state)
    end = max((summary.get("end_episode", 0) for summary in state.evaluations.values()), default=0)
    fresh = config.evaluation.fresh_episodes(len(env.episode_specs(config.evaluation.split)), end)
    dataset = _dataset(config, env, state, resumed_from)
    fingerprint = _fingerprint(config, env)
    model, fps = _policy(config, env, dataset, resumed_from, fingerprint)
    if dataset is not None:
        compare_with_statistics(model, dataset, config.env.name)
    _recompute(config, model, recomputed)
    parallel, sync = _distribute(config, model, device, memory, reservation if has_rollout_workers else None)
    worker = _worker(config, parallel, state, resumed_from)
    loop = _loop(config, state, resumed_from)
    workers = sync.generator if isinstance(sync.generator, RolloutWorkers) else None
    episodes = None if workers is None else RemoteEpisodes(workers, config.evaluation.num_envs)
    evaluator = Evaluator(config, env, loop.stop_signal, worker.autocast, episodes)
    run = _run(TrainerContext(config, loop, worker, sync, evaluator, fingerprint, fps), dataset, workers, fresh)
    loop.tracker = _tracker(config, state, resumed_from) if rank() == 0 else None
    return run


def _fingerprint(config: RunConfig, env: VectorEnv) -> dict[str, Any] | None:
    """Return the fingerprint of the simulator on rank 0, otherwise None."""
    # An env may draw from torch's generator: keep the ranks' generators equal.
    with torch.random.fork_rng(devices=[]):
        return take_fingerprint(env) if rank() == 0 and config.evaluation.probe else None


def _recompute(config: RunConfig, model: torch.nn.Module, recomputed: bool | int) -> None:
    """Set the number of layers whose activations are recomputed."""
    if recomputed:
        from rlinf.models.layers import find_layers, set_training_options  # imports torch's compiler

        if find_layers(model):
            set_training_options(model, recomputed=recomputed, compiled=config.model.compile)


def _loop(config: RunConfig, state: LoopState, resumed_from: Path | None) -> Loop:
    """Return the training loop, without its tracker."""
    folder, trainer = Path(config.output_dir), config.trainer
    loop = Loop(
        state,
        folder,
        trainer,
        to_mapping(config),
        checkpoints=CheckpointManager(
            folder, save_mode=trainer.save_mode, max_keep=trainer.max_keep, latest=_latest_target(folder)
        ),
        stop_signal=StopSignal(announce=rank() == 0),
        progress=Progress(enabled=rank() == 0, updates=config.tracking.progress),
        resumed_from=resumed_from,
    )
    loop.profile_window = ProfileWindow(trainer.profile_steps, "rl" if trainer.max_steps > 0 else "sft", folder, rank())
    return loop


def _run(
    parts: TrainerContext, dataset: StoredDemonstrations | None, workers: RolloutWorkers | None, fresh: range
) -> Run:
    """Create the trainers of the run's remaining phases."""
    if parts.config.trainer.max_steps == 0:
        return Run(parts, CloningTrainer(parts, dataset, last_tag="after_sft"), None, fresh)
    cloning = CloningTrainer(parts, dataset) if parts.loop.state.phase == "sft" else None
    return Run(parts, cloning, make_trainer(parts, parts.evaluator.env, workers), fresh)


def _latest_target(folder: Path) -> Path | None:
    """Return the target of ``outputs/<experiment>/latest`` or ``multirun/<experiment>/latest``: a run, or the sweep around it."""
    names = [path.name for path in folder.absolute().parents]
    return folder if names[1:2] == ["outputs"] else folder.parent if names[2:3] == ["multirun"] else None


def _fit_to_gpu(config: RunConfig, memory: int) -> bool | int:
    """Return the number of recomputed layers for a GPU of ``memory`` bytes; raise ConfigError if the run does not fit."""
    # Only rank 0 estimates, which takes up to a minute. Its error is broadcast, because the remaining ranks would hang otherwise.
    recomputed, error = broadcast_object(_estimate_fit(config, memory) if rank() == 0 else None, 0)
    if error is not None:
        raise error
    return recomputed


def _estimate_fit(config: RunConfig, memory: int) -> tuple[bool | int, RLinfError | None]:
    from rlinf.preflight.gpu_memory import fit_to_gpu, measure  # imports torch's compiler

    try:
        measured = measure(config)
        recomputed = fit_to_gpu(config, memory, measured)
    except RLinfError as error:
        return 0, error
    if measured.unknown:
        print(f"memory of passes: unknown: {measured.unknown}", flush=True)
    if recomputed:
        which = "all layers" if recomputed is True else f"the first {format_count(recomputed, 'layer')}"
        is_guess = measured.unknown and config.model.gradient_checkpointing == "auto"
        hint = "; if memory suffices without this, set model.gradient_checkpointing=false" if is_guess else ""
        print(f"activations: {which} are recomputed{hint}", flush=True)
    return recomputed, None


def _starting_point(config: RunConfig) -> tuple[Path | None, LoopState]:
    """Return the checkpoint to resume, if any, and the state of the run."""
    if config.resume is None:
        start = config.model.model_path
        if config.init_from is not None:  # resolved now: `latest` may soon be a different run
            start = _find_checkpoint(config.init_from)
        phase = "sft" if config.sft.max_steps > 0 else "rl"
        return None, LoopState(phase=phase, start=None if start is None else str(start))
    folder = _find_checkpoint(config.resume)
    saved, typed = folders.read_loop_state(folder), config.trainer.learning_rate
    state = LoopState(**saved | {"rollbacks": rollbacks_of(folder, saved, typed)})
    if rank() == 0 and state.rollbacks and config.trainer.max_steps > 0:
        rate = rl_trainer_config(config.trainer, state.rollbacks).learning_rate
        print(
            f"RL learning rate: {rate:g} = {typed:g} / 2^{state.rollbacks}, because the run was rolled back to its best "
            "checkpoint; set trainer.learning_rate explicitly to override",
            flush=True,
        )
    return folder, state


def _find_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint (a collective call)."""
    return checkpoints.on_rank_zero(lambda: folders.resolve_checkpoint(path), f"read {path}")


def _evaluation_env(config: RunConfig, state: LoopState) -> VectorEnv:
    num_envs = config.evaluation.num_envs
    # While the expert collects demonstrations, every rank has all envs, because their number affects the order of demonstrations.
    if state.phase != "sft" or config.sft.dataset is not None:
        num_envs = max(-(-num_envs // world_size()), min(num_envs, NUM_EPISODES))
    env = env_maker(config, local_world_size())(num_envs, auto_reset=False)
    if rank() == 0 and config.cluster.num_env_workers:
        print(f"simulators: {describe_places(env)}", flush=True)
    return env


def _dataset(
    config: RunConfig, env: VectorEnv, state: LoopState, resumed_from: Path | None
) -> StoredDemonstrations | None:
    """Open the dataset to clone, and record its hash in the state; raise CheckpointError if a resumed run cloned a different one."""
    if state.phase != "sft":
        return None
    sft = config.sft
    dataset = open_dataset(sft, env, outcomes=needs_outcomes(sft)) if sft.dataset else None
    digest = None if dataset is None else dataset.digest()
    if needs_outcomes(sft):
        digest = f"{digest} {sft.filter} {sft.intervention_weight}"
    if sft.advantage_top_fraction is not None:
        digest = f"{digest} {sft.advantage_top_fraction} {sft.advantage_steps}"
    if resumed_from is not None and state.trainer.get("dataset") != digest:
        raise CheckpointError(
            f"{resumed_from} has cloned different demonstrations from sft.dataset={override_text(config.sft.dataset)} "
            "(rows, tasks or statistics differ). Set sft.dataset=<the dataset of the run>, or start a new run with "
            f"init_from={config.resume} resume=null output_dir=<a new folder>"
        )
    state.trainer["dataset"] = digest
    return dataset


def _policy(
    config: RunConfig,
    env: VectorEnv,
    dataset: StoredDemonstrations | None,
    resumed_from: Path | None,
    fingerprint: Json | None,
) -> tuple[torch.nn.Module, float | None]:
    """Build the policy, or load it from ``resume`` or ``init_from``; also return the frame rate of the cloned dataset."""
    source, trainer = resumed_from or config.init_from, config.trainer
    fps = None if dataset is None else dataset.info.fps
    # Sharded ranks read only their own shards of the weights, once the sharding is known.
    may_shard = trainer.sharding == "auto" and world_size() > 1 and not trains_actor(config)
    deferred = trainer.sharding == "fsdp2" or trainer.cpu_offload or may_shard
    if source is None:
        return policy_for(config, env, dataset, deferred), fps
    # A new run may use a different env or precision than its initial checkpoint; a resumed run may not.
    free = [] if resumed_from is not None else ["env", "precision", "lora", "renderer"]
    if resumed_from is None and config.sft.max_steps > 0 and config.sft.advantage_top_fraction is not None:
        free.append("preprocessing.prompt_suffix")  # the policy learns the suffix in this run
    allowed = [*config.evaluation.allow_mismatch, *free]
    opened = open_checkpoint(source, config, allowed, resumes=resumed_from is not None, deferred=deferred)
    for line in compare_fingerprints(opened.manifest.probe, fingerprint):
        logger.warning("the simulator has changed since %s was written: %s", opened.folder, line)
    return opened.policy, opened.manifest.fps if dataset is None else fps


def _distribute(
    config: RunConfig, model: torch.nn.Module, device: str, memory: int, reservation: Reservation | None
) -> tuple[Parallel, WeightPush]:
    """Replicate or shard the policy for ranks with ``memory`` bytes, and create the rollout policy (the first push fills copies)."""
    trainer, rollout = config.trainer, config.rollout
    choice = sharding_choice(config, model, world_size(), memory)
    if rank() == 0:
        print(f"{choice}; {how_read(model)}" if choice.sharded else choice, flush=True)
    sources = deferred_parameters(model)
    if not choice.sharded:
        read_deferred(model, sources, "cpu")
    take_weights_of_rank_0(model)
    trained = trained_names(model)
    skeleton = None if reservation is None else PolicySkeleton.of(model)
    has_engine = skeleton is None and rollout.backend == "vllm" and trainer.max_steps > 0
    options = _engine_options(config, model, memory) if has_engine and device == "cuda" else rollout.vllm
    # With rollout workers, the rank's own copy only describes the policy: keep it on the meta device, without memory.
    rollout_model = empty_copy(model, device if skeleton is None else "meta") if choice.sharded else model
    parallel = make_parallel(
        model, device, choice.sharded, shard_size=trainer.shard_size, cpu_offload=trainer.cpu_offload
    )
    checkpoints.on_every_rank(lambda: check_read(model, sources), "read the weights")
    generator: Any = None
    if skeleton is not None:
        placement = Placement.of(config)
        make = worker_maker(config, skeleton, placement)
        generator = RolloutWorkers(make, config.cluster, placement, reservation, model)
    elif has_engine:
        from rlinf.rollout.vllm_policy import VllmPolicy  # imports transformers

        envs_per_rank = rollout.num_envs // world_size()
        generator = VllmPolicy(rollout_model, options, envs_per_rank, torch.get_num_threads(), trained)
    merges = rollout.merge_adapters and trainer.max_steps > 0 and skeleton is None  # rollout workers merge themselves
    return parallel, WeightPush(model, rollout_model, generator, merges)


def _engine_options(config: RunConfig, model: torch.nn.Module, memory: int) -> VllmOptions:
    from rlinf.preflight.gpu_memory import engine_options  # imports torch's compiler

    return engine_options(config, estimate_memory(config, memory, model), memory)


def _worker(config: RunConfig, parallel: Parallel, state: LoopState, resumed_from: Path | None) -> TrainWorker:
    """Return the worker with its optimiser; both policy and optimiser are read from the checkpoint to resume."""
    in_sft = state.phase == "sft"
    rl = rl_trainer_config(config.trainer, state.rollbacks)
    settings = sft_trainer_config(config.trainer, config.sft) if in_sft else rl
    # A frozen policy needs no optimiser, whose float32 master weights would waste memory.
    is_frozen = not in_sft and ALGORITHMS.get(config.algorithm.name).freezes_policy
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
    if resumed_from is not None:
        checkpoints.load_checkpoint(resumed_from, model=parallel.model, optimizer=worker.optimizer)
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
    while (rollback := _execute(run, config)) is not None:
        config = replace(config, resume=str(rollback.checkpoint), init_from=None)
        # Before the build, because a run killed while building must not resume the discarded checkpoints.
        if rank() == 0:
            checkpoints.set_aside_later(rollback.checkpoint)
        run = build(config, reservation)
    state, names, fresh, workers = run.loop.state, run.loop.checkpoints.names(), run.fresh, run.rollout_workers
    can_sample, on_workers = run.parts.sync.rollout_model.num_uniforms > 0, run.parts.evaluator.episodes is not None
    del run
    gc.collect()  # the chosen checkpoint is loaded into the memory of the trained policy
    torch.cuda.empty_cache()  # simulators do not use torch's allocator
    try:
        chosen = evaluate_chosen(config, state, names, fresh, can_sample, on_workers)
    except Exception as error:
        command = f"rlinf train resume={config.output_dir} evaluation.num_fresh_episodes=0"
        error.add_note(f"Training is complete. To write its summary without the fresh evaluation, run {command}")
        raise
    if rank() == 0:
        write_summary(config, state, names, chosen, workers)


def announce(config: RunConfig) -> None:
    """Print the plan of a run, the changes of a resumed one, and warnings about probable typos."""
    print(format_derived(config), flush=True)
    if config.resume is not None:
        folder = folders.resolve_checkpoint(config.resume)
        for change in changes_since(read_saved_config(folder), config):
            print(f"changed since {folder.name}: {change}", flush=True)
    ranks, cores = started_here(config.cluster.num_processes), num_cores()
    if ranks > cores and not ranks_by_ray(config) and resolve_device(config.cluster.device, 1) == "cpu":
        print(f"warning: cluster.num_processes={ranks} on a machine with {cores} cores", flush=True)
    envs_per_core = config.rollout.num_envs / cores
    if config.trainer.max_steps > 0 and envs_per_core > MOST_ENVS_PER_CORE:
        ratio = f"rollout.num_envs={config.rollout.num_envs} is {envs_per_core:,.0f} envs per core ({cores} cores)"
        print(f"warning: {ratio}; each core steps its envs one after the other, and every env uses memory", flush=True)
    if config.evaluation.split == "train":
        print(f"warning: {TRAINING_SPLIT}", flush=True)


def _execute(run: Run, config: RunConfig) -> RolledBack | None:
    """Execute one rank; return a rollback if the run must continue from an earlier checkpoint."""
    stop_signal = run.loop.stop_signal
    try:
        with stop_signal.handled():
            run.execute()
        return None
    except RolledBack as rollback:
        return rollback.with_traceback(None)  # the traceback would keep the policy in memory
    except StopRequested as stop:
        if rank() == 0:
            command = f"rlinf train resume={run.loop.folder} {code_overrides(to_mapping(config))}".rstrip()
            hint = f"continue with: {command}" if run.loop.checkpoints.names() else "nothing had been trained yet"
            print(f"\n{stop}; {hint}", file=sys.stderr, flush=True)
        number = stop_signal.number
        sys.exit(1 if number is None else 128 + number)  # None: a different rank received the signal


def train(config: RunConfig) -> Path:
    """Run an experiment (cloning if ``sft.max_steps`` > 0, evaluation, RL, evaluation, report) and return its folder.

    If at least two evaluated checkpoints competed, the best one is evaluated once more, on fresh episodes (``evaluate_chosen``).

    If Ray started the ranks and one is lost, all are restarted from the newest checkpoint, at most ``cluster.max_restarts`` times,
    and at most twice from the same checkpoint. Raise ConfigError if a different run is writing to the folder, or vLLM cannot share
    this process's GPU memory; RankKilledError or DeadlineError if a rank was lost or silent and no restart is left.
    """
    with locked_folder(Path(config.output_dir)), reserved(config) as reservation:
        passed = _passed_over(config) if ranks_by_ray(config) else {}
        starts: list[str | None] = []
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
                    error.add_note(f"The ranks were not restarted: {damage}")
                    raise error from None
                # Without progress, a third attempt would fail like the first two.
                if starts[-2:] == [config.resume] * 2:
                    origin = config.resume or "the start"
                    error.add_note(
                        f"The ranks were not restarted: giving up after two restarts from {origin} without progress"
                    )
                    raise
                starts.append(config.resume)
                origin = f"from {config.resume}" if config.resume else "from the start: there is no checkpoint yet"
                logger.warning("%s\nRestarting all ranks %s (%d of %d times).", error, origin, num_restarts + 1, limit)
    return Path(config.output_dir)


def _launch(config: RunConfig, reservation: Reservation | None) -> None:
    """Run an experiment on its ranks."""
    cluster = config.cluster
    needs_group = config.trainer.sharding == "fsdp2" or config.trainer.cpu_offload
    folders = (Path.cwd(), Path(config.output_dir))
    places = None if reservation is None else reservation.rank_places(cluster.deadlines.start, folders)
    if places is None:
        device = resolve_device(cluster.device, started_here(cluster.num_processes))
    else:
        device = "cuda" if reservation.ranks_on_gpu else "cpu"
    # An engine cannot share memory in expandable segments, so use them only for the torch backend.
    if device == "cuda" and config.rollout.backend == "torch":
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    work = (config, reservation)
    launch(_execute_rank, work, cluster.num_processes, device, needs_group, asdict(cluster.deadlines), places)


def _passed_over(config: RunConfig) -> dict[Path, int]:
    """Return the checkpoints in this run's folder that are newer than the resumed one, with their inodes."""
    start = None if config.resume is None else folders.resolve_checkpoint(config.resume)
    if start is None or start.parent.resolve() != (Path(config.output_dir) / CHECKPOINTS_FOLDER).resolve():
        return {}
    return {path: path.stat().st_ino for path in folders.later_checkpoints(start)}


def _resumed(config: RunConfig, passed: Mapping[Path, int]) -> RunConfig:
    """Return the configuration that resumes the newest checkpoint; raise CheckpointError if all checkpoints are damaged."""
    # If the run was lost before it could set aside the checkpoints in `passed`, they still exist but must not be resumed.
    if any(path.exists() and path.stat().st_ino == inode for path, inode in passed.items()):
        return config
    if not folders.has_checkpoints(Path(config.output_dir)):
        return config
    return replace(config, resume=str(folders.resolve_checkpoint(config.output_dir)), init_from=None)


def sft(config: RunConfig) -> Path:
    """Run only the behaviour cloning stage of an experiment."""
    return train(replace(config, trainer=replace(config.trainer, max_steps=0)))
