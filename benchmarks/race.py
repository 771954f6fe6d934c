"""Compares methods by held-out success versus env steps, CPU time and forward passes.

Each seed runs the full pipeline: demonstrations, behaviour cloning, and the method starting from the BC policy. With ``--one-clone
SEED``, all methods start from this seed's BC policy. This is cheaper, but intervals exclude the variation between BC policies.

There are three gaps: ``quickstart``, ``quickstart_table`` and ``quickstart_camera``. PPO and GRPO train the full policy. ``filtered``, ``hg_dagger`` and ``recap``
clone a folder of the BC policy's episodes with corrections by the scripted expert; ``rlpd`` is ``residual`` with this folder. The
remaining methods freeze the policy and train an actor; ``distilled`` then clones the successes of ``residual`` into the BC policy. The baselines without a learned residual are the BC policy itself, the BC policy
with uniform action noise, the best constant offsets from a grid, overall and per instruction (chosen on training episodes), and the best
of eight chunks by learned critics.

    python benchmarks/race.py [--gaps quickstart_table ...] [--methods residual ppo ...] [--seeds 41 42 43 44 45]
                              [--one-clone SEED] [--output FOLDER] [overrides ...]

Each (gap, method, seed) is a run folder in ``FOLDER/<gap>/own_clones`` or ``FOLDER/<gap>/one_clone_<SEED>``. Finished
runs are not repeated, so the same command resumes an interrupted comparison. ``table.md`` and ``race.png`` include all runs in
the folder; ``--without-runs`` only writes these two files. Overrides apply to every run, so use a separate FOLDER for them.
Requires matplotlib.

Times are in seconds: CPU time for training (excluding evaluations), and wall time for cloning. Env steps used to record a folder are
included. A pass is one observation in a forward pass of the policy, for acting, scoring or training. "Env steps to 90 %" is the
number at a seed's first evaluation with at least 90 %. Intervals are Student's for a mean over seeds, and Wilson's for a single
seed. ``ours`` and ``peer`` are the median env steps to 90 % of ``residual`` and PPO, on the first gap where both reach it. Seeds
used to choose settings are marked in the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import rlinf
from rlinf.checkpoints.folders import read_saved_config, resolve_checkpoint
from rlinf.commands.collect import collect
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.data.formats import describe_dataset
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.errors import ConfigError
from rlinf.evaluation.baselines import NUM_TRAINING, Constants, noisy, plane_offsets
from rlinf.evaluation.evaluator import episode_list, evaluate_policy
from rlinf.evaluation.intervals import mean_interval, wilson_interval
from rlinf.files import locked_folder, write_text
from rlinf.options import to_mapping
from rlinf.preflight.saved import changes_since
from rlinf.preflight.validation import validate
from rlinf.robot.command import robot
from rlinf.robot.config import RobotConfig
from rlinf.tracking.tracker import read_metrics

TARGET = 0.9
SETTING_SEEDS = (0, 1, 33)
SEEDS = range(41, 46)  # not used to choose settings
OWN_CLONES, ONE_CLONE = "own_clones", "one_clone_"  # folders of a gap
NOISES, NOISE_SEEDS = (0.5, 1.0), range(5)
TICKS = (0, 2_000, 8_000, 24_000, 60_000)  # env steps in the image
PASSES_OF_TRAINING = 2  # of an observation of PPO and GRPO: to act, and for one epoch; the rollout scores it
EPISODES, NUM_PLAYED, CLONING_STEPS = "{episodes}", 60, 300  # the folder of episodes, in the overrides of a method
IMPROVED, NUM_IMPROVED, DISTIL_STEPS = "{improved}", 300, 800  # the folder of the residual actor's episodes


@dataclass(frozen=True)
class Gap:
    """Env steps when training an actor or the full policy, and overrides for cloning the BC policy."""

    head_steps: int
    policy_steps: int
    cloning: tuple[str, ...] = ()


GAPS = {
    "quickstart": Gap(12_288, 56_320),
    "quickstart_table": Gap(12_288, 81_920),
    "quickstart_camera": Gap(12_288, 56_320, ("sft.max_steps=1600", "env.camera_offset_m=0")),
}


@dataclass(frozen=True)
class Method:
    """Overrides of a gap's experiment, env steps per iteration, and env steps between evaluations."""

    overrides: tuple[str, ...]
    iteration_steps: int
    evaluation_steps: int

    @property
    def learns_from_episodes(self) -> bool:
        return any(EPISODES in each for each in self.overrides)

    @property
    def learns_from_actor(self) -> bool:
        """Whether it clones the episodes of the residual actor with the same seed."""
        return f"sft.dataset={IMPROVED}" in self.overrides


def _actor(algorithm: str, name: str, *more: str) -> Method:
    common = (f"algorithm={algorithm}", f"algorithm.actor.name={name}", "model.features=pooled")
    return Method(
        (*common, "rollout.num_envs=32", "env.reward_mode=sparse", "trainer.lr_decay=none", *more), 32 * 16, 2_048
    )


def _cloned(*rows: str, dataset: str = EPISODES, steps: int = CLONING_STEPS) -> Method:
    own = (f"sft.max_steps={steps}", "sft.learning_rate=3e-4", "sft.warmup_steps=10", f"sft.dataset={dataset}")
    return Method((*own, "trainer.max_steps=0", "env.reward_mode=sparse", *rows), 1, 1)


METHODS = {
    "ppo": Method((), 64 * 16, 4_096),
    "grpo": Method(
        ("algorithm=grpo", "rollout.num_envs=128", "rollout.group_size=8", "trainer.minibatch_size=256"),
        128 * 16,
        4_096,
    ),
    "residual": _actor("sac", "residual"),
    "residual_td3": _actor("td3", "residual"),
    "expo": _actor("sac", "expo"),
    "direct": _actor("sac", "direct"),
    "dsrl": _actor("sac", "dsrl", "algorithm.actor.scale=2"),
    "rlt": _actor("td3", "rlt"),
    # Negligible corrections: the critics select among chunks of the BC policy.
    "best_of_8": _actor("sac", "expo", "algorithm.actor.num_candidates=8", "algorithm.actor.scale=1e-6"),
    "filtered": _cloned("sft.filter=successes"),
    "hg_dagger": _cloned("sft.filter=corrected"),
    "recap": _cloned("sft.advantage_top_fraction=0.2", "model.features=pooled"),
    "distilled": _cloned("sft.filter=successes", dataset=IMPROVED, steps=DISTIL_STEPS),
    "rlpd": _actor("sac", "residual", f"algorithm.offline_dataset={EPISODES}", "algorithm.offline_ratio=0.5"),
}


@dataclass
class Point:
    """An evaluation: env steps, number of successful episodes, and training cost up to that point."""

    env_steps: int
    successes: int
    episodes: int
    cpu_s: float
    passes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes


def compose(overrides: Sequence[str]) -> RunConfig:
    """Compose the configuration of a run."""
    common = ["evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "cluster.num_threads=1"]
    common.append("evaluation.baselines=false")  # `controls` evaluates them
    return build_config(compose_config([*common, *overrides]))


def make_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """Compose and check the configuration of a run."""
    config = compose(overrides)
    config.output_dir = str(folder)
    validate(config)
    return config


def finished(folder: Path, overrides: Sequence[str]) -> bool:
    """Return whether a run of these settings ended; remove what one that was stopped has left.

    Raises:
        ConfigError: It is still running, or ended with other settings.
    """
    if not (folder / "summary.json").exists() and folder.exists():
        with locked_folder(folder):
            shutil.rmtree(folder)
    if not folder.exists():
        return False
    check_settings(folder, read_saved_config(resolve_checkpoint(folder)), overrides)
    return True


def check_settings(folder: Path, saved: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check that ``saved`` settings are those of a run now.

    Raises:
        ConfigError: One differs. A setting that came later is not compared.
    """
    changed = changes_since(saved, compose(overrides))
    if changed:
        raise ConfigError(
            f"{folder} was made with other settings: {'; '.join(changed)}. Delete it, or give another --output"
        )


def run(folder: Path, overrides: Sequence[str]) -> None:
    """Train unless the run has already finished."""
    if not finished(folder, overrides):
        train(make_config(folder, overrides))


def curve(folder: Path) -> list[Point]:
    """Return the evaluations of an RL run, or the last evaluation of a cloning run."""
    lines, cpu_s, calls, points = read_metrics(folder), 0.0, 0, []
    last = lines[-1]
    if last["phase"] == "sft":
        counts = (int(last[f"eval/{name}"]) for name in ("successes", "episodes"))
        return [Point(0, *counts, last["time/total_s"], last["step"] * 64)]
    frozen = any("rollout/base_policy_queries" in line for line in lines)
    for line in lines:
        if line["phase"] == "rl":
            cpu_s += line.get("time/cpu_s", 0.0)
            calls = line.get("rollout/base_policy_queries", calls)
        if line["phase"] == "rl" and "eval/success_rate" in line:
            steps = int(line["rollout/env_steps_total"])
            passes = int(calls) if frozen else PASSES_OF_TRAINING * steps
            points.append(Point(steps, int(line["eval/successes"]), int(line["eval/episodes"]), cpu_s, passes))
    return points


def clone(folder: Path, gap: str, seed: int, overrides: Sequence[str]) -> Path:
    """Clone a gap's demonstrator unless this has been done; return the run folder."""
    output = folder / gap / "clones" / f"seed{seed}"
    run(output, [f"experiment={gap}", f"seed={seed}", *GAPS[gap].cloning, *overrides, "trainer.max_steps=0"])
    return output


def episodes_folder(folder: Path, gap: str, seed: int) -> Path:
    """Return the folder with episodes of a seed's BC policy."""
    return folder / gap / "episodes" / f"seed{seed}"


def play(folder: Path, gap: str, seed: int, overrides: Sequence[str]) -> Path:
    """Record episodes of a seed's BC policy with scripted corrections unless this has been done; return the dataset."""
    output = episodes_folder(folder, gap, seed)
    if not (output / "dataset").exists():
        shutil.rmtree(output, ignore_errors=True)
        own = [f"checkpoint={clone(folder, gap, seed, overrides)}", "evaluation.split=train", "env.reward_mode=sparse"]
        own += [f"evaluation.num_episodes={NUM_PLAYED}", "evaluation.allow_mismatch=[env]"]
        config = compose([f"experiment={gap}", f"seed={seed}", *overrides, *own])
        config.output_dir = str(output)
        robot(config, RobotConfig(real_time=False, teleoperator="scripted", record=str(output / "dataset")))
    return output / "dataset"


def improve(actor: Path, gap: str, seed: int, overrides: Sequence[str]) -> Path:
    """Collect successful episodes of the policy with the actor in ``actor`` unless this has been done; return the dataset."""
    dataset = improved_folder(actor)
    if not dataset.exists():
        rows = [
            f"checkpoint={actor}",
            f"dataset={dataset}",
            f"collect.num_episodes={NUM_IMPROVED}",
            "collect.num_envs=32",
        ]
        config = compose([f"experiment={gap}", f"seed={seed}", *METHODS["residual"].overrides, *overrides, *rows])
        validate(config, "collect")
        collect(config)
    return dataset


def improved_folder(actor: Path) -> Path:
    return actor.with_name(f"episodes_of_{actor.name}")


def group_folder(folder: Path, gap: str, one_clone: int | None) -> Path:
    """Return the folder for a gap's runs that start from each seed's BC policy, or all from one."""
    return folder / gap / (OWN_CLONES if one_clone is None else f"{ONE_CLONE}{one_clone}")


def race(
    folder: Path, gap: str, method: str, seed: int, overrides: Sequence[str], one_clone: int | None = None
) -> None:
    """Train with a method, starting from its own seed's BC policy or from ``one_clone``'s."""
    kind, clone_seed = METHODS[method], seed if one_clone is None else one_clone
    source, own = clone(folder, gap, clone_seed, overrides), kind.overrides
    if kind.learns_from_episodes:
        own = [each.replace(EPISODES, str(play(folder, gap, clone_seed, overrides))) for each in own]
    if kind.learns_from_actor:
        race(folder, gap, "residual", seed, overrides, one_clone)
        actor = group_folder(folder, gap, one_clone) / f"residual_seed{seed}"
        own = [each.replace(IMPROVED, str(improve(actor, gap, seed, overrides))) for each in own]
    steps = GAPS[gap].policy_steps if method in ("ppo", "grpo") else GAPS[gap].head_steps
    run(
        group_folder(folder, gap, one_clone) / f"{method}_seed{seed}",
        [
            f"experiment={gap}", f"seed={seed}", "sft.max_steps=0", f"init_from={source}",
            f"trainer.max_steps={steps // kind.iteration_steps}",
            f"trainer.eval_every={kind.evaluation_steps // kind.iteration_steps}", *own, *overrides,
        ],
    )  # fmt: skip


def controls(folder: Path, gap: str, seed: int, overrides: Sequence[str], one_clone: int | None = None) -> None:
    """Evaluate the baselines without learning for a seed's BC policy (``one_clone`` or its own) unless this has been done.

    Raises:
        ConfigError: It was done with other settings, or its file does not say with which.
    """
    output = group_folder(folder, gap, one_clone) / f"controls_seed{seed}.json"
    settings = [f"experiment={gap}", f"seed={seed}", *overrides]
    if output.exists():
        check_settings(output, read_controls(output)["settings"], settings)
        return
    model = rlinf.load_policy(clone(folder, gap, seed, overrides), device="cpu").model
    config = make_config(output.with_suffix(""), settings)
    evaluation, env = config.evaluation, rlinf.make_env(config.env, config.evaluation.num_envs)
    held_out = episode_list(env, "eval", evaluation.num_episodes)
    found = {"base": [evaluate_policy(model, env, held_out)]}
    for noise in NOISES:
        found[f"uniform noise {noise:g}"] = [
            evaluate_policy(model, noisy(env, noise, draw), held_out) for draw in NOISE_SEEDS
        ]
    training = episode_list(env, "train", min(NUM_TRAINING, evaluation.num_episodes))
    constants = Constants.choose(model, env, training, plane_offsets(env.action_dim))
    best = ", ".join(f"{number:.2f}" for number in constants.best)
    found[f"best constant ({best})"] = [evaluate_policy(model, Constants(constants.best, {}).apply(env), held_out)]
    found["constant per instruction"] = [evaluate_policy(model, constants.apply(env), held_out)]
    env.close()
    counts = {name: [(one.successes, one.episodes) for one in results] for name, results in found.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps({"settings": to_mapping(config), "counts": counts}, indent=1))


def read_controls(path: Path) -> dict[str, Any]:
    """Return ``settings`` and ``counts`` of baselines; raise ConfigError if the file does not contain settings."""
    found = json.loads(path.read_text())
    if found.keys() != {"settings", "counts"}:
        raise ConfigError(f"{path} does not say with which settings it was made. Delete it, or give another --output")
    return found


def controls_of(group: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the controls of a group: name, (successes, episodes) of each draw on one clone, or of each of the clones."""
    found = [read_controls(path)["counts"] for path in sorted(group.glob("controls_seed*.json"))]
    if len(found) < 2:
        return found[0] if found else {}
    by_clone: dict[str, list[tuple[int, int]]] = {}
    for name, draws in (item for each in found for item in each.items()):
        successes, episodes = (sum(column) for column in zip(*draws, strict=True))
        kind = name.partition(" (")[0]  # each BC policy has its own constant
        by_clone.setdefault(kind, []).append((successes, episodes))
    return by_clone


def interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the mean success of runs, each given as (successes, episodes), and its 95 % interval."""
    rates = [successes / episodes for successes, episodes in counts]
    if len(rates) == 1:
        return (rates[0], *wilson_interval(*counts[0]))
    mean, low, high = mean_interval(rates)
    return mean, max(low, 0.0), min(high, 1.0)


def to_target(points: Sequence[Point]) -> Point | None:
    """Return the first evaluation that reaches the target."""
    return next((point for point in points if point.rate >= TARGET), None)


def median_to_target(curves: Sequence[Sequence[Point]], cost: str) -> float | None:
    """Return the median cost over seeds to reach the target, or None if at least half did not reach it."""
    reached = [to_target(points) for points in curves]
    value = statistics.median(float("inf") if point is None else getattr(point, cost) for point in reached)
    return None if value == float("inf") else value


def groups(folder: Path) -> dict[str, Path]:
    """Return folders of comparable runs by title: for each seed's own BC policy, and for each single BC policy."""
    found = {}
    for gap in GAPS:
        if (own := folder / gap / OWN_CLONES).exists():
            found[f"{gap}, own clones"] = own
        for shared in sorted((folder / gap).glob(f"{ONE_CLONE}*")):
            found[f"{gap}, one clone (seed {shared.name.removeprefix(ONE_CLONE)})"] = shared
    return found


def runs_of(group: Path) -> dict[str, dict[int, list[Point]]]:
    """Return the curves (method, seed, evaluations) of a group's finished runs."""
    found: dict[str, dict[int, list[Point]]] = {}
    for method, kind in METHODS.items():
        for run_folder in sorted(group.glob(f"{method}_seed*")):
            if (run_folder / "summary.json").exists():
                seed, points = int(run_folder.name.rpartition("_seed")[2]), curve(run_folder)
                if kind.learns_from_episodes:  # each of their env steps also required a pass
                    one_clone = group.name.removeprefix(ONE_CLONE)
                    of_clone = episodes_folder(
                        group.parents[1], group.parent.name, int(one_clone) if one_clone.isdigit() else seed
                    )
                    played = describe_dataset(of_clone / "dataset").num_rows
                    points = [
                        replace(each, env_steps=each.env_steps + played, passes=each.passes + played) for each in points
                    ]
                if kind.learns_from_actor:
                    actor = group / f"residual_seed{seed}"
                    about = json.loads((improved_folder(actor) / "meta" / OWN_FILE).read_text())
                    last, rolled_out = curve(actor)[-1], sum(row["num_env_steps"] for row in about["episodes"])
                    points = [
                        replace(
                            point, env_steps=last.env_steps + rolled_out, cpu_s=point.cpu_s + last.cpu_s,
                            passes=point.passes + last.passes + rolled_out,
                        )
                        for point in points
                    ]  # fmt: skip
                found.setdefault(method, {})[seed] = points
    return found


def table(gap: str, counts: dict[str, list[tuple[int, int]]], runs: dict[str, dict[int, list[Point]]]) -> list[str]:
    """Return the Markdown rows of a group with title ``gap``. ``counts`` are the baselines' counts."""
    noise = max((interval(each)[2] for name, each in counts.items() if "noise" in name), default=None)
    rows = [
        f"| {gap} | seeds | env steps | success (95 %) | above noise | env steps to 90 % | CPU s to 90 % | CPU s | passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in counts.items():
        rows.append(f"| {name} | {len(each)} | 0 | {percents(interval(each))} | | | | | |")
    for method, by_seed in runs.items():
        curves, last = list(by_seed.values()), [points[-1] for points in by_seed.values()]
        success = interval([(point.successes, point.episodes) for point in last])
        steps, cpu_s, passes = (
            statistics.mean(getattr(point, key) for point in last) for key in ("env_steps", "cpu_s", "passes")
        )
        costs = [median_to_target(curves, key) for key in ("env_steps", "cpu_s")]
        reached = " | ".join("not reached" if cost is None else f"{cost:,.0f}" for cost in costs)
        seeds = ", ".join(f"{seed}{'*' if seed in SETTING_SEEDS else ''}" for seed in by_seed)
        above = "" if noise is None else "yes" if success[1] > noise else "no"
        rows.append(
            f"| {method} | {seeds} | {steps:,.0f} | {percents(success)} | {above} | {reached} | {cpu_s:,.0f} "
            f"| {passes:,.0f} |"
        )
    return [*rows, ""]


def percents(values: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:.1f} % ({low:.1f} - {high:.1f})"


def mean_curve(by_seed: dict[int, list[Point]]) -> list[tuple[float, float]]:
    """Return mean env steps and mean success for evaluations available for all seeds."""
    columns = zip(*by_seed.values(), strict=False)
    return [
        (statistics.mean(point.env_steps for point in points), statistics.mean(point.rate for point in points))
        for points in columns
    ]


def curve_rows(gap: str, runs: dict[str, dict[int, list[Point]]]) -> list[str]:
    """Return the mean success at each evaluation as Markdown."""
    rows = [f"| {gap} | env steps: mean success in % |", "|---|---|"]
    for method, by_seed in runs.items():
        rows.append(
            f"| {method} | {', '.join(f'{steps:,.0f}: {100 * rate:.1f}' for steps, rate in mean_curve(by_seed))} |"
        )
    return [*rows, ""]


def draw(output: Path, gaps: dict[str, tuple[dict, dict]]) -> None:
    """Plot success versus env steps, with one panel per gap. Lines are means over seeds, and dots are seeds."""
    figure, axes = plt.subplots(1, len(gaps), figsize=(5.2 * len(gaps), 4.4), sharey=True, squeeze=False)
    colours = dict(zip(METHODS, plt.get_cmap("tab20").colors, strict=False))
    for axis, (gap, (counts, runs)) in zip(axes[0], gaps.items(), strict=True):
        for name, each in counts.items():
            mean, style = interval(each)[0], ":" if "noise" in name else "--"
            axis.axhline(100 * mean, color="0.6", linestyle=style, linewidth=1)
            axis.annotate(
                name, (0.01, 100 * mean), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=7
            )
        for method, by_seed in runs.items():
            steps, rates = zip(*mean_curve(by_seed), strict=True)
            axis.plot(steps, [100 * rate for rate in rates], color=colours[method], label=f"{method} ({len(by_seed)})")
            for points in by_seed.values():
                axis.plot(
                    [point.env_steps for point in points], [100 * point.rate for point in points], ".",
                    color=colours[method], markersize=3, alpha=0.5,
                )  # fmt: skip
        axis.set_xscale("symlog", linthresh=2_000)
        axis.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
        axis.minorticks_off()
        axis.set(title=gap, xlabel="env steps", ylim=(0, 102), xlim=(0, TICKS[-1]))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower right", title="method (seeds)", title_fontsize=7)
    axes[0][0].set_ylabel("success on held-out episodes, %")
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", nargs="+", choices=GAPS, default=list(GAPS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--one-clone", type=int, metavar="SEED", help="start all seeds from this seed's BC policy")
    parser.add_argument("--output", type=Path, default=Path("outputs/race"))
    parser.add_argument("--without-runs", action="store_true", help="only write the table and the image")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for all runs")
    options = parser.parse_args()
    if not options.without_runs:
        for seed in options.seeds:
            for gap in options.gaps:
                for method in options.methods:
                    race(options.output, gap, method, seed, options.overrides, options.one_clone)
        for gap in options.gaps:
            for seed in options.seeds if options.one_clone is None else [options.one_clone]:
                controls(options.output, gap, seed, options.overrides, options.one_clone)
    found = {title: (controls_of(group), runs_of(group)) for title, group in groups(options.output).items()}
    rows = [row for gap, (counts, runs) in found.items() for row in table(gap, counts, runs)]
    rows += ["`*`: this seed chose settings.", ""]
    rows += [row for gap, (_, runs) in found.items() for row in curve_rows(gap, runs)]
    print("\n".join(rows))
    print(f"table: {write_text(options.output / 'table.md', chr(10).join(rows))}")
    draw(options.output / "race.png", found)
    print(f"image: {options.output / 'race.png'}")
    print(json.dumps(summary(found)))


def summary(found: dict[str, tuple[dict, dict]]) -> dict[str, object]:
    """Return the result: the median env steps of ``residual`` and PPO to the target."""
    sizes = {gap: {method: len(each) for method, each in runs.items()} for gap, (_, runs) in found.items()}
    result: dict[str, object] = {"name": "race", "ours": None, "peer": None, "ratio": None, "unit": "env steps to 90 %"}
    for gap, (_, runs) in found.items():
        ours, peer = (
            median_to_target(list(runs.get(name, {}).values()) or [[]], "env_steps") for name in ("residual", "ppo")
        )
        if ours and peer:
            result |= {"ours": ours, "peer": peer, "ratio": round(peer / ours, 2), "gap": gap}
            break
    return result | {"sizes": sizes}


if __name__ == "__main__":
    main()
