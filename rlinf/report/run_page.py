"""Write a run's report: a single HTML file with headline, curves, tasks, videos, configuration and manifest.

Videos and recorded episodes are linked by relative paths, so the run folder can be moved or served.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from rlinf.evaluation.result import Success
from rlinf.evaluation.twins import EFFECT_METHOD
from rlinf.files import Json
from rlinf.number_formats import format_duration
from rlinf.report.charts import NUM_COLOURS, SMALL, Interval, Series
from rlinf.report.episode_player import player
from rlinf.report.page import Curves, card, clipped_text, curve_cards, series_of, write_page
from rlinf.report.run_data import RunData, kind_of, read_run, reported_lines
from rlinf.report.why.findings import record_of
from rlinf.report.why.rules import diagnose
from rlinf.run_folder import CHECKPOINTS_FOLDER, EVALUATIONS_FOLDER, REPORT_FILE


def write_report(run_folder: str | os.PathLike) -> Path:
    """Write ``report.html`` into the folder of a run or an evaluation, and return its path."""
    _, kind = kind_of(run_folder)
    if kind is not None:
        return kind.write_report(Path(run_folder))
    data = read_run(run_folder)
    title = _title(data)
    newest = data.fresh or data.after or next(reversed(data.evaluations), None)
    series = [
        Series(evaluation.name, evaluation.result.success_by_step(), colour)
        for evaluation, colour in data.in_the_table
        if evaluation.result.total.is_reported
    ]
    solved = card("Solved within t env steps", series, "t (env steps)", "fraction of episodes", percent=True)
    return write_page(
        data.folder / REPORT_FILE, "run.html", f"{title}: {newest.result.total}" if newest else title, title=title, data=data, reported=reported_lines(data.summary),
        facts=_facts(data), warnings=_warnings(data), findings=diagnose(record_of(data)) if data.lines else None, success_curves=_success_curves(data),
        tasks=_tasks(data), success_by_step=solved, actor_curves=_actor_curves(data.lines),
        baselines=_baselines(data), perturbations=_newest_rows(data, "perturbations"), effect_method=EFFECT_METHOD, curves=_training_curves(data), profile_steps=data.setting("trainer.profile_steps"), **player(data),
    )  # fmt: skip


def _title(data: RunData) -> str:
    """Return the name of the run or policy and the env, e.g. ``reach_ppo on tabletop`` or ``run1/rl_000012 on libero_spatial``."""
    config = data.settings
    if data.lines or data.summary:
        name = data.summary.get("experiment") or config.get("experiment_name")
    else:
        source = config.get("checkpoint") or data.setting("model.model_path")
        name = _place(Path(source)) if source else data.setting("model.model_type")
    env = data.suite or data.setting("env.name")
    return f"{name or _place(data.folder.resolve())}{f' on {env}' if env else ''}"


def _place(folder: Path) -> str:
    """Return the folder's name, preceded by the run's name if it can be found in the path."""
    run = folder.parents[1].name if folder.parent.name in (CHECKPOINTS_FOLDER, EVALUATIONS_FOLDER) else ""
    return f"{run}/{folder.name}" if run else folder.name


def _facts(data: RunData) -> Json:
    config, results = data.settings, [evaluation.result for evaluation in data.evaluations]
    drawn = {"greedy" if result.greedy else f"sampled at temperature {result.temperature:g}" for result in results}
    return {
        "model": data.setting("model.model_type"), "env": data.suite or data.setting("env.name"),
        "algorithm": data.setting("algorithm.name"), "seed": data.summary.get("seed", config.get("seed")),
        "env steps": f"{data.summary['env_steps']:,}" if "env_steps" in data.summary else None,
        "checkpoint": config.get("checkpoint"), "best checkpoint": data.summary.get("best_checkpoint", {}).get("name"), "actions": drawn.pop() if len(drawn) == 1 else None,
        "actions clipped": clipped_text(results[-1].actions_clipped_fraction, results[-1].actions_max_abs) if results else None,
        "training time": format_duration(data.summary["train_wall_s"]) if "train_wall_s" in data.summary else None,
    }  # fmt: skip


def _warnings(data: RunData) -> list[str]:
    """Return warnings from the newest evaluation and the parity gate."""
    newest = [*data.evaluations, *filter(None, [data.fresh])][-1:]
    lines = [line for evaluation in newest for line in evaluation.result.warnings]
    checked = [line for line in data.lines if "rollout/parity_exceeded" in line]
    beyond = [line["step"] for line in checked if line["rollout/parity_exceeded"]]
    if beyond:
        lines.append(
            f"At {len(beyond)} of {len(checked)} iterations (the first: {beyond[0]}) rollout and trainer differed by more than the "
            "parity gate accepts; see the curve of the parity gap"
        )
    return lines


def _tasks(data: RunData) -> list[tuple[str, list[Success | None]]]:
    """Return each task, and the total over all tasks, with its success in each evaluation in the table."""
    results = [evaluation.result for evaluation, _ in data.in_the_table]
    tasks = dict.fromkeys(task for result in results for task in result.per_task)
    rows: list[tuple[str, list[Success | None]]] = [
        (task, [result.per_task.get(task) for result in results]) for task in tasks
    ]
    return [*rows, ("all tasks", [result.total for result in results])] if len(rows) > 1 else rows


def _baselines(data: RunData) -> list[tuple[Json, Success | None]]:
    """Return the baselines of the newest evaluation that has some, and the success of each that was run."""
    rows = _newest_rows(data, "baselines")
    return [(row, Success.from_dict(row["success"]) if row["success"] else None) for row in rows]


def _newest_rows(data: RunData, name: str) -> list[Json]:
    """Return ``EvaluationResult.<name>`` of the newest evaluation that has rows."""
    newest_first = filter(None, [data.fresh, *reversed(data.evaluations)])
    return next((rows for evaluation in newest_first if (rows := getattr(evaluation.result, name))), [])


EVALUATED = (
    ("Success rate", "success_rate", "interval_low", "interval_high"),
    ("Return", "return_mean", "return_low", "return_high"),
)
"""For each evaluation chart: title, metric, and the metrics with the ends of its interval."""


def _success_curves(data: RunData) -> list[Markup]:
    lines = with_axes(data.lines)
    rl = [line for line in lines if line["phase"] == "rl"]
    cards = []
    is_reported = not data.evaluations or data.evaluations[-1].result.total.is_reported
    for shown, x, x_label in ((rl, "env_steps", "env steps"), (lines, "minutes", "training time (minutes)")):
        # Rollouts sample actions and evaluations usually do not, so their success differs even for the same policy.
        for y, *names in EVALUATED if is_reported else EVALUATED[1:]:
            rollouts = series_of(shown, x, [f"rollout/{names[0]}"], "rollouts (sampled, training episodes)", 3)
            series = [rollouts, _evaluated(shown, x, data.episodes, names)]
            title = f"{y} against {x_label.partition(' (')[0]}"
            cards.append(card(title, series, x_label, y.lower(), percent=y == "Success rate"))
    return cards


RL_CURVES: Curves = (
    ("Return", {"rollout/return_mean": "return"}, "return", {}),
    ("Episode length", {"rollout/episode_len": "length"}, "env steps", {"zero": True}),
    ("Policy loss", {"train/policy_loss": "policy loss"}, "policy loss", {}),
    ("Value loss", {"train/value_loss": "value loss"}, "value loss", {"zero": True}),
    (
        "KL", {"train/approx_kl": "old to new policy", "train/kl_to_reference": "policy to reference"}, "KL (nat)",
        {"zero": True},
    ),
    ("Entropy", {"train/entropy": "entropy"}, "entropy (nat)", {}),
    ("Clip fraction", {"train/clip_fraction": "clip fraction"}, "fraction of ratios", {"zero": True}),
    (
        "Parity gap: rollout and trainer log-probs",
        {"rollout/logprob_gap_max": "largest", "rollout/logprob_gap_mean": "mean"}, "|difference| (nat)", {"log": True},
    ),
    ("Explained variance of the critic", {"train/explained_variance": "explained variance"}, "explained variance", {}),
    ("Gradient norm", {"train/grad_norm": "gradient norm"}, "norm before clipping", {"zero": True}),
    ("Throughput", {"throughput/env_steps_per_s": "env steps"}, "env steps/s", {"zero": True}),
)  # fmt: skip
"""Curves over RL iterations."""


def _training_curves(data: RunData) -> list[Markup]:
    sft, rl = ([line for line in data.lines if line["phase"] == phase] for phase in ("sft", "rl"))
    loss = series_of(sft, "step", ["sft/loss"], "loss", 2)
    cards = [card("Behaviour cloning loss", [loss], "SFT step", "loss (nat)", size=SMALL)]
    return cards + curve_cards(rl, "step", "RL iteration", RL_CURVES)


def _actor_curves(lines: Sequence[Json]) -> list[Markup]:
    """Return the charts of an off-policy actor with a frozen base policy; empty for other runs."""
    lines = [line for line in lines if "rollout/base_policy_queries" in line]
    names = sorted({name for line in lines for name in line if name.startswith("rollout/residual_norm/")})
    by_task = {name: name.rpartition("/")[2] for name in names[: NUM_COLOURS - 1]} if len(names) > 1 else {}
    curves: Curves = (
        (
            "Critics against returns",
            {"train/q_initial": "predicted by the critics", "train/return_initial": "observed until the end or the time limit"},
            "discounted return", {},
        ),
        ("Residual norm", {"rollout/residual_norm": "all tasks", **by_task}, "normalised action", {"zero": True}),
        ("Action saturation", {"train/action_saturation": "fraction"}, "fraction at the bound", {"percent": True}),
        ("Base actions taken", {"rollout/base_action_fraction": "fraction"}, "fraction of chunks", {"percent": True}),
        ("Critic loss", {"train/critic_loss": "critic loss"}, "squared error", {"zero": True}),
        ("Values of sampled transitions", {"train/q_mean": "value", "train/target_mean": "target"}, "value", {}),
        ("Entropy coefficient", {"train/alpha": "alpha"}, "alpha", {"log": True}),
    )  # fmt: skip
    return curve_cards(lines, "rollout/env_steps_total", "env steps", curves) if lines else []


def with_axes(lines: Sequence[Json]) -> list[Json]:
    """Add RL ``env_steps`` and training ``minutes`` to each line; missing values are carried forward."""
    extended, env_steps, seconds = [], 0.0, 0.0
    for line in lines:
        env_steps = line.get("rollout/env_steps_total") or env_steps
        seconds = line.get("time/total_s") or seconds
        extended.append({**line, "env_steps": env_steps, "minutes": seconds / 60})
    return extended


def _evaluated(lines: Sequence[Json], x: str, episodes: str, names: Sequence[str]) -> Series:
    """Return the curve of an evaluation metric; ``names`` are the metric and the ends of its interval."""
    value, low, high = (f"eval/{name}" for name in names)
    lines = [line for line in lines if line.get(value) is not None]
    bands: list[Interval | None] = [(line[low], line[high]) if line[low] is not None else None for line in lines]
    points: list[tuple[float, float | None]] = [(line[x], line[value]) for line in lines]
    # Do not connect evaluations before and after training with a line, because there are no measurements in between.
    if len(points) == 2:
        points.insert(1, (points[1][0], None))
        bands.insert(1, None)
    return Series(f"evaluation ({episodes})", points, 1, bands, markers=True)
