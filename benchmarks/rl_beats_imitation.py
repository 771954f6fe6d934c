"""Compares RL in the quickstart with further imitation, using behaviour cloning for the same wall time.

For each seed, behaviour cloning is followed by (a) PPO as in the quickstart, or (b) further cloning from the same BC
checkpoint and optimiser state for the total training time of (a). Both are evaluated greedily on the same held-out
episodes. ``ours`` and ``peer`` are the success rates of (a) and (b) over all seeds, and ``figure.html`` in the output
folder plots them against training time.

    python benchmarks/rl_beats_imitation.py [--seeds 3 4] [--output FOLDER] [overrides ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.evaluation.intervals import wilson_interval
from rlinf.files import write_text
from rlinf.preflight.validation import validate
from rlinf.report.charts import Series, legend, line_chart
from rlinf.report.page import FOLDER

SFT_EVAL_EVERY = 500


def make_config(folder: Path, overrides: list[str]) -> RunConfig:
    config = build_config(compose_config(["experiment=quickstart", *overrides]))
    config.output_dir = str(folder)
    validate(config)
    return config


def curve(folder: Path) -> list[tuple[float, float]]:
    """Return the training time in minutes and success rate at each evaluation of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["time/total_s"] / 60, line["eval/success_rate"]) for line in lines if "eval/success_rate" in line]


def run_seed(folder: Path, seed: int, overrides: list[str]) -> tuple[dict, dict]:
    """Run both arms for one seed and return their summaries."""
    common = [f"seed={seed}", "evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "trainer.max_keep=-1"]
    rl = train(make_config(folder / f"rl_seed{seed}", [*common, *overrides]))
    with_rl = json.loads((rl / "summary.json").read_text())
    cloned = sorted((rl / "checkpoints").glob("sft_*"))[-1]
    budget = with_rl["train_wall_s"]
    more_sft = [
        f"resume={cloned}",
        f"sft.time_limit_s={budget}",
        f"sft.eval_every={SFT_EVAL_EVERY}",
        "trainer.max_steps=0",
    ]
    imitation = train(make_config(folder / f"imitation_seed{seed}", [*common, *more_sft, *overrides]))
    return with_rl, json.loads((imitation / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4])
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/rl_beats_imitation") / time.strftime("%Y-%m-%d_%H-%M-%S")
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both arms.")
    arguments = parser.parse_args()
    totals = {"rl": [0, 0], "imitation": [0, 0], "before": [0, 0]}
    series, walls = [], []
    for seed in arguments.seeds:
        with_rl, imitation = run_seed(arguments.output, seed, arguments.overrides)
        rows = (
            ("rl", with_rl["success_after_rl"]),
            ("imitation", imitation["success_after_sft"]),
            ("before", with_rl["success_before_rl"]),
        )
        for arm, row in rows:
            totals[arm] = [totals[arm][0] + row["successes"], totals[arm][1] + row["episodes"]]
        walls.append((with_rl["train_wall_s"], imitation["train_wall_s"]))
        first = seed == arguments.seeds[0]
        for number, arm, label in ((1, "rl", "cloning, then RL"), (2, "imitation", "cloning only")):
            series.append(
                Series(label if first else "", curve(arguments.output / f"{arm}_seed{seed}"), number, markers=True)
            )
    chart = line_chart(series, x_label="training time (minutes)", y_label="success rate", percent=True)
    body = f"<style>{(FOLDER / 'report.css').read_text(encoding='utf-8')}</style><h1>RL beats imitation</h1>{legend([curve for curve in series if curve.label])}{chart}"
    figure = write_text(
        arguments.output / "figure.html", f"<!doctype html><meta charset=utf-8><title>RL beats imitation</title>{body}"
    )
    intervals = {arm: wilson_interval(*count) for arm, count in totals.items()}
    for arm, (successes, episodes) in totals.items():
        low, high = intervals[arm]
        print(f"{arm:10} {successes}/{episodes} = {successes / episodes:.1%} (95 % {low:.1%} - {high:.1%})")
    print(f"figure: {figure}")
    rates = {arm: successes / episodes for arm, (successes, episodes) in totals.items()}
    result = {
        "name": "rl_beats_imitation", "ours": round(rates["rl"], 4), "peer": round(rates["imitation"], 4),
        "ratio": round(rates["rl"] / max(rates["imitation"], 1e-9), 3), "unit": "success rate", "before_rl": round(rates["before"], 4),
        "gain_points": round(100 * (rates["rl"] - rates["imitation"]), 1),
        "intervals_apart": intervals["rl"][0] > intervals["imitation"][1], "train_wall_s": walls,
        "sizes": {"seeds": arguments.seeds, "episodes": totals["rl"][1]},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
