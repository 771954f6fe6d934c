"""Several runs together: the name of the newest, groups over seeds, the table of a sweep, the page with their curves."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from rlinf.cli import main
from rlinf.commands.train import _latest_target
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.intervals import STUDENT_T_95, mean_interval, wilson_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import follow_latest, mark_latest
from rlinf.report.compare_folders import evaluation_folder
from rlinf.report.runs import (
    closing_evaluation,
    compared_pairs,
    curve,
    group_runs,
    read_runs,
    runs_table,
    seed_curves,
    write_runs_report,
)
from rlinf.types import EpisodeResult, EpisodeSpec


def run_folder(folder: Path, seed: int, rate: float | None, name="mine", num_steps=3, top=None, **settings) -> Path:
    """A run of 10 evaluation episodes, whose metrics at step ``t`` are ``rate + t / 100``; None: stopped before its end."""
    folder.mkdir(parents=True)
    config = {"experiment_name": name, "seed": seed, "output_dir": str(folder)} | (top or {})
    config["trainer"] = {"learning_rate": 1e-3, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": step, "phase": "rl", "time_s": 60.0 * step, "time/total_s": 60.0 * step, "train/entropy": 1.0,
         "rollout/success_rate": (rate or 0.0) + step / 100, "rollout/env_steps_total": 100 * step + seed}
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rate is not None:
        rows = [
            EpisodeResult(EpisodeSpec("tabletop", 0, number, 1), "reach", number < round(10 * rate), 0.0, 4)
            for number in range(10)
        ]
        EvaluationResult(rows).to_json(folder / "eval" / "after_rl" / "result.json")
        (folder / "summary.json").write_text(json.dumps({"experiment": name, "seed": seed}))
    return folder


def test_latest_is_a_link_that_is_replaced_and_followed_anywhere_in_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "x" / name / "checkpoints").mkdir(parents=True)
        mark_latest(Path("x") / name)
        assert os.readlink("x/latest") == name
        assert follow_latest("x/latest/checkpoints") == Path("x") / name / "checkpoints"
        assert follow_latest(tmp_path / "x" / "latest") == tmp_path / "x" / name
    assert sorted(os.listdir("x")) == ["first", "latest", "second"], "nothing else is left"
    assert follow_latest("elsewhere/latest") == Path("elsewhere/latest"), "a folder of this name is what it is"
    (tmp_path / "y" / "latest" / "mine").mkdir(parents=True)
    mark_latest(tmp_path / "y" / "run")
    assert (tmp_path / "y" / "latest" / "mine").is_dir() and os.listdir("y") == ["latest"], "a user's folder stays"


def test_where_links_are_impossible_latest_is_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(OSError("no links on this file system")))
    for name in ("first", "second"):
        (tmp_path / name / "eval").mkdir(parents=True)
        mark_latest(tmp_path / name)
        assert (tmp_path / "latest").is_file() and not (tmp_path / "latest").is_symlink()
        assert follow_latest(tmp_path / "latest" / "eval") == tmp_path / name / "eval"


def test_latest_names_the_run_or_its_sweep_where_rlinf_names_the_folder(here):
    assert _latest_target(Path("outputs/mine/1")) == Path("outputs/mine/1")
    assert _latest_target(here / "outputs/mine/1") == here / "outputs/mine/1"
    assert _latest_target(Path("multirun/mine/1/0")) == Path("multirun/mine/1")
    assert _latest_target(Path("elsewhere/mine")) is None


def test_interval_of_a_mean_equals_a_worked_example():
    """Student's sleep data (Student 1908, as printed by R's ``t.test(extra[group == 2])``): 2.33, 0.898 to 3.762."""
    mean, low, high = mean_interval([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    assert (mean, low, high) == pytest.approx((2.33, 0.8976775, 3.7623225), abs=1e-4)
    assert mean_interval([0.4]) == (0.4, -math.inf, math.inf)
    assert mean_interval([0.4, 0.4, 0.4]) == (pytest.approx(0.4),) * 3


def test_quantiles_of_student_go_over_into_the_expansion():
    """R's qt(0.975, c(31, 60, 1000)) is 2.039513, 2.000298, 1.962339."""
    for count, wanted in ((32, 2.039513), (61, 2.000298), (1001, 1.962339)):
        values = [float(number % 2) for number in range(count)]
        mean, low, _ = mean_interval(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        assert (mean - low) / deviation * math.sqrt(count) == pytest.approx(wanted, abs=1e-4)
    assert all(first > second for first, second in zip(STUDENT_T_95, STUDENT_T_95[1:], strict=False))


@pytest.fixture
def sweep(tmp_path):
    """Two learning rates with three seeds each, one of them stopped."""
    place = tmp_path / "multirun" / "mine" / "2026"
    runs = [(1e-3, 0, 0.9), (1e-3, 1, 0.7), (1e-3, 2, 0.8), (1e-2, 0, 0.3), (1e-2, 1, 0.3), (1e-2, 2, None)]
    for number, (rate, seed, value) in enumerate(runs):
        run_folder(place / str(number), seed, value, num_steps=2 if value is None else 3, learning_rate=rate)
    return place


def test_runs_that_differ_in_their_seed_are_one_group(sweep, tmp_path):
    other = run_folder(tmp_path / "other", 5, 0.5, name="another", batch=3)
    groups = group_runs(read_runs([sweep, other, other]))
    assert [(group.label, group.pooled["at the end"].rates) for group in groups] == [
        ("mine trainer.learning_rate=0.001", [0.9, 0.7, 0.8]),
        ("mine trainer.learning_rate=0.01", [0.3, 0.3]),
        ("other", [0.5]),
    ], "a single run has the name of its folder"
    times = [
        run_folder(tmp_path / f"2026-11-28_06-33-2{n}", 0, 0.5, "another", **more)
        for n, more in enumerate(({"batch": 3}, {}))
    ]
    assert [group.label for group in group_runs(read_runs(times))] == [
        "another trainer.batch=3", "another",
    ], "a key that one of them has"  # fmt: skip
    in_folders = [
        run_folder(tmp_path / parent / "run", 0, 0.5, "another", batch=batch, top={"k1": k, "k2": k, "k3": k})
        for parent, batch, k in (("p", 1, 0), ("q", 2, 0), ("r", 2, 1))
    ]
    labels = [group.label for group in group_runs(read_runs(in_folders))]
    assert len(set(labels)) == 3, "the first two differ in a fourth key and have folders of one name"
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_runs([tmp_path / "nowhere"])


def test_runs_from_other_weights_are_other_configurations(tmp_path):
    places = [(3, "A"), (4, "A"), (3, "B"), (4, "B")]
    for seed, weights in places:
        run_folder(tmp_path / f"{seed}_{weights}", seed, 0.5 if weights == "A" else 0.9, top={"init_from": weights})
    # A continuation's own configuration names no weights; the checkpoint from before it does.
    resumed = tmp_path / "4_B"
    before = resumed / "checkpoints" / "rl_000001"
    before.mkdir(parents=True)
    text = (resumed / "config.yaml").read_text()
    (before / "config.yaml").write_text(text)
    (resumed / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | {"init_from": None, "resume": "4_B"}))
    groups = group_runs(read_runs([tmp_path / f"{seed}_{weights}" for seed, weights in places]))
    rates = [(group.label, group.pooled["at the end"].rates) for group in groups]
    assert rates == [("mine init_from=A", [0.5, 0.5]), ("mine init_from=B", [0.9, 0.9])]


def test_a_seed_that_was_run_twice_counts_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, (seed, rate) in enumerate([(0, 0.9), (0, 0.3), (0, None), (1, 0.5)]):
        folder = run_folder(tmp_path / "x" / str(number), seed, rate)
        for name in ("metrics.jsonl", "summary.json"):
            if (folder / name).exists():
                os.utime(folder / name, (1000 + number, 1000 + number))
    (group,) = group_runs(read_runs(["x"]))
    assert group.pooled["at the end"].rates == [0.3, 0.5], "the newest of seed 0 that ended, and seed 1"
    assert "(2 seeds)" in curve(group, "rollout/success_rate", "step").label
    assert curve(group, "rollout/success_rate", "step").points[0] == (1, pytest.approx(0.41))
    table = runs_table([group])
    assert re.search(r"^mine +at the end +2 of 2 +40.0% ", table, re.MULTILINE)
    assert re.search(r"^mine +0 \(not counted\) .* 90.0% \(9/10\) .* +x/0$", table, re.MULTILINE)
    said = (
        "2 runs with a repeated seed of the same configuration not counted: only the newest finished run of each seed"
    )
    assert said in table
    assert main(["report", "x"]) == 0
    page = Path("runs.html").read_text()
    assert said in capsys.readouterr().out and said in page
    assert "<td>2 of 2</td>" in page and page.count("0 (not counted)") == 2


def test_a_run_that_was_stopped_in_rl_does_not_end_with_its_clone(tmp_path):
    def clone(name, phases, summary=True):
        folder = run_folder(tmp_path / name, 0, 0.5)
        (folder / "eval" / "after_rl").rename(folder / "eval" / "after_sft")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"phase": phase} for line, phase in zip(lines, phases, strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not summary:
            (folder / "summary.json").unlink()
        return folder

    cloned = clone("cloned", ["sft"] * 3)
    stopped = clone("stopped", ["sft", "sft", "rl"])
    unfinished = clone("unfinished", ["sft"] * 3, summary=False)
    closed = [closing_evaluation(run) is not None for run in read_runs([cloned, stopped, unfinished])]
    assert closed == [True, False, False]
    assert evaluation_folder(cloned) == cloned / "eval" / "after_sft"
    with pytest.raises(CheckpointError, match="Pass one of its evaluations: .*after_sft"):
        evaluation_folder(stopped)


def test_a_table_has_a_line_for_each_run_and_for_each_evaluation_of_each_configuration(sweep, monkeypatch, tmp_path):
    """Before RL: 20, 10 and 30 % (t_2 = 4.30265, s = 10 points); reported afresh: 80 and 60 % (t_1 = 12.7062, s = 14.14 points)."""
    monkeypatch.chdir(tmp_path)
    for number, (before, reported) in enumerate(((2, 80), (1, 60), (3, None))):
        specs = [EpisodeSpec("tabletop", 0, place, 1) for place in range(10)]
        rows = [EpisodeResult(spec, "reach", spec.init_state_id < before, 0.0, 4) for spec in specs]
        EvaluationResult(rows).to_json(sweep / str(number) / "eval" / "before_rl" / "result.json")
        path = sweep / str(number) / "summary.json"
        summary = json.loads(path.read_text()) | {"train_wall_s": 60.0 + 30 * number}
        summary["best_checkpoint"] = {"name": "rl_000002", "evaluation": "after_rl", "success_rate": 0.8}
        if reported is not None:
            summary["reported"] = {"checkpoint": "rl_000001", "successes": reported, "episodes": 100}
        path.write_text(json.dumps(summary))
    table = [re.sub(" {2,}", "  ", line) for line in runs_table(group_runs(read_runs([sweep]))).splitlines()]
    rate = "mine trainer.learning_rate=0.001"
    for line in (
        f"{rate}  1  10.0% (1/10)  70.0% (7/10)  60.0% (60/100)  1m30s  multirun/mine/2026/1",
        f"{rate}  2  30.0% (3/10)  80.0% (8/10)  best checkpoint: 80.0%  2m00s  multirun/mine/2026/2",
        "mine trainer.learning_rate=0.01  2  -  -  -  -  multirun/mine/2026/5",
        f"{rate}  before RL  3 of 3  20.0%  0.0% to 44.8%  10.0%  30.0%  0 (95 % 0 to 0)",
        f"{rate}  at the end  3 of 3  80.0%  55.2% to 100.0%  70.0%  90.0%  0 (95 % 0 to 0)  1m30s each",
        f"{rate}  reported  2 of 3  70.0%  0.0% to 100.0%  60.0%  80.0%  -",
        "mine trainer.learning_rate=0.01  at the end  2 of 3  30.0%  30.0% to 30.0%  30.0%  30.0%  0 (95 % 0 to 0)  -",
    ):
        assert line in table


def test_a_sweep_of_a_task_without_success_has_returns_and_no_rate(tmp_path, monkeypatch):
    """Mean -6, s = sqrt(8), t_1 = 12.7062: -6 +- 12.7062 * 2."""
    monkeypatch.chdir(tmp_path)
    for seed, mean in enumerate((-9.0, -5.0)):
        folder = run_folder(tmp_path / "sweep" / str(seed), seed, None)
        specs = [EpisodeSpec("pendulum", 0, state, 1) for state in range(2)]
        episodes = [EpisodeResult(spec, "swing", False, mean + 2 * spec.init_state_id, 5) for spec in specs]
        EvaluationResult(episodes, reports_success=False).to_json(folder / "eval" / "after_rl" / "result.json")
        (folder / "summary.json").write_text(json.dumps({"experiment": "mine", "seed": seed}))
    table = runs_table(group_runs(read_runs([tmp_path / "sweep"])))
    page = write_runs_report(read_runs([tmp_path / "sweep"]), tmp_path / "runs.html").read_text()
    for text in (table, re.sub("<[^>]+>", " ", page)):
        assert "-6 (95 % -31.41 to 19.41)" in text and "0/2" not in text
    assert "return -8 (95 %" in table and "0.0%" not in table


def test_a_sweep_of_the_command_prints_the_table(here, started, monkeypatch, capsys):
    def train(config):
        if config.seed == 2:
            raise ConfigError("seed 2 fails")
        folder = Path(config.output_dir)
        run_folder(folder / "x", config.seed, 0.5)
        for path in (folder / "x").iterdir():
            path.rename(folder / path.name)
        (folder / "x").rmdir()

    monkeypatch.setattr("rlinf.commands.train.train", train)
    assert main(["train", "-m", "experiment=tabletop_ppo_mlp", "trainer.max_steps=1", "seed=0,2,1"]) == 2
    printed, error = capsys.readouterr()
    assert re.search("at the end +2 of 2 +50.0% +50.0% to 50.0% +50.0% +50.0%", printed) and "seed 2 fails" in error
    (page,) = here.glob("multirun/*/*/runs.html")
    assert printed.endswith(f"report: {page.relative_to(here)}\n") and "2 runs of 1 configuration" in page.read_text()
    assert main(["train", "experiment=tabletop_ppo_mlp", "trainer.max_steps=1"]) == 0
    assert "over seeds" not in capsys.readouterr().out


def test_a_page_of_three_runs_has_one_short_legend_their_intervals_and_a_p_value_of_each_pair(tmp_path):
    """Three single runs that differ in 60 keys; 9, 3 and 0 of the same 10 episodes succeed."""
    many = [
        {"algorithm": {"name": name} | {f"key_{n}": n + rate for n in range(30)}, "env": {"name": name} | {f"key_{n}": rate for n in range(30)}}
        for rate, name in ((0.9, "ppo"), (0.3, "grpo"), (0.0, "sac"))
    ]  # fmt: skip
    for folders, labels in (
        (["a", "b", "c"], ["a", "b", "c"]),
        ([f"2026-11-28_06-33-2{n}" for n in range(3)], [f"mine algorithm.name={name} env.name={name}" for name in ("ppo", "grpo", "sac")]),
    ):  # fmt: skip
        runs = [
            run_folder(tmp_path / folder, 0, rate, top=top)
            for folder, rate, top in zip(folders, (0.9, 0.3, 0.0), many, strict=True)
        ]
        groups = group_runs(read_runs(runs))
        assert [group.label for group in groups] == labels
        page = write_runs_report(read_runs(runs), tmp_path / "runs.html").read_text()
        (legend,) = re.findall(r'<div class="legend">(.*?)</div>', page)
        words = re.sub("<.*?>", " ", legend).split()
        assert set(" ".join(labels).split()) == set(words) and len(words) <= 40
        low, high = wilson_interval(3, 10)
        assert f"{low:.1%} to {high:.1%}" in page
        # 6 episodes that only a solves: 2 / 2^6; 9: 2 / 2^9; 3: 2 / 2^3
        (table,) = re.findall(r"Paired comparison</h2>(.*?)</table>", page, flags=re.S)
        p_values = re.findall(r"<td>([\d.e-]+)</td></tr>", re.sub(r"\s*\n\s*", "", table))
        assert [float(value) for value in p_values] == pytest.approx([2 / 2**6, 2 / 2**9, 2 / 2**3], rel=0.01)
    four = [*runs, run_folder(tmp_path / "d", 0, 0.5, name="other", max_steps=0, top={"algorithm": {"name": "ppo"}})]
    assert "<td>behaviour cloning</td>" in write_runs_report(read_runs(four), tmp_path / "four.html").read_text()
    pairs = [pair[:2] for pair in compared_pairs(group_runs(read_runs(four)))]
    assert pairs == [(labels[0], other) for other in (*labels[1:], "d")], "of four, each against the first"


def test_runs_of_other_episodes_are_not_compared_in_pairs(tmp_path):
    folders = [run_folder(tmp_path / name, 0, 0.5, learning_rate=rate) for name, rate in (("a", 1e-3), ("b", 1e-2))]
    path = folders[1] / "eval" / "after_rl" / "result.json"
    rows = [EpisodeResult(EpisodeSpec("tabletop", 0, 100 + n, 1), "reach", True, 0.0, 4) for n in range(10)]
    EvaluationResult(rows).to_json(path)
    ((_, _, reason),) = compared_pairs(group_runs(read_runs(folders)))
    assert (
        "none in common" in reason and reason in write_runs_report(read_runs(folders), tmp_path / "x.html").read_text()
    )


def test_a_curve_is_the_mean_over_seeds_at_the_iterations_that_all_have(sweep):
    first, second = group_runs(read_runs([sweep]))
    found = curve(first, "rollout/success_rate", "env_steps")
    assert found.points == [(pytest.approx(100 * t + 1), pytest.approx(0.8 + t / 100)) for t in (1, 2, 3)]
    spread = 4.30265 * 0.1 / math.sqrt(3)
    assert found.bands[0] == (pytest.approx(0.81 - spread), pytest.approx(0.81 + spread))
    assert "(3 seeds)" in found.label
    assert [x for x, _ in curve(second, "rollout/success_rate", "step").points] == [1, 2], "the stopped run has two"
    assert curve(first, "no/such_metric", "step").points == []
    seeds = seed_curves(first, "rollout/success_rate", "env_steps")
    assert [(series.label, series.points[2]) for series in seeds] == [
        (f"seed {seed}", (300 + seed, pytest.approx(rate + 0.03))) for seed, rate in enumerate((0.9, 0.7, 0.8))
    ]
    page = write_runs_report(first.runs, sweep / "runs.html").read_text()
    (chart,) = re.findall("<h3>Success of rollouts against env steps</h3>.*?</div>", page)
    assert chart.count('class="curve s1 thin"') == 3 and chart.count('class="curve s1"') == 1 and "seed 2 82%" in chart


def test_the_command_writes_one_page_of_several_runs_and_the_report_of_one(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mark_latest(sweep)
    (sweep / "0" / "report.html").write_text("")
    assert main(["report", "multirun/mine/latest"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("report: runs.html\n") and runs_table(group_runs(read_runs([sweep]))) in printed
    page = (tmp_path / "runs.html").read_text()
    assert "6 runs of 2 configurations" in page and page.count('class="area') >= 2
    assert '<a href="multirun/mine/2026/0/report.html">' in page and "1/report.html" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert main(["report", "multirun/mine/2026/1"]) == 0
    assert (sweep / "1" / "report.html").is_file()
    assert main(["report", str(sweep), f"output={sweep}/0/summary.json"]) == 2
    assert "exists and is not an .html file" in capsys.readouterr().err
    assert json.loads((sweep / "0" / "summary.json").read_text())["seed"] == 0
    for words in ([], ["output=a.html"], ["--open"], ["nowhere"], ["seed=3", str(sweep)]):
        assert main(["report", *words]) == 2
        assert "Run rlinf report" in (said := capsys.readouterr().err) or "There is no folder nowhere" in said
