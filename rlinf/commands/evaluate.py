"""Evaluates one policy: from a configuration to a table, a JSON file, videos and a report."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rlinf import run_folder
from rlinf.cluster.factory import env_maker
from rlinf.cluster.reservation import Reservation, reserved_places
from rlinf.cluster.rollout_worker import worker_maker
from rlinf.cluster.rollout_workers import RemoteEpisodes, RolloutWorkers
from rlinf.commands.evaluation_output import check_output, report_saved, write_result
from rlinf.commands.open_checkpoint import policy_before_rl
from rlinf.commands.open_evaluation import (
    OpenedPolicy,
    log_warnings,
    open_evaluation,
    sampling_settings,
    unknown_policy_warning,
)
from rlinf.commands.ranks import prepare_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import (
    gather_objects,
    local_world_size,
    rank,
    resolve_device,
    set_num_threads,
    world_size,
)
from rlinf.distributed.start import started_here
from rlinf.envs.base import VectorEnv
from rlinf.errors import RankKilledError
from rlinf.evaluation.baselines import baseline_table, evaluate_baselines
from rlinf.evaluation.config import EvaluationConfig
from rlinf.evaluation.evaluator import Episodes, EvaluationPlan, RankGroup, evaluate_policy, rank_slice
from rlinf.evaluation.fingerprint import NUM_EPISODES
from rlinf.evaluation.partial import PartialResults, num_saved
from rlinf.evaluation.recording import record_episodes, recording_failed
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import note_stopping, stop_rule
from rlinf.files import Json
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast
from rlinf.preflight.placement import Placement
from rlinf.report.compare_folders import compare_folders, evaluation_folder
from rlinf.report.run_page import write_report
from rlinf.rollout.policy_skeleton import PolicySkeleton
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")


def evaluate(config: RunConfig) -> EvaluationResult:
    """Evaluate ``config.checkpoint`` (a checkpoint, a run folder or an export), or the configured model if it is null.

    Prints a table, and writes ``result.json``, ``videos/``, ``episodes/``, ``config.yaml``, ``manifest.json`` and ``report.html`` to
    ``config.output_dir``; also ``compare.json`` with ``evaluation.compare``.
    Episodes are divided among ``cluster.num_processes`` ranks or ``cluster.num_rollout_workers`` rollout workers. Results are saved
    immediately: repeat the call with the same ``output_dir`` to resume an interrupted evaluation. If one of the ranks started here
    dies, all are restarted, as long as each start produced new results.

    Raise as ``open_policy`` does; ConfigError if the split or the comparison does not allow the episodes, or files in ``output_dir``
    would be overwritten; and RankError if a rank fails.
    """
    settings, output, cluster = config.evaluation, Path(config.output_dir), config.cluster
    check_output(output, evaluation_folder(settings.compare) if settings.compare else None)
    device = resolve_device(cluster.device, started_here(cluster.num_processes))
    count = -1
    with report_saved(output):
        while True:
            try:
                with _reserved(config) as reservation:
                    work, deadlines = (config, reservation), asdict(cluster.deadlines)
                    launch(evaluate_rank, work, cluster.num_processes, device, deadlines=deadlines)
                return EvaluationResult.from_json(output / run_folder.RESULT_FILE)
            except RankKilledError as error:
                before, count = count, num_saved(output)
                # No new results since the last start: the ranks would die at the same point again.
                if count <= max(before, 0):
                    raise
                logger.warning("%s\nRestarting the ranks; %d results are saved.", error, count)


def evaluate_rank(work: tuple[RunConfig, Reservation | None]) -> None:
    """Run this rank's fraction of the episodes, or all of them on rollout workers; rank 0 writes the result to ``output_dir``."""
    config, reservation = work
    prepare_rank(config)
    settings = config.evaluation
    set_num_threads(config.cluster.num_threads, local_world_size())
    seed_everything(config.seed, config.trainer.deterministic)
    if reservation is not None:
        reservation.join()  # env nodes belong to the rollout workers' cluster
    with ExitStack() as stack:
        env = env_maker(config, local_world_size())(_num_envs(settings, reservation is not None), auto_reset=False)
        stack.callback(env.close)
        episodes: Episodes | None = None
        device = resolve_device(config.cluster.device, 1)
        with deadline("start"):
            opened = open_evaluation(config, env)
            if reservation is None:
                opened.model = opened.model.to(device)
            else:
                workers = _rollout_workers(config, reservation, opened.model)
                stack.callback(workers.close)
                episodes = RemoteEpisodes(workers, _most_envs(settings))
            # Only rank 0 has the fingerprint of the simulator.
            opened.conditions = gather_objects(opened.conditions)[0]
        with (
            deadline("evaluate"),
            PartialResults(Path(config.output_dir), opened.conditions, rank()) as partial,
            autocast(opened.model, config.model.precision),
        ):
            run_episodes(config, env, opened, partial, episodes)


def run_episodes(
    config: RunConfig, env: VectorEnv, opened: OpenedPolicy, partial: PartialResults, episodes: Episodes | None = None
) -> EvaluationResult:
    """Run the episodes that are not in ``partial``, write the result, record episodes and write the report.

    ``episodes`` runs them elsewhere, e.g. on rollout workers or a robot. By default, they run in this process.
    """
    ranks = RankGroup(rank(), world_size(), lambda part: gather_objects(part()))
    settings, output, specs = config.evaluation, Path(config.output_dir), opened.specs
    known = gather_objects(partial.known)[0]
    if known and opened.is_unverified:
        opened.warnings.append(unknown_policy_warning(config.model.url, f"{len(known)} episodes"))
        log_warnings(opened.warnings[-1:])
    plan = EvaluationPlan(
        video_folder=output / run_folder.VIDEOS_FOLDER if settings.num_videos_per_task else None,
        num_videos_per_task=settings.num_videos_per_task,
        video_size=settings.video_size,
        known=known,
        ranks=ranks,
        episodes=episodes,
        stop=stop_rule(settings.stop_when, opened.before, len(specs)),
        look_every=_most_envs(settings),
    )
    progress = _Progress(partial, known, len(specs), config.tracking.progress, env.reports_success(env.config))
    result = evaluate_policy(opened.model, env, specs, **sampling_settings(config), on_result=progress.add, plan=plan)
    note_stopping(result, settings.stop_when, len(specs))
    if ranks.rank == 0:
        write_result(config, result, partial.earlier_s, opened.manifest, opened.warnings)
    recordings, count = output / run_folder.RECORDINGS_FOLDER, settings.record_episodes
    try:
        record_episodes(opened.model, env, result, recordings, count, settings.video_size, ranks)
    except Exception as error:
        raise recording_failed(error, output) from error
    if settings.baselines:
        result.baselines = _baselines(config, env, opened.model, [row.spec for row in result.results], plan)
        if ranks.rank == 0:
            result.to_json(output / run_folder.RESULT_FILE)
            print(baseline_table(result.baselines), flush=True)
    if ranks.rank == 0:
        if opened.baseline is not None:
            print(compare_folders(opened.baseline, output, settings.allow_mismatch).table(), flush=True)
        print(f"report: {write_report(output)}", flush=True)
    return result


def _baselines(
    config: RunConfig, env: VectorEnv, model: ActionModel, specs: Sequence[EpisodeSpec], plan: EvaluationPlan
) -> list[Json]:
    """Evaluate the baselines of the policy, and of the policy before RL if it is on disk (a collective call)."""
    base, device = policy_before_rl(config), resolve_device(config.cluster.device, 1)
    if base is not None:  # the device may not have the memory for two policies
        model.to("cpu")
        base.to(device)

    def after_base() -> None:
        if base is not None:
            base.to("cpu")
            model.to(device)

    options: Json = {"plan": plan, "after_base": after_base, **sampling_settings(config)}
    return evaluate_baselines(model, base, env, specs, on_result=lambda result: heartbeat(), **options)


def _reserved(config: RunConfig) -> AbstractContextManager[Reservation | None]:
    """Reserve a place for each rollout worker, if there are any."""
    if config.cluster.num_rollout_workers is None:
        return nullcontext()
    return reserved_places(partial(Placement.of_evaluation, config), config.cluster.deadlines.start, config.plugins)


def _rollout_workers(config: RunConfig, reservation: Reservation, model: ActionModel) -> RolloutWorkers:
    """Start the rollout workers, and push the policy's weights from the CPU to them."""
    placement = Placement.of_evaluation(config)
    bounded = replace(config, evaluation=replace(config.evaluation, num_envs=_most_envs(config.evaluation)))
    make = worker_maker(bounded, PolicySkeleton.of(model), placement)
    hint = f"run the same command with output_dir={config.output_dir}"
    workers = RolloutWorkers(make, config.cluster, placement, reservation, model, hint)
    try:
        workers.wait_until_ready()
        with deadline("push"):
            workers.update_weights(0)
    except BaseException:
        workers.close()
        raise
    print(f"evaluation: {len(workers.numbers)} rollout workers", flush=True)
    return workers


def _num_envs(settings: EvaluationConfig, has_rollout_workers: bool) -> int:
    """Return this rank's number of envs: at most one per episode, but enough for the fingerprint."""
    least = NUM_EPISODES if settings.probe and rank() == 0 else 1
    if has_rollout_workers:
        return min(settings.num_envs, least)
    return max(-(-_most_envs(settings) // world_size()), min(settings.num_envs, least))


def _most_envs(settings: EvaluationConfig) -> int:
    return settings.num_envs if settings.num_episodes is None else min(settings.num_envs, settings.num_episodes)


class _Progress:
    """Saves each result, and shows the progress of rank 0."""

    def __init__(
        self,
        partial: PartialResults,
        known: Sequence[EpisodeResult],
        num_episodes: int,
        updates: bool,
        reports_success: bool,
    ) -> None:
        self._partial, self._reports_success = partial, reports_success
        self._num_episodes = len(known) + len(rank_slice(range(num_episodes - len(known)), rank(), world_size()))
        self._results = list(known)
        self._line = Progress(enabled=rank() == 0, updates=updates)
        if known:
            self._line.note(f"{len(known)} of {num_episodes} episodes were already done ({partial.path})")
            self._show()

    def add(self, result: EpisodeResult) -> None:
        """Save the result of one episode and update the progress line."""
        heartbeat()
        self._partial.add(result)
        self._results.append(result)
        self._show()

    def _show(self) -> None:
        done = self._partial.num_results
        metrics = {"return": sum(result.episode_return for result in self._results) / len(self._results)}
        if self._reports_success or any(result.success_reported or result.success for result in self._results):
            metrics = {"successes": sum(result.success for result in self._results)} | metrics
        self._line.update("evaluation", done, self._num_episodes, **metrics)
