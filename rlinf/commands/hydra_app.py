"""Runs a command under Hydra (one output folder per run, ``-m``, ``--cfg job``), after checking its arguments."""

import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.checkpoints.folders import read_saved_config, resolve_checkpoint
from rlinf.config import search
from rlinf.config.compose import (
    ROOT,
    compose_config,
    compose_normalized,
    compose_on_saved,
    explain,
    fitted,
    no_such_option,
    normalize_overrides,
)
from rlinf.config.overrides import parse_overrides, values_of
from rlinf.config.schema import RunConfig, build_config, fields_meant, overrides_text, typed_config
from rlinf.config.training import ClusterConfig
from rlinf.distributed.start import is_connected
from rlinf.errors import CheckpointError, ConfigError, RankError, RLinfError
from rlinf.models.loading import hide_progress_bars
from rlinf.options import check_arguments, from_mapping, override_text, public_fields
from rlinf.preflight.folders import check_new_folder
from rlinf.run_folder import CHECKPOINTS_FOLDER, LATEST, STATE_FILE, SUMMARY_FILE

T = TypeVar("T")

AUTO = "auto"
"""Value of ``resume`` that resumes from the newest complete checkpoint if one exists, and starts a new run otherwise."""

POLICY_KEYS = ("checkpoint", "model", "model.model_path", "model.url")
"""Keys that specify a policy."""


def split(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split arguments into Hydra's flags, with the remaining arguments as ``overrides``, and flags unknown to Hydra."""
    parser = get_args_parser()
    parser.allow_abbrev = False
    return parser.parse_known_intermixed_args(list(arguments))


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse flags and overrides; if ``--config-name`` names an experiment, it becomes ``experiment=``."""
    args, unknown = split(arguments)
    if unknown:
        raise _no_flag(unknown[0], args.overrides)
    modes = {"-m": args.multirun, "--cfg": args.cfg, "--info": args.info, "--shell-completion": args.shell_completion}
    flags = [flag for flag, is_set in modes.items() if is_set]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} are mutually exclusive; expected one of them. Remove {flags[0]}")
    search.register(args.config_dir)
    args.overrides = normalize_overrides(args.overrides, sweeps=args.multirun)
    name = args.config_name
    args.config_name = ROOT
    if name is not None and name.removesuffix(".yaml") != ROOT:
        path = search.find_experiment(name)
        if path is None:
            reason = no_such_option(search.GROUP, name, search.experiment_names())
            raise ConfigError(f"--config-name is '{name}'. {reason}")
        if search.is_complete(path):
            args.config_name = path.stem
        else:
            args.overrides.insert(0, f"{search.GROUP}={path.stem}")
    return args


def _no_flag(flag: str, arguments: Sequence[str]) -> ConfigError:
    """Return the error for a setting typed as a flag, which also shows how to write it as an override."""
    name, _, value = flag.lstrip("-").partition("=")
    name = name.replace("-", "_")
    value = value or next((argument for argument in arguments if "=" not in argument), "<value>")
    keys = [name] if "." in name else fields_meant(name)
    example = overrides_text(keys, value) or "e.g. trainer.max_steps=10"
    return ConfigError(f"'{flag}' is not a flag; settings have no dashes: key=value. Set {example}")


def run_training(arguments: Sequence[str], command: str) -> list[Path]:
    """Compose, check and run ``train`` or ``sft``, or a sweep; return the folders of the runs that finished in this process."""
    args = parse(arguments)
    if args.multirun and is_connected():
        raise ConfigError(
            "-m under torchrun or srun: all runs of a sweep would use the same ranks; expected one run per launch. Remove -m "
            "and launch each value separately, or run rlinf -m without a launcher and set cluster.num_processes=<ranks>"
        )
    only_prints = args.info or args.help or args.hydra_help or args.shell_completion
    if not (only_prints or args.multirun) and (resumed := _resumed(args)) is not None:
        composed = compose_resumed(args, resumed)
        config = build(composed, command)
        if args.cfg:
            print(OmegaConf.to_yaml(composed, resolve=args.resolve))
            return []
        check(config, command)
        start(config, command)
        return [Path(config.output_dir)]
    # Check all runs of a sweep before Hydra creates a folder, so that a rejected configuration leaves nothing behind. Runs chosen by a
    # sweeper plugin, or started in other processes by a launcher plugin, are unknown here and are checked when they start.
    checked: dict[tuple[str, ...], RunConfig] = {}
    if not only_prints:
        for overrides in sweep_jobs(args.overrides) if args.multirun else [args.overrides]:
            composed = compose_normalized(overrides, args.config_dir, args.config_name)
            if args.cfg:
                typed_config(composed)
                # Print it here, because Hydra would compose the configuration two more times.
                if args.cfg == "job" and args.package is None:
                    print(OmegaConf.to_yaml(composed, resolve=args.resolve))
                    return []
                continue
            # The key equals `hydra.overrides.task`, so that the job can look up its checked configuration.
            task = (override.input_line for override in parse_overrides(overrides) if not override.is_hydra_override())
            checked[tuple(task)] = config = build(composed, command)
            check(config, command)
    folders, failures = _run_under_hydra(args, command, checked)
    finished = [folder for folder in folders if (folder / SUMMARY_FILE).is_file()]
    if args.multirun and len(finished) > 1:
        from rlinf.report import runs as report

        runs, folder = report.read_runs(finished), os.path.commonpath([os.path.relpath(path) for path in finished])
        print(report.runs_table(report.group_runs(runs)), flush=True)
        page = report.write_runs_report(runs, Path(folder, report.RUNS_FILE))
        print(f"report: {page}", flush=True)
    if failures:
        raise failures[0]
    return folders


def _resumed(args: Namespace) -> str | None:
    """Return the run to resume, or None; replace ``resume=auto`` in the overrides with the newest checkpoint."""
    resumed = given_value(args.overrides, "resume")
    if resumed == AUTO:
        resumed, searched = newest_run(args)
        value = "null" if resumed is None else override_text(resumed)
        args.overrides = [*_without_resume(args.overrides), f"resume={value}"]
        outcome = resumed or "there is no complete checkpoint, so a new run starts"
        print(f"resume=auto: {outcome} (searched: {searched})", flush=True)
    return resumed


def _without_resume(overrides: Sequence[str]) -> list[str]:
    return [item.input_line for item in parse_overrides(overrides) if item.key_or_group != "resume"]


def _run_under_hydra(
    args: Namespace, command: str, checked: dict[tuple[str, ...], RunConfig]
) -> tuple[list[Path], list[RLinfError | RankError]]:
    """Run each job under Hydra, which creates the folders; return the folders of finished runs and the errors of failed ones."""
    folders: list[Path] = []
    failures: list[RLinfError | RankError] = []
    process = os.getpid()
    outputs = [Path(config.output_dir).absolute() for config in checked.values()]
    absent = {place for output in outputs for place in output.parents if not place.exists()}

    def execute(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        try:
            config = checked.pop(tuple(hydra_config.overrides.task), None) if os.getpid() == process else None
            if config is None:
                config = build(fitted(composed, hydra_config.overrides.task), command)
                check(config, command)
            config.output_dir = hydra_config.runtime.output_dir
            _remove_empty(Path(config.output_dir), absent)
            check_new_folder(config)
            start(config, command)
            folders.append(Path(config.output_dir))
        except (RLinfError, RankError) as error:
            # Collect the error instead of raising it: Hydra would print it in its own format and stop the remaining runs of a sweep.
            if os.getpid() != process:
                raise
            failures.append(error)

    try:
        with _arguments(args):
            hydra.main(version_base="1.3", config_path=search.PACKAGE, config_name=ROOT)(execute)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, args.overrides, args.config_name) from error
    return folders, failures


def _remove_empty(folder: Path, absent: Collection[Path]) -> None:
    """Remove an empty folder created by Hydra, and its parents in ``absent``, so that a failed run leaves no empty folders."""
    for place in (folder, *(parent for parent in folder.parents if parent in absent)):
        with suppress(OSError):  # not empty
            place.rmdir()


def build(composed: DictConfig, command: str) -> RunConfig:
    """Return the typed configuration of ``train`` or ``sft`` (without RL)."""
    config = build_config(composed)
    if command == "sft":
        config.trainer.max_steps = 0
    return config


def check(config: RunConfig, command: str) -> None:
    """Check a complete configuration with ``validate``."""
    # Imported late: torch takes seconds to import, and typos have already been rejected by now.
    from rlinf.preflight.validation import validate

    validate(config, command)


def start(config: RunConfig, command: str) -> None:
    """Run a checked configuration."""
    from rlinf.commands import train as training

    hide_progress_bars()
    getattr(training, command)(config)


def compose_resumed(args: Namespace, resumed: str) -> DictConfig:
    """Compose the configuration that resumes the run ``resumed``, from its checkpoint's configuration or a chosen experiment."""
    folder = resolve_checkpoint(resumed)
    keys = [item.key_or_group for item in parse_overrides(args.overrides)]
    if search.GROUP in keys or args.config_name != ROOT:
        composed = compose_config(args.overrides, args.config_dir, args.config_name)
    else:
        composed = compose_on_saved(read_saved_config(folder), args.overrides, args.config_dir, folder)
    if is_connected() and "cluster.num_processes" not in keys:
        composed.cluster.num_processes = None  # use all started ranks, even if the checkpoint had a different number
    if "output_dir" not in keys:
        run_folder = folder.parent.parent if folder.parent.name == CHECKPOINTS_FOLDER else folder.parent
        composed.output_dir = str(run_folder)
    return composed


def newest_run(args: Namespace) -> tuple[str | None, Path]:
    """Return the newest complete checkpoint, if any, in ``output_dir`` or among the experiment's runs; and the searched folder."""
    output_dir = given_value(args.overrides, "output_dir")
    if output_dir is not None:
        folder = Path(output_dir).expanduser()
        runs = [folder]
    else:
        experiment = compose_config(_without_resume(args.overrides), args.config_dir, args.config_name).experiment_name
        folder = Path("outputs", experiment)
        runs = sorted((path for path in folder.glob("*") if path.name != LATEST), reverse=True)
    for run in runs:
        if any(run.glob(f"{CHECKPOINTS_FOLDER}/[!.]*/{STATE_FILE}")):
            try:
                return str(resolve_checkpoint(run)), folder.absolute()
            except CheckpointError as error:
                print(f"warning: {run} is skipped: {error}", flush=True)
    return None, folder.absolute()


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Return the arguments; a folder in first position is prefixed with ``checkpoint=``."""
    first = arguments[0] if arguments and not set("=~") & set(arguments[0]) else "-"
    is_folder = Path(first).is_dir() or ("/" in first and not Path(first).is_file()) or Path(first).name == LATEST
    return [f"checkpoint={first}", *arguments[1:]] if is_folder and first[0] != "-" else list(arguments)


def require_policy(arguments: Sequence[str], command: str, keys: Sequence[str] = POLICY_KEYS, more: str = "") -> None:
    """Raise ConfigError unless the arguments set one of ``keys``; ``more`` is appended to the usage."""
    if not any(argument.partition("=")[0] in keys for argument in arguments):
        usage = f"rlinf {command} checkpoint=outputs/quickstart/latest{more}"
        raise ConfigError(f"`rlinf {command}` needs a checkpoint or run folder. Run {usage}")


def own_settings(arguments: Sequence[str], kind: type[T]) -> tuple[Namespace, T]:
    """Split arguments into Hydra's and the command's own settings (the fields of ``kind``)."""
    settings = [argument for argument in arguments if argument.partition("=")[0] in public_fields(kind)]
    args = parse([argument for argument in arguments if argument not in settings])
    return args, from_mapping(kind, values_of(settings))


def own_config(arguments: Sequence[str], kind: type[T]) -> T:
    """Return the settings of a command whose only keys are the fields of ``kind``."""
    check_arguments(arguments, public_fields(kind))
    return from_mapping(kind, values_of(arguments))


def given_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the value of the last override of ``key``, or None."""
    value = values_of(override for override in overrides if override.partition("=")[0].lstrip("+") == key).get(key)
    return None if value is None else str(value)


def check_checkpoint(arguments: Sequence[str]) -> None:
    """Reject a folder without a checkpoint before the command's slow imports."""
    folder = given_value([argument for argument in arguments if argument.startswith("checkpoint=")], "checkpoint")
    if folder is not None:
        resolve_checkpoint(folder)


def configure(args: Namespace, command: str) -> RunConfig | None:
    """Compose and check a configuration, based on the checkpoint's if one is given; return None if ``--cfg`` only prints it."""
    if args.multirun:
        raise ConfigError(f"`rlinf {command}` runs once; sweeps (-m) are for `rlinf train` and `rlinf sft`. Remove -m")
    checkpoint = given_value(args.overrides, "checkpoint")
    if checkpoint is None:
        composed = compose_config(args.overrides, args.config_dir, args.config_name)
    else:
        folder = resolve_checkpoint(checkpoint)
        composed = compose_on_saved(read_saved_config(folder), args.overrides, args.config_dir, folder)
        composed.checkpoint = str(folder)
        # The training run's processes and machines do not apply to this command.
        for key in ("num_processes", "num_rollout_workers", "start", "placement"):
            if given_value(args.overrides, f"cluster.{key}") is None:
                composed.cluster[key] = getattr(ClusterConfig(), key)
        # Baselines belong to the evaluation at the end of that run; here they would multiply the episodes of any evaluation.
        if given_value(args.overrides, "evaluation.baselines") is None:
            composed.evaluation.baselines = False
    if args.cfg:
        typed_config(composed)
        print(OmegaConf.to_yaml(composed, resolve=args.resolve))
        return None
    config = build_config(composed)
    check(config, command)
    hide_progress_bars()
    return config


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of Hydra's default sweeper, or an empty list for a sweeper plugin."""
    choices = {}
    for override in parse_overrides(overrides):
        if override.key_or_group == "hydra/sweeper":
            return []
        key = override.get_key_element()
        lists_values = override.is_discrete_sweep()
        values = override.sweep_string_iterator() if lists_values else [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]


@contextmanager
def _arguments(args: Namespace) -> Iterator[None]:
    """Pass the normalised arguments to Hydra, which reads them from ``sys.argv``."""
    arguments = ["rlinf", *args.overrides]
    for name, value in vars(args).items():
        if name != "overrides" and value not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            arguments += [flag] if value is True else [flag, value]
    GlobalHydra.instance().clear()  # left over from an earlier run in this process
    previous, sys.argv = sys.argv, arguments
    try:
        # Without this variable, Hydra prints errors and exits instead of raising them.
        with env_override({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv = previous
