"""Evaluates one policy: from a configuration to a table, a JSON file, videos and a report."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlinf import run_folder
from rlinf.cluster.factory import env_maker
from rlinf.cluster.reservation import Reservation, reserved_places
from rlinf.cluster.rollout_worker import worker_maker
from rlinf.cluster.rollout_workers import RemoteEpisodes, RolloutWorkers
from rlinf.commands.open_checkpoint import Opened, open_checkpoint, open_remote, policy_for
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
from rlinf.errors import CheckpointError, ConfigError, RankKilledError
from rlinf.evaluation.compare import compare
from rlinf.evaluation.config import TRAINING_SPLIT, EvaluationConfig
from rlinf.evaluation.evaluator import (
    NUM_ROWS,
    BatchedPolicy,
    Episodes,
    EvaluationPlan,
    RankGroup,
    episode_list,
    evaluate_policy,
    rank_slice,
)
from rlinf.evaluation.fingerprint import NUM_EPISODES, compare_fingerprints, take_fingerprint
from rlinf.evaluation.partial import PartialResults, num_saved, partial_files
from rlinf.evaluation.recording import record_episodes, recording_failed
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.sequential import rate_confidence_sequence
from rlinf.evaluation.stopping import stop_rule
from rlinf.files import Json, write_text
from rlinf.manifest import Manifest
from rlinf.models.base_weights import weights_digest
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast
from rlinf.number_formats import format_interval
from rlinf.options import to_mapping
from rlinf.preflight.compatibility import env_spec
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.placement import Placement
from rlinf.report.compare_folders import (
    COMPARISON_NAMES,
    check_conditions,
    compare_folders,
    evaluation_folder,
)
from rlinf.report.run_page import write_report
from rlinf.robot.arm import Arm, connected_robot, connected_teleoperator, disconnect
from rlinf.robot.config import RobotConfig
from rlinf.robot.human import HumanLabelledRobot
from rlinf.robot.loop import RobotEpisodes
from rlinf.robot.page import Page, PageTeleoperator
from rlinf.robot.recorder import EpisodeRecorder
from rlinf.robot.robot import EnvRobot, EpisodicRobot
from rlinf.robot.teleoperator import ScriptedOperator, Teleoperator
from rlinf.rollout.policy_skeleton import PolicySkeleton
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")

VERSION_FIELDS = ("versions.", "simulators.")
"""Manifest fields whose differences are accepted but reported."""

CONNECTION_FIELDS = ("timeout_s", "connect_timeout_s", "api_key_env")
"""``model`` settings that do not affect episodes."""


def evaluate(config: RunConfig, robot: RobotConfig | None = None) -> EvaluationResult:
    """Evaluate ``config.checkpoint`` (a checkpoint, a run folder or an export), or the configured model if it is null.

    Prints a table, and writes ``result.json``, ``videos/``, ``episodes/``, ``config.yaml``, ``manifest.json`` and ``report.html`` to
    ``config.output_dir``; also ``compare.json`` with ``evaluation.compare``, and ``timing.json`` with ``robot`` (real time).
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
    with report_saved_results(output):
        while True:
            try:
                with _reserved(config) as reservation:
                    work, deadlines = (config, reservation, robot), asdict(cluster.deadlines)
                    launch(_evaluate_rank, work, cluster.num_processes, device, deadlines=deadlines)
                return EvaluationResult.from_json(output / run_folder.RESULT_FILE)
            except RankKilledError as error:
                before, count = count, num_saved(output)
                # No new results since the last start: the ranks would die at the same point again.
                if count <= max(before, 0):
                    raise
                logger.warning("%s\nRestarting the ranks; %d results are saved.", error, count)


@contextmanager
def report_saved_results(output: Path) -> Iterator[None]:
    """If the block fails, print the number of saved results and how to resume."""
    try:
        yield
    except BaseException as error:
        count = num_saved(output)
        if count and not isinstance(error, (ConfigError, CheckpointError)):  # rerunning would fail the same way
            saved = f"{count} results are saved in {output}"
            print(f"\n{saved}; to continue, run the same command with output_dir={output}", file=sys.stderr, flush=True)
        raise


@dataclass
class OpenedPolicy:
    """Policy, episodes and conditions of an evaluation before its first episode.

    Attributes:
        baseline, before: Folder of ``evaluation.compare``, resolved once because ``latest`` may move, and its result; or None.
        is_unverified: True if earlier processes may have run a different policy.
    """

    specs: list[EpisodeSpec]
    model: Any
    manifest: Manifest
    conditions: Json
    baseline: Path | None
    before: EvaluationResult | None
    warnings: list[str]
    is_unverified: bool


def _evaluate_rank(work: tuple[RunConfig, Reservation | None, RobotConfig | None]) -> None:
    """Run this rank's fraction of the episodes, or all of them on rollout workers or a robot; rank 0 writes the result."""
    config, reservation, robot = work
    prepare_rank(config)
    settings, output = config.evaluation, Path(config.output_dir)
    set_num_threads(config.cluster.num_threads, local_world_size())
    seed_everything(config.seed, config.trainer.deterministic)
    if reservation is not None:
        reservation.join()  # env nodes belong to the rollout workers' cluster
    ranks = RankGroup(rank(), world_size(), lambda part: gather_objects(part()))
    with ExitStack() as stack:
        env = env_maker(config, local_world_size())(_num_envs(settings, reservation is not None), auto_reset=False)
        stack.callback(env.close)
        episodes: Episodes | None = None
        device = resolve_device(config.cluster.device, 1)
        with deadline("start"):
            opened = open_evaluation(config, env, 0 if robot is None else robot.first_episode)
            if reservation is None:
                opened.model = opened.model.to(device)
            else:
                workers = _rollout_workers(config, reservation, opened.model)
                stack.callback(workers.close)
                episodes = RemoteEpisodes(workers, _most_envs(settings))
            if robot is not None:
                robot = replace(robot, fps=robot.fps or opened.manifest.fps)
                starts = None if opened.baseline is None else opened.baseline / run_folder.STARTS_FOLDER
                device_robot, operator = make_robot(config, env, robot, len(opened.specs), starts, stack)
                episodes = stack.enter_context(robot_episodes(config, env, device_robot, operator, opened, robot))
                opened.conditions["robot"] = robot.conditions()
            # Only rank 0 has the fingerprint of the simulator.
            present = gather_objects({"device": device, **opened.conditions})[0]
        with (
            deadline("evaluate"),
            PartialResults(output, present, rank()) as partial,
            autocast(opened.model, config.model.precision),
        ):
            result = _run(config, env, opened, partial, ranks, episodes)
            if isinstance(episodes, RobotEpisodes) and episodes.recorder is not None:
                print(f"recorded: {episodes.recorder.write(result.results)}", flush=True)
        if robot is not None and isinstance(episodes, RobotEpisodes):
            write_timing(output, robot, episodes)


def write_timing(output: Path, settings: RobotConfig, episodes: RobotEpisodes) -> None:
    """Write and print the timing statistics."""
    timing = {"settings": asdict(settings), **episodes.timing.as_dict()}
    write_text(output / run_folder.TIMING_FILE, json.dumps(timing, indent=2))
    print(f"{episodes.timing}\ntiming: {output / run_folder.TIMING_FILE}", flush=True)


def make_robot(
    config: RunConfig, env: VectorEnv, settings: RobotConfig, num_episodes: int, starts: Path | None, stack: ExitStack
) -> tuple[EpisodicRobot, Teleoperator | None]:
    """Return the simulated robot or ``arm``, and its teleoperator; ``starts``: folder of initial images for a human to reproduce."""
    simulated = EnvRobot(env, settings)
    robot: EpisodicRobot = simulated
    if settings.arm is not None:
        arm = connected_robot(settings.arm)
        stack.callback(disconnect, arm)
        robot = Arm(arm, env, 0.5 / settings.rate)
    operator: Teleoperator | None = None
    if settings.teleoperator == "scripted":
        operator = ScriptedOperator(simulated, settings)
    elif settings.teleoperator != "none":
        operator = connected_teleoperator(settings.teleoperator)
        stack.callback(disconnect, operator)
    if settings.success != "env":
        output = Path(config.output_dir)
        robot = labelled = HumanLabelledRobot(robot, output / run_folder.STARTS_FOLDER, starts)
        labelled.number, labelled.num_episodes = num_saved(output), num_episodes
        if settings.success == "page":
            page = Page(labelled, settings.page_host, settings.page_port)
            stack.callback(page.close)
            print(f"page: {page.url}", flush=True)
            if operator is not None and not hasattr(operator, "get_teleop_events"):
                operator = PageTeleoperator(operator, page)
    return robot, operator


def robot_episodes(
    config: RunConfig,
    env: VectorEnv,
    robot: EpisodicRobot,
    operator: Teleoperator | None,
    opened: OpenedPolicy,
    settings: RobotConfig,
) -> RobotEpisodes:
    """Return an ``Episodes`` that runs the policy on a robot, where an operator may intervene."""
    # Call with one row, not the usual NUM_ROWS: latency matters, and no batched evaluation has to be matched bit for bit.
    policy = BatchedPolicy(opened.model, env.task_names, **sampling_settings(config), num_rows=1)
    recorder = None
    if operator is not None:
        opened.warnings.append(
            f"An operator could intervene: successes are due to policy and operator together (teleoperator={settings.teleoperator})"
        )
    if settings.record is not None:
        pending, fps = Path(config.output_dir) / run_folder.ROBOT_EPISODES_FOLDER, max(1, round(settings.rate))
        recorder = EpisodeRecorder(Path(settings.record).expanduser(), pending, fps, to_mapping(config.env))
    context = partial(autocast, opened.model, config.model.precision)
    return RobotEpisodes(policy, robot, env_spec(config), settings, context, operator, recorder)


def open_evaluation(config: RunConfig, env: VectorEnv, first: int) -> OpenedPolicy:
    """Open the policy, skip the first ``first`` episodes, and reject now any comparison that would fail after hours of episodes."""
    settings, baseline, before = config.evaluation, None, None
    specs = episode_list(env, settings.split, settings.num_episodes, first)
    model, manifest, saved, warnings = open_policy(config, env)
    if settings.compare:
        baseline = evaluation_folder(settings.compare)
        before = EvaluationResult.from_json(baseline / run_folder.RESULT_FILE)
        _check_comparable(baseline, before, manifest, env, specs, config)
    if settings.split == "train":
        warnings.append(TRAINING_SPLIT)
        _warn([TRAINING_SPLIT])
    server = server_digest(config, model)
    present = conditions(config, manifest, saved, specs, server)
    is_unverified = server is not None and saved is None
    return OpenedPolicy(specs, model, manifest, present, baseline, before, warnings, is_unverified)


def _run(
    config: RunConfig,
    env: VectorEnv,
    opened: OpenedPolicy,
    partial: PartialResults,
    ranks: RankGroup,
    episodes: Episodes | None,
) -> EvaluationResult:
    """Run the episodes, write the result, record episodes and write the report."""
    settings, output, specs = config.evaluation, Path(config.output_dir), opened.specs
    known = gather_objects(partial.known)[0]
    if known and opened.is_unverified:
        opened.warnings.append(unknown_policy_warning(config.model.url, f"{len(known)} episodes"))
        _warn(opened.warnings[-1:])
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
    if settings.stop_when is not None:
        result.stopping = {"stop_when": settings.stop_when, "num_planned": len(specs)}
        result.warnings += stop_warning(result)
    if ranks.rank == 0:
        write_result(config, result, partial.earlier_s, opened.manifest, opened.warnings)
    recordings, count = output / run_folder.RECORDINGS_FOLDER, settings.record_episodes
    try:
        record_episodes(opened.model, env, result, recordings, count, settings.video_size, ranks)
    except Exception as error:
        raise recording_failed(error, output) from error
    if ranks.rank == 0:
        if opened.baseline is not None:
            print(compare_folders(opened.baseline, output, settings.allow_mismatch).table(), flush=True)
        print(f"report: {write_report(output)}", flush=True)
    return result


def sampling_settings(config: RunConfig) -> Json:
    """Return the sampling arguments of ``evaluate_policy``."""
    return {"greedy": config.evaluation.greedy, "temperature": config.rollout.temperature, "seed": config.seed}


def server_digest(config: RunConfig, model: Any) -> str | None:
    """Return the digest of a remote policy's metadata, or None for a local policy."""
    return None if config.model.url is None else model.client.digest


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


def write_result(
    config: RunConfig, result: EvaluationResult, earlier_s: float, manifest: Manifest, warnings: list[str]
) -> None:
    """Write and print the result of an evaluation, together with ``warnings`` raised before it started."""
    output = Path(config.output_dir)
    _warn(result.warnings)
    result.warnings = warnings + result.warnings
    result.wall_s += earlier_s
    manifest.save(output)
    write_text(output / run_folder.CONFIG_FILE, yaml.safe_dump(to_mapping(config), sort_keys=False))
    # A comparison with an earlier result in this folder is no longer valid.
    (output / run_folder.COMPARISON_FILE).unlink(missing_ok=True)
    result.to_json(output / run_folder.RESULT_FILE)
    print(f"{result.table()}\nresults: {output / run_folder.RESULT_FILE}", flush=True)


def check_output(output: Path, baseline: Path | None) -> None:
    """Raise ConfigError if ``output`` is the baseline or a finished evaluation, or is inside a run, checkpoint or export."""
    place = output.resolve()
    if baseline is not None and baseline.resolve() == place:
        raise ConfigError(
            f"evaluation.compare={baseline} and output_dir={output} are the same folder; expected a different folder, because the "
            "baseline would be overwritten. Set output_dir=<a new folder>"
        )
    for folder in (place, *place.parents):
        if _belongs_to_training(folder):
            raise ConfigError(
                f"output_dir is '{output}', which is inside a run, checkpoint or export ({folder}), whose files an evaluation would "
                "overwrite. Set output_dir=<a new folder>"
            )
    if (place / run_folder.RESULT_FILE).exists() and not partial_files(place):
        raise ConfigError(
            f"output_dir is '{output}', which contains the {run_folder.RESULT_FILE} of a finished evaluation. Delete the folder, or set "
            "output_dir=<a new folder>"
        )


def _belongs_to_training(folder: Path) -> bool:
    if any((folder / name).is_file() for name in (run_folder.METRICS_FILE, run_folder.STATE_FILE)):
        return True
    if any(folder.glob(f"{run_folder.CHECKPOINTS_FOLDER}/*/{run_folder.STATE_FILE}")):
        return True
    try:
        manifest = json.loads((folder / run_folder.MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and bool(manifest.get("files"))  # an evaluation's manifest lists no files


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


def open_policy(config: RunConfig, env: VectorEnv) -> tuple[Any, Manifest, Manifest | None, list[str]]:
    """Open the checkpoint or server, or build the configured policy, on the CPU.

    Return the policy, its current conditions (fingerprint on rank 0 only), the recorded conditions (None: unknown), and warnings.
    """
    warnings = []
    allowed = [name for name in config.evaluation.allow_mismatch if name not in COMPARISON_NAMES]
    if config.model.url is not None:
        opened = open_remote(config, env, allowed)
        if opened.manifest is None:
            warnings.append(
                f"{config.model.url} does not describe its policy, so neither weights nor conditions were compared"
            )
        elif opened.policy.rows_of_call != NUM_ROWS:
            sizes = (
                f"calls its policy with {opened.policy.rows_of_call} rows (max_batch), but evaluations use {NUM_ROWS}"
            )
            warnings.append(f"{config.model.url} {sizes}: actions may be rounded differently")
    elif config.checkpoint is not None:
        opened = open_checkpoint(config.checkpoint, config, allowed)
    else:
        model = policy_for(config, env)
        opened = Opened(None, None, model, build_manifest(config, model, policy_version=0))
    model, manifest, saved = opened.policy, opened.present, opened.manifest
    if saved is not None:
        manifest.fps = saved.fps
    for mismatch in opened.differences:
        if mismatch.must_match:
            warnings.append(f"allowed by evaluation.allow_mismatch: {mismatch}")
        elif mismatch.field.startswith(VERSION_FIELDS):
            warnings.append(f"the checkpoint was written with a different version: {mismatch}")
    if config.evaluation.probe and rank() == 0:
        manifest.probe = take_fingerprint(env)
        moved = compare_fingerprints(saved.probe, manifest.probe) if saved is not None else []
        warnings += [f"the simulator has changed since the checkpoint was written: {line}" for line in moved]
    _warn(warnings)
    return model, manifest, saved, warnings


def unknown_policy_warning(url: str | None, earlier: str) -> str:
    """Return the warning that earlier results (e.g. ``12 episodes``) may be from a different policy."""
    doubt = f"whether {url} served the same policy during the {earlier} of earlier processes"
    return f"It is not known {doubt}, because it does not describe its policy"


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings if rank() == 0 else ():
        logger.warning(warning)


def _check_comparable(
    baseline: Path,
    before: EvaluationResult,
    manifest: Manifest,
    env: VectorEnv,
    specs: Sequence[EpisodeSpec],
    config: RunConfig,
) -> None:
    """Raise now the errors that a comparison would raise after hours of episodes."""
    allowed = config.evaluation.allow_mismatch
    check_conditions(baseline, manifest, allowed)
    episodes = [EpisodeResult(spec, env.task_names[spec.task_id], False, 0.0, 0) for spec in specs]
    planned = EvaluationResult(episodes, config.evaluation.greedy, config.rollout.temperature, config.seed)
    compare(before, planned, allowed)
    if before.stopping is not None and before.episodes < len(specs):
        raise ConfigError(
            f"evaluation.compare={baseline} ended after {before.episodes} of {before.stopping['num_planned']} episodes "
            f"(evaluation.stop_when); expected a baseline with all {len(specs)}. Set evaluation.num_episodes={before.episodes}"
        )


def stop_warning(result: EvaluationResult) -> list[str]:
    """Return the warning about intervals of an evaluation with a stopping rule."""
    done, planned = result.episodes, result.stopping["num_planned"]
    interval = format_interval(*rate_confidence_sequence(result.total.successes, done))
    ended = f"ended after {done} of {planned} episodes" if done < planned else f"ran all {planned} episodes"
    return [
        f"The evaluation {ended} with evaluation.stop_when={result.stopping['stop_when']}. The intervals per task and in total do "
        f"not account for early stopping; a 95 % interval of the success rate that does is {interval}"
    ]


def conditions(
    config: RunConfig,
    manifest: Manifest,
    saved: Manifest | None,
    specs: Sequence[EpisodeSpec],
    server: str | None = None,
) -> Json:
    """Return everything that affects a result, as JSON values; ``saved`` is the checkpoint's manifest (None without a checkpoint)."""
    model, free = config.model, {*CONNECTION_FIELDS}
    weights: Any = (
        saved.files if saved is not None else [weights_digest(p) for p in (model.model_path, model.lora_path)]
    )
    if saved is not None:
        free.add("url")  # a server with a known manifest may move to a new address
    return {
        "episodes": [len(specs), str(specs[0]), str(specs[-1])],
        "weights": weights,
        "env.reward_mode": config.env.reward_mode,
        "env.success_bonus": config.env.success_bonus,
        **{name: value for name, value in manifest.flatten().items() if name not in ("git_revision", "policy_version")},
        "greedy": config.evaluation.greedy,
        "temperature": config.rollout.temperature,
        "model.settings": {name: value for name, value in to_mapping(model).items() if name not in free},
        "server": server,
    }
