"""Commands that train a policy, evaluate it, and pass it on: each reads its words here and works in ``rlinf.commands``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.checkpoints.saved_config import TOKEN_KEYS
from rlinf.commands.hydra_app import (
    configure,
    given_value,
    own_settings,
    parse,
    require_policy,
    run_training,
    with_checkpoint,
)
from rlinf.config.overrides import parse_overrides, values_of
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.evaluation.config import EvaluationConfig
from rlinf.imports import import_string
from rlinf.models.loading import hide_progress_bars
from rlinf.options import PathText, check_arguments, from_mapping, option, public_fields, unknown_key_message
from rlinf.preflight.folders import check_writable
from rlinf.recipes.load import with_overrides
from rlinf.robot.config import RobotConfig
from rlinf.run_folder import COMPARISON_FILE, REPORT_FILE
from rlinf.serving import require_packages

T = TypeVar("T")

COMPARE_FLAG = "--compare"


def train(arguments: Sequence[str]) -> int:
    """Run behaviour cloning, if configured, then reinforcement learning.

    examples:
      rlinf train experiment=quickstart                             a small VLA on a laptop, in minutes
      rlinf train experiment=quickstart seed=3 trainer.max_steps=20
      rlinf train -m experiment=quickstart seed=0,1,2               one run per value
      rlinf train experiment=quickstart resume=auto                 continue where it stopped
      rlinf train experiment=quickstart --cfg job                   print every key and its value, and stop

    Keys are explained in docs/configuration.md. --config-dir <folder> adds your own YAML files; --hydra-help shows Hydra's flags.
    """
    return _trained(arguments, "train")


def sft(arguments: Sequence[str]) -> int:
    """Run only the behaviour cloning of a configuration, with the keys and flags of `rlinf train`."""
    return _trained(arguments, "sft")


def _trained(arguments: Sequence[str], command: str) -> int:
    if not arguments:
        needed = "an experiment (`rlinf models` lists them) or a choice of model, env and algorithm"
        raise ConfigError(f"`rlinf {command}` needs {needed}. Run rlinf {command} experiment=quickstart")
    run_training(arguments, command)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint under its own configuration, or the configured model if ``checkpoint=`` is not given.

    Model and env come from the checkpoint's configuration. Overrides change single keys; a whole group (``env=tabletop``)
    replaces a section. ``--compare A B`` runs nothing: it compares two evaluations (or those that closed two runs) episode
    by episode. ``evaluation.compare=A`` does so after an evaluation.

    With ``questions=<file>``, a language or vision-language model answers questions: multiple choice, or exact answers by
    ``answer_type=<reward>``. docs/recipes.md lists the keys.
    """
    if not arguments:
        require_policy(arguments, "evaluate")
    if COMPARE_FLAG in arguments:
        return _compare(list(arguments))
    arguments = with_checkpoint(arguments)
    if any(word.startswith("questions=") for word in arguments):
        return _questions(arguments)
    return _carried_out(arguments, "evaluate")


def _carried_out(arguments: Sequence[str], command: str) -> int:
    """Run the function of ``rlinf.commands`` that has the command's name; its imports take seconds and follow the checks."""
    config = configure(parse(with_checkpoint(arguments)), command)
    if config is not None:
        import_string(f"rlinf.commands.{command}:{command}")(config)
    return 0


def _questions(arguments: Sequence[str]) -> int:
    """Evaluate on a file of questions, which has keys of its own."""
    from rlinf.commands.evaluate_questions import evaluate_questions
    from rlinf.recipes.questions import QuestionsConfig

    config = from_mapping(QuestionsConfig, with_overrides({}, arguments))
    if not config.checkpoint:
        raise ConfigError("checkpoint is not given; required: a model. Set checkpoint=<folder of a model or a run>")
    hide_progress_bars()
    evaluate_questions(config)
    return 0


def _compare(words: list[str]) -> int:
    """Print the comparison of the two evaluations after the flag."""
    from rlinf.report.compare_folders import compare_folders, evaluation_folder

    position = words.index(COMPARE_FLAG)
    folders, rest = words[position + 1 : position + 3], words[:position] + words[position + 3 :]
    key = "evaluation.allow_mismatch"
    if len(folders) < 2 or any(not word.startswith(f"{key}=") for word in rest):
        command, required = f"rlinf evaluate {COMPARE_FLAG}", f"two folders of evaluations, and nothing else but {key}"
        found = f"`{command}` got '{' '.join([*folders, *rest])}'"
        raise ConfigError(f"{found}; required: {required}. Run {command} <baseline folder> <other folder>")
    given = {name.partition(".")[2]: value for name, value in values_of(rest).items()}
    settings = from_mapping(EvaluationConfig, given, "evaluation")
    print(compare_folders(*folders, settings.allow_mismatch).table())
    written = evaluation_folder(folders[1])
    print(f"comparison: {written / COMPARISON_FILE}\nreport: {written / REPORT_FILE}")
    return 0


def robot(arguments: Sequence[str]) -> int:
    """Let a policy act in real time, one action every 1 / fps seconds, on a robot that is a row of the env.

    It plays the episodes of `rlinf evaluate`, one after the other, with its keys, files and comparisons, and writes timing.json. Keys of
    its own are fps, execution, relative_dims, max_relative_target, max_observation_age_s, max_failures, teleoperator, handover_max_step, record, first_episode,
    expert_threshold, expert_patience, expert_steps, success, page_host, page_port, arm, blind, real_time, latency_s, delay_steps, drop_frames and noise (docs/robot.md).
    """
    arguments = with_checkpoint(arguments)
    args, settings = own_settings(arguments, RobotConfig)
    require_policy(arguments, "robot")
    others = None if settings.blind is None else _blind_words(args, settings.blind)
    config = configure(args, "evaluate")
    if config is not None:
        other = None if others is None else configure(others, "evaluate")
        import_string("rlinf.commands.robot:robot")(config, settings, other)
    return 0


def _blind_words(args: Namespace, policy: str) -> Namespace:
    """Let a command compare with ``policy``, and return the words of a command that evaluates it."""
    if (given := given_value(args.overrides, "evaluation.compare")) is not None:
        raise ConfigError(
            f"evaluation.compare={given} with blind={policy}; required: one of them, because blind is the baseline. Leave evaluation.compare out"
        )
    args.overrides = [*args.overrides, f"evaluation.compare={policy}"]
    key = "model.url" if "://" in policy else "checkpoint"
    rest = [
        item.input_line
        for item in parse_overrides(args.overrides)
        if item.key_or_group not in ("checkpoint", "model.url")
    ]
    return Namespace(**{**vars(args), "overrides": [*rest, f"{key}={policy}"]})


def audit(arguments: Sequence[str]) -> int:
    """Ask whether a policy reads its instruction, looks, reacts, or remembers: the same episodes, with one thing changed at a time.

    It has the keys of `rlinf evaluate`. Each condition plays 100 episodes unless evaluation.num_episodes says otherwise. The page
    is written to outputs/<experiment>/audit_<time> unless output_dir says otherwise. docs/audit.md explains the answers.
    """
    arguments = with_checkpoint(arguments)
    args = parse(arguments)
    require_policy(arguments, "audit")
    _check_checkpoint(arguments)
    from rlinf.commands import audit as command

    config = command.configured(args)
    if config is not None:
        command.audit(config)
    return 0


def serve(arguments: Sequence[str]) -> int:
    """Serve a checkpoint, or the folder of a public model (model=lerobot model.model_path=...), to clients of openpi and of vla-eval.

    It ends with SIGTERM or Ctrl-C.

    `rlinf evaluate model=remote model.url=ws://127.0.0.1:8000` evaluates it from another process (docs/serving.md). Keys that are not the
    server's change the checkpoint's configuration: cluster.device=cuda, model.precision=bf16.
    """
    require_packages("`rlinf serve`")
    arguments = with_checkpoint(arguments)
    _check_checkpoint(arguments)
    from rlinf.commands.serve import ServeConfig, serve

    args, settings = own_settings(arguments, ServeConfig)
    require_policy(arguments, "serve", ["checkpoint", "model.model_path"], " port=8000")
    config = configure(args, "serve")
    if config is not None:
        serve(config, settings)
    return 0


def _check_checkpoint(arguments: Sequence[str]) -> None:
    """Reject a folder without a checkpoint before the imports of the command, which take seconds."""
    folder = given_value([word for word in arguments if word.startswith("checkpoint=")], "checkpoint")
    if folder is not None:
        resolve_checkpoint(folder)


def collect(arguments: Sequence[str]) -> int:
    """Store episodes of the env's scripted expert, or of the policy of ``checkpoint`` or ``model.model_path``, as a LeRobotDataset.

    With a checkpoint, model and env come from its configuration. Overrides change single keys; a whole group
    (``env=tabletop``) replaces a section.
    """
    return _carried_out(arguments, "collect")


def convert(arguments: Sequence[str]) -> int:
    """Write demonstrations in HDF5, of robomimic or of LIBERO, as a LeRobotDataset.
    See docs/datasets.md.
    """
    from rlinf.commands.convert import ConvertConfig, convert

    convert(_own_config(arguments, ConvertConfig))
    return 0


def classifier(arguments: Sequence[str]) -> int:
    """Train a classifier of success from the frames of labelled episodes, and measure its errors on episodes that it has not seen.

    `env.success_classifier=<output_dir>` then lets it decide on success, and so on the reward (docs/robot.md).
    """
    from rlinf.commands.classifier import ClassifierConfig, classifier

    classifier(_own_config(arguments, ClassifierConfig))
    return 0


def _own_config(arguments: Sequence[str], kind: type[T]) -> T:
    """Return the settings of a command whose keys are the fields of ``kind`` alone."""
    check_arguments(arguments, public_fields(kind))
    return from_mapping(kind, values_of(arguments))


@dataclass
class ExportConfig:
    """What to export, and where."""

    checkpoint: PathText | None = option(None, "Checkpoint or run folder.")
    output: PathText | None = option(None, "Folder to write; loads with `from_pretrained`.")
    merge_lora: bool = option(False, "Add the adapters into the weights.")


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint as a folder that ``from_pretrained`` loads.

    Other keys override the checkpoint's configuration, e.g. ``plugins=[my_model.py]``, or ``policy.model_name_or_path=`` where the
    model of a recipe has moved.
    """
    own, overrides = _split(with_checkpoint(arguments))
    config = from_mapping(ExportConfig, own)
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


def _split(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """Return the values of the command's own keys, and the overrides of the configuration."""
    own, others = {}, []
    sections_of_recipes = [key.partition(".")[0] for key in TOKEN_KEYS]
    own_keys, other_keys = public_fields(ExportConfig), [*public_fields(RunConfig), *sections_of_recipes]
    check_arguments(arguments, own_keys)
    for word in arguments:
        key, _, value = word.partition("=")
        if key in own_keys:
            own |= values_of([word])
        elif key.partition(".")[0] in other_keys:
            others.append(word)
        else:
            raise ConfigError(unknown_key_message(key, value, [*own_keys, *other_keys]))
    return own, others
