"""Command-line front ends of ``rlinf.commands``, which parse the arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf import wings
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.commands.hydra_app import (
    check_checkpoint,
    configure,
    own_config,
    own_settings,
    parse,
    require_policy,
    run_training,
    with_checkpoint,
)
from rlinf.config.overrides import values_of
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.evaluation.config import EvaluationConfig
from rlinf.models.loading import hide_progress_bars
from rlinf.options import PathText, check_arguments, from_mapping, option, public_fields, unknown_key_message
from rlinf.preflight.folders import check_writable
from rlinf.run_folder import COMPARISON_FILE, REPORT_FILE
from rlinf.serving import require_packages

COMPARE_FLAG = "--compare"


def train(arguments: Sequence[str]) -> int:
    """Run behaviour cloning, if configured, then reinforcement learning.

    examples:
      rlinf train experiment=quickstart                             a small VLA on a laptop, in minutes
      rlinf train experiment=quickstart seed=3 trainer.max_steps=20
      rlinf train -m experiment=quickstart seed=0,1,2               one run per value
      rlinf train experiment=quickstart resume=auto                 resume the newest run
      rlinf train experiment=quickstart --cfg job                   print every key and its value, and stop

    Keys are explained in docs/configuration.md. --config-dir <folder> adds your own YAML files; --hydra-help lists Hydra's flags.
    """
    return _trained(arguments, "train")


def sft(arguments: Sequence[str]) -> int:
    """Run only the behaviour cloning stage of a configuration, with the same keys and flags as `rlinf train`."""
    return _trained(arguments, "sft")


def _trained(arguments: Sequence[str], command: str) -> int:
    if not arguments:
        needed = "an experiment (`rlinf models` lists them) or a choice of model, env and algorithm"
        raise ConfigError(f"`rlinf {command}` needs {needed}. Run rlinf {command} experiment=quickstart")
    run_training(arguments, command)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint under its own configuration, or the configured model if ``checkpoint=`` is not given.

    Model and env come from the checkpoint's configuration. Overrides change individual keys; a group (``env=tabletop``) replaces a
    section. ``--compare A B`` compares two existing evaluations (or the final ones of two runs) episode by episode;
    ``evaluation.compare=A`` runs an evaluation first and then compares it with A.

    With ``questions=<file>``, a language or vision-language model is evaluated on questions: multiple choice, or exact answers if
    ``answer_type=<reward>`` is set. docs/recipes.md lists the keys.
    """
    if not arguments:
        require_policy(arguments, "evaluate")
    if COMPARE_FLAG in arguments:
        return _compare(list(arguments))
    config = configure(parse(with_checkpoint(arguments)), "evaluate")
    if config is not None:
        from rlinf.commands import evaluate as command

        command.evaluate(config)
    return 0


def _compare(arguments: list[str]) -> int:
    """Print the comparison of the two evaluations after the flag."""
    from rlinf.report.compare_folders import compare_folders, evaluation_folder

    position = arguments.index(COMPARE_FLAG)
    folders, rest = arguments[position + 1 : position + 3], arguments[:position] + arguments[position + 3 :]
    key = "evaluation.allow_mismatch"
    if len(folders) < 2 or any(not argument.startswith(f"{key}=") for argument in rest):
        command, required = f"rlinf evaluate {COMPARE_FLAG}", f"two folders of evaluations, and no key except {key}"
        actual = f"`{command}` was given '{' '.join([*folders, *rest])}'"
        raise ConfigError(f"{actual}; expected {required}. Run {command} <baseline folder> <other folder>")
    values = {name.partition(".")[2]: value for name, value in values_of(rest).items()}
    settings = from_mapping(EvaluationConfig, values, "evaluation")
    print(compare_folders(*folders, settings.allow_mismatch).table())
    output = evaluation_folder(folders[1])
    print(f"comparison: {output / COMPARISON_FILE}\nreport: {output / REPORT_FILE}")
    return 0


def serve(arguments: Sequence[str]) -> int:
    """Serve a checkpoint, or a public model (model=lerobot model.model_path=...), to clients of openpi and vla-eval.

    `rlinf evaluate model=remote model.url=ws://127.0.0.1:8000` evaluates it from a different process (docs/serving.md). Other keys
    override the checkpoint's configuration, e.g. cluster.device=cuda or model.precision=bf16. SIGTERM or Ctrl-C stops the server.
    """
    require_packages("`rlinf serve`")
    arguments = with_checkpoint(arguments)
    check_checkpoint(arguments)
    from rlinf.commands.serve import ServeConfig, serve

    args, settings = own_settings(arguments, ServeConfig)
    require_policy(arguments, "serve", ["checkpoint", "model.model_path"], " port=8000")
    config = configure(args, "serve")
    if config is not None:
        serve(config, settings)
    return 0


def collect(arguments: Sequence[str]) -> int:
    """Store episodes of the env's scripted expert, or of the policy given by ``checkpoint`` or ``model.model_path``, as a LeRobotDataset.

    With ``teleoperator=browser`` you act yourself, on a page at ``page_host`` (127.0.0.1) and ``page_port`` (8020; docs/robot.md).

    Model and env come from the checkpoint's configuration. Overrides change individual keys; a group (``env=tabletop``) replaces a section.
    """
    config = configure(parse(with_checkpoint(arguments)), "collect")
    if config is not None:
        from rlinf.commands import collect as command

        command.collect(config)
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Convert HDF5 demonstrations of robomimic or LIBERO to a LeRobotDataset (docs/datasets.md)."""
    from rlinf.commands.convert import ConvertConfig, convert

    convert(own_config(arguments, ConvertConfig))
    return 0


@dataclass
class ExportConfig:
    """Source and destination of an export."""

    checkpoint: PathText | None = option(None, "Checkpoint or run folder.")
    output: PathText | None = option(None, "New folder, which `from_pretrained` can load.")
    merge_lora: bool = option(False, "Merge the adapters into the weights.")


def export(arguments: Sequence[str]) -> int:
    """Export a checkpoint as a folder that ``from_pretrained`` can load.

    Additional keys override the checkpoint's configuration, e.g. ``plugins=[my_model.py]``, or ``policy.model_name_or_path=<folder>``
    if a recipe's model has moved.
    """
    settings, overrides = _split(with_checkpoint(arguments))
    config = from_mapping(ExportConfig, settings)
    for key in ("checkpoint", "output"):
        if getattr(config, key) is None:
            usage = "rlinf export checkpoint=outputs/quickstart/latest output=my_policy"
            raise ConfigError(f"`rlinf export` needs {key}=<folder>. Run {usage}")
    output = Path(config.output).expanduser()
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(f"output is '{config.output}', which exists and is not empty. Set output=<a new folder>")
    check_writable(config.output, "output")
    checkpoint = resolve_checkpoint(config.checkpoint)
    hide_progress_bars()
    from rlinf.commands import export as command

    print(f"exported {checkpoint} to {command.export(checkpoint, output, config.merge_lora, overrides)}")
    return 0


@dataclass
class DistilConfig:
    """Destination of `rlinf distil`."""

    output: PathText | None = option(None, "New folder with the distilled policy, its episodes and evaluations.")


def distil(arguments: Sequence[str]) -> int:
    """Clone the successes of a base policy with an actor into the base policy, and write it as a folder without an actor.

    ``output`` contains the policy (``policy``), the episodes, the cloning run, and evaluations of the base, improved and distilled
    policy on the same episodes. Keys override the checkpoint's configuration: ``collect.num_episodes``, ``sft.max_steps``,
    ``evaluation.num_episodes``. The same command continues an interrupted distillation.
    """
    arguments = with_checkpoint(arguments)
    check_checkpoint(arguments)
    args, settings = own_settings(arguments, DistilConfig)
    usage = " output=<new folder>"
    require_policy(arguments, "distil", ["checkpoint"], usage)
    if settings.output is None:
        raise ConfigError(f"`rlinf distil` needs output=<folder>. Run rlinf distil checkpoint=<folder>{usage}")
    config = configure(args, "evaluate")
    if config is not None:
        from rlinf.commands import distil as command

        command.distil(config, Path(settings.output).expanduser())
    return 0


def _split(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """Split arguments into the values of the export's own keys and the overrides of the configuration."""
    settings, overrides = {}, []
    export_keys, sections = public_fields(ExportConfig), [*public_fields(RunConfig), *wings.added("exports")]
    check_arguments(arguments, export_keys)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in export_keys:
            settings |= values_of([argument])
        elif key.partition(".")[0] in sections or wings.is_entry("exports", key.partition(".")[0]):
            overrides.append(argument)
        else:
            raise ConfigError(unknown_key_message(key, value, [*export_keys, *sections]))
    return settings, overrides
