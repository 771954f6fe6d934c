"""Table and bar chart of one or two evaluations on Meta-World's MT50, by the difficulty groups of published tables.

    python benchmarks/metaworld_table.py outputs/clone/eval/after_sft outputs/rl/eval/after_rl --image mt50.png

The groups are those of Seo et al. 2022 (arXiv:2206.14244, appendix). Published averages, such as those in SmolVLA's
table (arXiv:2506.01844), are apparently means of the four groups, in which one of the 5 very hard tasks weighs as much
as 5.6 of the 28 easy ones. The table prints this mean and the mean over the 50 tasks.
"""

import argparse
from pathlib import Path

import numpy as np

from rlinf.evaluation.compare import compare
from rlinf.evaluation.intervals import wilson_interval
from rlinf.evaluation.result import EvaluationResult

GROUPS = {
    "easy": "button-press button-press-topdown button-press-topdown-wall button-press-wall coffee-button dial-turn door-close "
    "door-lock door-open door-unlock drawer-close drawer-open faucet-close faucet-open handle-press handle-press-side "
    "handle-pull handle-pull-side lever-pull plate-slide plate-slide-back plate-slide-back-side plate-slide-side reach "
    "reach-wall window-close window-open peg-unplug-side",
    "medium": "basketball bin-picking box-close coffee-pull coffee-push hammer peg-insert-side push-wall soccer sweep sweep-into",
    "hard": "assembly hand-insert pick-out-of-hole pick-place push push-back",
    "very hard": "shelf-place disassemble stick-pull stick-push pick-place-wall",
}
"""Maps groups to tasks, without their version ``-v3``."""


def group_of(task: str) -> str:
    """Return the group of a task, such as ``reach-v3``."""
    return next(group for group, tasks in GROUPS.items() if task.removesuffix("-v3") in tasks.split())


def rates(result: EvaluationResult) -> dict[str, tuple[int, int]]:
    """Return successes and episodes of each group, and of all tasks."""
    counts = {group: np.zeros(2, int) for group in (*GROUPS, "all")}
    for task, success in result.per_task.items():
        for group in (group_of(task), "all"):
            counts[group] += success.successes, success.episodes
    return {group: (int(successes), int(episodes)) for group, (successes, episodes) in counts.items()}


def table(results: list[EvaluationResult]) -> str:
    """Return the table of groups in Markdown, with 95 % intervals (Wilson), and the paired difference of two evaluations."""
    columns = [rates(result) for result in results]
    names = ["before", "after"] if len(results) == 2 else ["success"]
    lines = [f"| tasks | n | {' | '.join(f'{name} (95 %)' for name in names)} |", f"|---|---|{'---|' * len(names)}"]
    for group, (_, episodes) in columns[0].items():
        cells = []
        for column in columns:
            low, high = wilson_interval(*column[group])
            cells.append(f"{100 * column[group][0] / column[group][1]:.1f} ({100 * low:.1f} - {100 * high:.1f})")
        lines.append(f"| {group} | {episodes} | {' | '.join(cells)} |")
    means = [100 * np.mean([column[group][0] / column[group][1] for group in GROUPS]) for column in columns]
    lines.append(f"| mean of the four groups | | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    if len(results) == 2:
        total = compare(*results).total
        low, high = total.interval
        lines.append(
            f"\nafter - before = {100 * total.difference:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}), p = {total.p_value:.2g}"
        )
    return "\n".join(lines)


def task_table(results: list[EvaluationResult]) -> str:
    """Return a table of the successes in each task, in the order of the groups, in Markdown."""
    lines = [
        f"| group | task | n | {' | '.join('successes' for _ in results)} |",
        f"|---|---|---|{'---|' * len(results)}",
    ]
    for group, tasks in GROUPS.items():
        for task in tasks.split():
            outcomes = [result.per_task[f"{task}-v3"] for result in results]
            counts = " | ".join(str(outcome.successes) for outcome in outcomes)
            lines.append(f"| {group} | {task} | {outcomes[0].episodes} | {counts} |")
    return "\n".join(lines)


def draw(results: list[EvaluationResult], path: Path) -> None:
    """Draw success by task as bars, in the order of the groups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [f"{task}-v3" for tasks in GROUPS.values() for task in tasks.split()]
    figure, axis = pyplot.subplots(figsize=(12, 4))
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        label = ("before RL", "after RL")[number] if len(results) == 2 else None
        heights = [100 * result.per_task[task].success_rate for task in tasks]
        axis.bar(np.arange(len(tasks)) + (number + 0.5) * width - 0.4, heights, width, label=label)
    axis.set_xticks(range(len(tasks)), [task.removesuffix("-v3") for task in tasks], rotation=90, fontsize=7)
    edge = -0.5
    for group, names in GROUPS.items():
        axis.text(edge + 0.2, 103, group)
        edge += len(names.split())
        axis.axvline(edge, color="grey", linewidth=0.5)
    axis.set(ylabel="success (%)", ylim=(0, 110), xlim=(-0.5, len(tasks) - 0.5))
    if len(results) == 2:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="one or two folders with a result.json")
    parser.add_argument("--image", type=Path, help="PNG of success by task")
    parser.add_argument("--tasks", action="store_true", help="add a table of all tasks")
    arguments = parser.parse_args()
    results = [EvaluationResult.from_json(folder / "result.json") for folder in arguments.folders[:2]]
    print(table(results))
    if arguments.tasks:
        print(f"\n{task_table(results)}")
    if arguments.image:
        draw(results, arguments.image)


if __name__ == "__main__":
    main()
