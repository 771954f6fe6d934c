"""Distils a base policy and its actor into one ordinary policy (PLD, Xiao et al. 2025)."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import yaml

from rlinf.checkpoints.folders import has_checkpoints, resolve_checkpoint
from rlinf.commands.collect import collect
from rlinf.commands.evaluate import evaluate
from rlinf.commands.export import export, write_export
from rlinf.commands.open_checkpoint import Opened, open_checkpoint
from rlinf.commands.train import sft
from rlinf.config.saved_code import code_overrides
from rlinf.config.schema import RunConfig
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.errors import ConfigError
from rlinf.evaluation.compare import METHOD, compare
from rlinf.evaluation.partial import partial_files
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.files import Json, locked_folder, write_text
from rlinf.models.embodiment.actor_policy import ActorPolicy
from rlinf.number_formats import format_interval, format_p_value, format_points
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.folders import check_writable
from rlinf.preflight.saved import changes_since
from rlinf.preflight.validation import validate
from rlinf.report.compare_folders import evaluation_folder
from rlinf.run_folder import LOCK_FILE, RESULT_FILE, SUMMARY_FILE

BASE, EPISODES, RUN, POLICY, EVALUATIONS = "base", "episodes", "run", "policy", "evaluations"
"""Folders in the output."""
DISTIL_FILE, SETTINGS_FILE, CARD_FILE = "distil.json", "distil.yaml", "DISTILLATION.md"
IMPROVED, DISTILLED = "improved", "distilled"


def distil(config: RunConfig, output: Path) -> Path:
    """Clone the successes of ``config.checkpoint``, a base policy with an actor, into the base policy; return the new policy's folder.

    Rolls out base and actor for ``collect.num_episodes`` episodes, fine-tunes the base policy on the successful ones with its
    own loss (``sft``), and evaluates the base policy, the improved one (with the actor) and the distilled one on the same
    episodes. ``output/policy`` is an export with these results in its ``DISTILLATION.md``; ``output/distil.json`` also contains them.
    The same call continues an interrupted distillation.

    Raise ConfigError if the checkpoint has no actor, no episode succeeded, or ``output`` has different settings; and
    the errors of the commands ``collect``, ``sft``, ``export`` and ``evaluate``.
    """
    config = replace(config, checkpoint=str(resolve_checkpoint(str(config.checkpoint))))
    if config.sft.max_steps == 0:
        raise ConfigError("sft.max_steps=0; expected at least one step of fine-tuning. Set sft.max_steps=500")
    if config.collect.extends is not None:
        raise ConfigError("collect.extends would add episodes of a different policy. Set collect.extends=null")
    check_writable(str(output), "output")
    if any(path.name != LOCK_FILE for path in output.glob("*")) and not (output / SETTINGS_FILE).is_file():
        raise ConfigError(f"output={output} exists and is not a distillation's. Set output=<a new folder>")
    opened = _open(config)
    cloning = _cloning(config, output, opened.policy.base.training_options)
    with locked_folder(output):
        collecting = replace(config, dataset=str(output / EPISODES))
        if not is_complete(output / EPISODES):
            shutil.rmtree(output / EPISODES, ignore_errors=True)  # of an interrupted call
            validate(collecting, "collect")
        _check_settings(config, output)
        if not (output / BASE).exists():
            _write_base(config, opened, output / BASE)
        del opened  # its memory is needed for the policies below
        if not is_complete(output / EPISODES):
            collect(collecting)
        if not (output / RUN / SUMMARY_FILE).is_file():
            if has_checkpoints(output / RUN):
                cloning = replace(cloning, resume=str(output / RUN), init_from=None)
            else:
                shutil.rmtree(output / RUN, ignore_errors=True)
            validate(cloning, "sft")
            sft(cloning)
        if not (output / POLICY).exists():
            export(output / RUN, output / POLICY, overrides=shlex.split(code_overrides(to_mapping(config))))
        results = {
            BASE: _evaluate(config, output / BASE, output / EVALUATIONS / BASE),
            IMPROVED: _evaluate(config, Path(str(config.checkpoint)), output / EVALUATIONS / IMPROVED),
            DISTILLED: EvaluationResult.from_json(evaluation_folder(output / RUN) / RESULT_FILE),
        }
        report = _report(results, output / EPISODES)
        write_text(output / DISTIL_FILE, json.dumps(report, indent=1))
        write_text(output / POLICY / CARD_FILE, f"# A distilled policy\n\n{_table(report)}\n")
    print(f"{_table(report)}\npolicy: {output / POLICY}", flush=True)
    return output / POLICY


def _open(config: RunConfig) -> Opened:
    """Open the checkpoint; raise ConfigError if it has no actor, or its base policy cannot be trained."""
    opened = open_checkpoint(str(config.checkpoint), config)
    if not isinstance(opened.policy, ActorPolicy):
        raise ConfigError(
            f"checkpoint={config.checkpoint} is a policy without an actor; expected a base policy and an actor. "
            "Set checkpoint=<a run with algorithm=sac or td3>"
        )
    base = opened.policy.base
    type(base).check_sft(replace(base.config, **base.training_options) if base.training_options else base.config)
    return opened


def _write_base(config: RunConfig, opened: Opened, folder: Path) -> None:
    """Write the base policy as an export."""
    base, saved = opened.policy.base.eval(), opened.manifest
    manifest = replace(build_manifest(config, base, policy_version=0), probe=saved.probe, fps=saved.fps)
    write_export(config, base, manifest, folder)


def _cloning(config: RunConfig, output: Path, training_options: Json) -> RunConfig:
    """Return the configuration that fine-tunes the base policy on the successful episodes."""
    return replace(
        config,
        checkpoint=None,
        init_from=str(output / BASE),
        output_dir=str(output / RUN),
        model=replace(config.model, override_config={**config.model.override_config, **training_options}),
        sft=replace(config.sft, dataset=str(output / EPISODES), filter="successes"),
        trainer=replace(config.trainer, max_steps=0),
    )


def _check_settings(config: RunConfig, output: Path) -> None:
    """Store the configuration in ``output``; raise ConfigError if a different one is stored there."""
    path = output / SETTINGS_FILE
    if not path.exists():
        write_text(path, yaml.safe_dump(to_mapping(config), sort_keys=False))
    elif changes := changes_since(yaml.safe_load(path.read_text(encoding="utf-8")), config):
        raise ConfigError(
            f"output={output} was started with different settings ({', '.join(changes)}); expected equal ones. Set output=<a new folder>"
        )


def is_complete(episodes: Path) -> bool:
    """Return whether all episodes were run."""
    about = episodes / "meta" / OWN_FILE
    return about.is_file() and json.loads(about.read_text(encoding="utf-8"))["whole"]


def _evaluate(config: RunConfig, checkpoint: Path, output: Path) -> EvaluationResult:
    """Evaluate a policy, unless that is done."""
    if (output / RESULT_FILE).is_file() and not partial_files(output):
        return EvaluationResult.from_json(output / RESULT_FILE)
    return evaluate(replace(config, checkpoint=str(checkpoint), output_dir=str(output)))


def _report(results: dict[str, EvaluationResult], episodes: Path) -> Json:
    """Return the content of ``distil.json``."""
    about = json.loads((episodes / "meta" / OWN_FILE).read_text(encoding="utf-8"))
    outcomes = [bool(episode["success"]) for episode in about["episodes"]]
    pairs = {name: compare(results[BASE], results[name]).total for name in (IMPROVED, DISTILLED)}
    gain = pairs[IMPROVED].difference
    return {
        "cloned": Success(sum(outcomes), len(outcomes)).as_dict(),
        "success": {name: result.total.as_dict() for name, result in results.items()},
        "over_base": {name: value.as_dict() for name, value in pairs.items()},
        "over_improved": compare(results[IMPROVED], results[DISTILLED]).total.as_dict(),
        "retained": pairs[DISTILLED].difference / gain if gain > 0 else None,
        "method": METHOD,
    }


def _table(report: Json) -> str:
    """Return the report as a Markdown table."""
    lines = ["| policy | success (95 %) | over the base policy (95 %) |", "|---|---|---|"]
    for name, values in report["success"].items():
        change = ""
        if over := report["over_base"].get(name):
            interval = format_points(*over["interval"])
            change = f"{format_points(over['difference'])} ({interval}), {format_p_value(over['p_value'])}"
        lines.append(f"| {name} | {_success(values)} | {change} |")
    lines += ["", f"Successful episodes, which were cloned: {_success(report['cloned'])}."]
    if (retained := report["retained"]) is not None:
        lines.append(f"Retained fraction of the improvement: {retained:.0%}.")
    return "\n".join([*lines, f"{report['method']}."])


def _success(values: Json) -> str:
    success = Success.from_dict(values)
    return f"{success.count} ({format_interval(*success.interval, ' - ')})"
