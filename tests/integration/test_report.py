"""The report: complete, without requests to elsewhere, true to its sources, and shown by a real browser."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import compare
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.video import write_video
from rlinf.number_formats import format_number
from rlinf.report.charts import Series, difference_bar, line_chart, log_ticks, nice_ticks
from rlinf.report.run_page import _evaluated, write_report
from rlinf.tracking import Tracker, TrackingConfig
from rlinf.types import EpisodeResult, EpisodeSpec

TASKS = ("reach", "reach_two", "push")
INSTRUCTIONS = (
    "reach the red block", "reach the blue block, then the red one", "push the green block to the yellow zone",
)  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def evaluation(rate: float, num_episodes: int = 200) -> EvaluationResult:
    generator = np.random.default_rng(round(1000 * rate))
    results = []
    for i in range(num_episodes):
        task = i % 3
        success = bool(generator.random() < rate + (0.1, 0.0, -0.1)[task])
        spec = EpisodeSpec("tabletop", task, 1_000_000_000 + i // 3, 1)
        results.append(EpisodeResult(spec, TASKS[task], success, float(success), 9 if success else 16))
    return EvaluationResult(results)


def record_videos(folder: Path, result: EvaluationResult) -> None:
    for number, (task, success) in enumerate((task, success) for task in TASKS for success in (True, False)):
        frames = []
        for step in range(10):
            frame = np.full((128, 128, 3), (70, 90, 110), np.uint8)
            frame[40:70, 80:110] = (200, 60, 60)
            frame[90 - 4 * step : 104 - 4 * step, 10 + 7 * step : 24 + 7 * step] = (240, 240, 240)
            frames.append(frame)
        instruction = INSTRUCTIONS[TASKS.index(task)]
        path = write_video(folder / "videos" / f"task_{number}_#1.mp4", frames, instruction, success)
        video = {"path": f"videos/{path.name}", "task": task, "instruction": instruction, "success": success}
        result.videos.append(video)


def make_run(folder: Path, num_steps: int = 60) -> Path:
    """Write a run folder such as a quickstart leaves."""
    generator = np.random.default_rng(0)
    seconds = 20.0
    with Tracker(folder, TrackingConfig(tensorboard=False), {}) as tracker:
        for step in range(0, 700, 10):
            seconds += 1.4
            loss = 1.1 + 1.9 * math.exp(-step / 150) + generator.normal(0, 0.05)
            tracker.log(step, {"sft/loss": loss, "time/total_s": seconds})
        for tag, rate, step in (("after_sft", 0.41, 700), ("before_rl", 0.41, 0)):
            result = evaluation(rate)
            if tag == "before_rl":
                record_videos(folder / "eval" / tag, result)
            result.to_json(folder / "eval" / tag / "result.json")
            tracker.log(step, result.metrics(), phase="sft" if tag == "after_sft" else "rl")
        for step in range(num_steps):
            seconds += 3.1
            rate = 0.35 + 0.55 * (1 - math.exp(-step / 15))
            noise = generator.normal(0, 1, 12)
            metrics = {
                "rollout/success_rate": min(1, rate + 0.04 * noise[0]),
                "rollout/return_mean": 1.2 * rate + 0.05 * noise[1],
                "rollout/episode_len": 16 - 7 * rate + 0.2 * noise[11],
                "rollout/env_steps_total": 1024 * (step + 1),
                "rollout/logprob_gap_max": 2e-6 * math.exp(0.5 * noise[2]),
                "rollout/logprob_gap_mean": 2e-7 * math.exp(0.3 * noise[3]),
                "train/policy_loss": -0.02 + 0.01 * noise[4],
                "train/value_loss": 0.1 * math.exp(-step / 30) + 0.02 * abs(noise[5]),
                "train/entropy": 2.1 - 0.01 * step,
                "train/approx_kl": 0.01 + 0.003 * abs(noise[6]),
                "train/clip_fraction": 0.1 + 0.03 * abs(noise[7]),
                "train/explained_variance": 1 - math.exp(-step / 20) + 0.03 * noise[8],
                "train/grad_norm": 1.5 + 0.3 * noise[9],
                "throughput/env_steps_per_s": 640 + 30 * noise[10],
                "time/total_s": seconds,
            }
            if step == 5:
                metrics["train/approx_kl"] = float("nan")
            if step % 15 == 14:
                result = evaluation(rate)
                result.to_json(folder / "eval" / f"step_{step + 1:06d}" / "result.json")
                metrics |= result.metrics()
            tracker.log(step, metrics)
        result = evaluation(0.91)
        record_videos(folder / "eval" / "after_rl", result)
        result.to_json(folder / "eval" / "after_rl" / "result.json")
        tracker.log(num_steps, result.metrics())
    summary = {
        "experiment": "quickstart", "seed": 0, "train_wall_s": seconds, "env_steps": 1024 * num_steps,
        "success_before_rl": evaluation(0.41).summary(), "success_after_rl": result.summary(),
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(
        "seed: 0\nmodel:\n  model_type: openvla\nenv:\n  name: tabletop\nalgorithm:\n  name: ppo\nnote: <b>&</b>\n"
    )
    (folder / "manifest.json").write_text(json.dumps({"versions": {"torch": "2.13.0"}, "precision": "fp32"}, indent=1))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("outputs") / "quickstart run")
    write_report(folder)
    return folder


class Tags(HTMLParser):
    """Collects tags, and fails on one that is not closed."""

    VOID = {"meta", "i-never", "br", "img", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found, self.stack = [], []
        self.feed(text)
        assert self.stack == [], f"not closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_report_is_one_well_formed_file_without_requests_to_elsewhere(run):
    text = (run / "report.html").read_text()
    tags = Tags(text).found
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert len(text) < 3_000_000
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in text and "<b>&</b>" not in text
    assert [path.name for path in run.glob(".*")] == [], "no temporary file may stay"


def test_every_video_of_the_evaluations_is_linked_relatively_and_exists(run):
    from urllib.parse import unquote

    sources = [attrs["src"] for tag, attrs in Tags((run / "report.html").read_text()).found if tag == "video"]
    assert len(sources) == len(set(sources)) == 12
    assert all(not source.startswith("/") and (run / unquote(source.partition("#")[0])).is_file() for source in sources)


def test_headline_holds_the_numbers_of_the_results(run):
    text = re.sub(r"<[^>]+>", " ", (run / "report.html").read_text())
    before = EvaluationResult.from_json(run / "eval" / "before_rl" / "result.json")
    after = EvaluationResult.from_json(run / "eval" / "after_rl" / "result.json")
    for result in (before, after):
        assert f"{result.success_rate:.1%}" in text and f"{result.successes}/200 episodes" in text
        assert f"{result.interval[0]:.1%} to {result.interval[1]:.1%}" in text
        for success in result.per_task.values():
            assert f"({success.successes}/{success.episodes}," in text
    assert (
        title_of(run / "report.html")
        == f"quickstart on tabletop: {after.success_rate:.1%} ({after.successes}/200) - rlinf"
    )
    total = compare(before, after).total
    low, high = (100 * end for end in total.interval)
    assert "Paired comparison" in text and total.p_value < 1e-10
    assert f"{100 * total.difference:+.1f} ({low:+.1f} to {high:+.1f})" in text and f"{total.p_value:.3g}" in text


def gain_tile(page: Path) -> str:
    tile = r'Gain by RL</div>.*?<div class="detail">([^<]*)</div>'
    return re.search(tile, page.read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.mark.parametrize("rates", [(0.41, 0.91), (0.5, 0.52)])
def test_gain_is_given_with_its_paired_test(tmp_path, rates):
    before, after = map(evaluation, rates)
    for tag, result in (("before_rl", before), ("after_rl", after)):
        result.to_json(tmp_path / "eval" / tag / "result.json")
    pairs = list(zip(before.results, after.results, strict=True))
    only_before = sum(a.success and not b.success for a, b in pairs)
    only_after = sum(b.success and not a.success for a, b in pairs)
    total = compare(before, after).total
    low, high = (100 * end for end in total.interval)
    tile = gain_tile(write_report(tmp_path))
    assert f"of the same 200 episodes, {only_after} were solved only after RL and {only_before} only before" in tile
    assert f"95 % interval {low:+.1f} to {high:+.1f}" in tile and f"p = {total.p_value:.3g} (McNemar)" in tile
    assert (total.p_value < 0.05) == (low > 0) == (rates[1] > 0.9), "a control: one gain is chance"


def title_of(page: Path) -> str:
    return re.search("<title>(.*?)</title>", page.read_text(encoding="utf-8"))[1]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("checkpoint: outputs/run_3/checkpoints/rl_000012", "run_3/rl_000012"),
        ("checkpoint: checkpoints/rl_000012", "rl_000012"),
        ("checkpoint: /models/exported", "exported"),
        ("model: {model_path: org/openvla-7b, model_type: openvla}", "openvla-7b"),
        ("model: {model_path: null, model_type: mlp}", "mlp"),
        ("", "evening"),
    ],
)
def test_the_browser_tab_names_what_was_evaluated_the_suite_and_the_result(tmp_path, config, name):
    folder = tmp_path / "evening"
    result = evaluation(0.5)
    result.results = [replace(one, spec=replace(one.spec, suite="libero_goal")) for one in result.results]
    result.to_json(folder / "result.json")
    (folder / "config.yaml").write_text(config + "\nexperiment_name: default\n" if config else "{}")
    share = f"{result.successes / 200:.1%} ({result.successes}/200)"
    assert title_of(write_report(folder)) == f"{name} on libero_goal: {share} - rlinf"


def test_warnings_are_those_of_the_fresh_evaluation_if_it_is_finished(tmp_path):
    for tag in ("after_rl", "fresh"):
        replace(evaluation(0.5), warnings=[f"warning of {tag}"]).to_json(tmp_path / "eval" / tag / "result.json")
    page = write_report(tmp_path).read_text()
    assert "warning of after_rl" in page and "warning of fresh" not in page
    reported = {"checkpoint": "rl_000001", **evaluation(0.5).summary(), "first_episode": 9, "num_candidates": 2}
    (tmp_path / "summary.json").write_text(json.dumps({"reported": reported}))
    page = write_report(tmp_path).read_text()
    assert "warning of fresh" in page and "warning of after_rl" not in page


def test_evaluations_of_other_episodes_are_not_compared(tmp_path):
    evaluation(0.4).to_json(tmp_path / "eval" / "before_rl" / "result.json")
    evaluation(0.9, 100).to_json(tmp_path / "eval" / "after_rl" / "result.json")
    assert "Paired comparison" not in write_report(tmp_path).read_text()
    assert "not tested" in gain_tile(tmp_path / "report.html") and "p =" not in gain_tile(tmp_path / "report.html")
    evaluation(0.9).to_json(tmp_path / "eval" / "after_rl" / "result.json")
    assert "Paired comparison" in write_report(tmp_path).read_text()
    replace(evaluation(0.9), greedy=False).to_json(tmp_path / "eval" / "after_rl" / "result.json")
    assert "Paired comparison" not in write_report(tmp_path).read_text(), "actions were sampled in one of them"


def test_warnings_of_the_evaluation_are_shown_and_escaped_and_the_head_says_how_actions_were_drawn(tmp_path):
    result = evaluation(0.5)
    result.to_json(tmp_path / "result.json")
    page = write_report(tmp_path).read_text()
    assert "Before you trust" not in page and "<span>actions <b>greedy</b></span>" in page
    result = replace(result, greedy=False, temperature=0.7)
    result.warnings = ['renderer: saved <b>, present "osmesa"']
    result.to_json(tmp_path / "result.json")
    text = write_report(tmp_path).read_text()
    assert "Before you trust these numbers" in text and "saved &lt;b&gt;, present &#34;osmesa&#34;" in text
    assert "<span>actions <b>sampled at temperature 0.7</b></span>" in text


@pytest.mark.parametrize("beyond", [[], [1, 2]])
def test_a_gap_beyond_the_limit_marks_the_report(tmp_path, beyond):
    with Tracker(tmp_path, TrackingConfig(tensorboard=False), {}) as tracker:
        for step in range(4):
            tracker.log(step, {"rollout/parity_exceeded": float(step in beyond)}, "rl")
    evaluation(0.5).to_json(tmp_path / "eval" / "after_rl" / "result.json")
    text = write_report(tmp_path).read_text()
    assert ("At 2 of 4 iterations (the first: 1) rollout and trainer differed" in text) == bool(beyond)


@pytest.mark.parametrize(("low", "high"), [(-1.0, -0.9), (-0.1, 0.2), (0.999, 1.0)])
def test_difference_bar_lies_where_its_numbers_are(low, high):
    bar = difference_bar((low + high) / 2, low, high)
    x, width = (float(re.search(rf'class="range s1"[^>]* {name}="([-\d.]+)"', bar)[1]) for name in ("x", "width"))
    assert x == pytest.approx(80 * (low + 1), abs=0.06) and width == pytest.approx(max(1, 80 * (high - low)), abs=0.06)


def test_share_of_solved_episodes_over_env_steps_is_that_of_the_results(tmp_path):
    spec = EpisodeSpec("tabletop", 0, 1_000_000_000, 1)
    ends = [(True, 2), (False, 5), (True, 4), (True, 2)]
    rows = [EpisodeResult(replace(spec, init_state_id=i), "reach", ok, 0.0, t) for i, (ok, t) in enumerate(ends)]
    result = EvaluationResult(rows)
    assert result.success_by_step() == [(0, 0), (1, 0), (2, 0.5), (3, 0.5), (4, 0.75), (5, 0.75)]
    result.to_json(tmp_path / "result.json")
    page = write_report(tmp_path).read_text()
    assert "Solved within t env steps" in page
    assert page.count("fraction of episodes against t (env steps): evaluation") == 1
    assert "t 2" in page and "evaluation 50%" in page and "evaluation 75%" in page


@pytest.mark.parametrize(("split", "words"), [("eval", "Held-out episodes"), ("train", "Training episodes")])
def test_the_page_says_which_episodes_were_run(tmp_path, split, words):
    evaluation(0.5).to_json(tmp_path / "result.json")
    (tmp_path / "config.yaml").write_text(f"evaluation: {{split: {split}}}\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert [text for text in ("Held-out episodes", "Training episodes") if text in page] == [words]


def test_missing_parts_are_left_out(tmp_path):
    evaluation(0.5).to_json(tmp_path / "result.json")
    text = write_report(tmp_path).read_text()
    assert (
        "Success per task" in text
        and "<h2>Training curves" not in text
        and text.count('class="chart"') == 1  # that of the evaluation itself
        and "<video" not in text
    )
    with pytest.raises(CheckpointError, match="is not a run folder"):
        write_report(tmp_path / "nothing")


def test_curve_goes_through_its_points():
    chart = line_chart([Series("a", [(0, 0.0), (10, 1.0), (20, 0.5)])], x_label="step", y_label="rate", percent=True)
    points = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', chart)[1].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 > y2 > y1
    assert y2 - y1 == pytest.approx((y0 - y1) / 2, abs=0.2)
    assert chart.count('class="hit"') == 3 and "a 50%" in chart and ">100%<" in chart


def test_gaps_and_values_that_are_no_numbers_are_not_drawn():
    points = [(0, 1.0), (1, 2.0), (2, None), (3, float("nan")), (4, 1.0), (5, 3.0)]
    chart = line_chart([Series("a", points)], x_label="x", y_label="y")
    assert chart.count("<polyline") == 2 and "nan" not in chart.lower().replace("polyline", "")
    assert line_chart([Series("a", [(0, None)])], x_label="x", y_label="y") == ""
    assert line_chart([Series("a", [(0, -2.0), (1, -1.0)])], x_label="x", y_label="y", log=True) == ""
    zeros = line_chart([Series("gap", [(0, 0.0), (1, 0.0)])], x_label="x", y_label="y", log=True)
    assert zeros.count("<polyline") == 1 and "gap 0<" in zeros, "the axis is linear then"


@pytest.mark.parametrize(("steps", "lines"), [([0], 0), ([0, 9], 0), ([0, 5, 9], 1)])
def test_no_line_joins_an_evaluation_before_and_one_after(steps, lines):
    names = ("success_rate", "interval_low", "interval_high")
    found = {"eval/success_rate": 0.5, "eval/interval_low": 0.4, "eval/interval_high": 0.6, "phase": "rl"}
    series = _evaluated([{"step": step, **found} for step in steps], "step", "held-out episodes", names)
    chart = line_chart([series], x_label="step", y_label="rate", percent=True)
    assert chart.count("<polyline") == lines and chart.count('class="hit"') == len(steps)
    assert chart.count("evaluation 50% (40% to 60%)") == len(steps)


def test_degenerate_ranges_are_drawn():
    for points in ([(0, 0.0)], [(3, 5.0), (4, 5.0)], [(0, -1e-9), (1, 1e-9)], [(0, 1e12), (1e7, -1e12)]):
        chart = line_chart([Series("a", points, markers=True)], x_label="x", y_label="y")
        numbers = [float(n) for n in re.findall(r'c[xy]="([-\d.e+]+)"', chart)]
        assert numbers and all(0 <= n <= 520 for n in numbers)


def test_ticks_are_round_and_cover_the_range():
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(0.13, 0.87) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(-3, 12_000) == pytest.approx([-2500, 0, 2500, 5000, 7500, 10_000, 12_500])
    assert log_ticks(3e-7, 2e-3) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert [format_number(x) for x in (0, 0.25, 12_500, 3e6, 4e-5)] == ["0", "0.25", "12.5k", "3M", "4e-05"]


def dom_of(page: Path, profile: Path) -> str:
    """What Chromium makes of a page in a window 1100 pixels wide, as HTML."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    flags += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--window-size=1100,900"]
    result = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
LONG = "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it_" + 60 * "x"


@NEEDS_CHROMIUM
@pytest.mark.parametrize("breaks", [True, False])
def test_long_names_leave_the_numbers_in_sight(tmp_path, breaks):
    """The control is a page whose style does not break words."""
    result = evaluation(0.5)
    result.results = [replace(one, task=f"{one.task}_{LONG}") for one in result.results]
    result.videos = [{"path": "videos/1.mp4", "task": LONG, "instruction": LONG, "success": True}]
    result.to_json(tmp_path / "result.json")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    if not breaks:
        page = page.replace("overflow-wrap: anywhere", "")
    too_wide = "[...document.querySelectorAll('.scroll, figcaption, body')].filter(e => e.scrollWidth > e.clientWidth)"
    page += f"<script>document.title = {too_wide}.length</script>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    title = re.search("<title>(.*?)</title>", dom_of(tmp_path / "page.html", tmp_path / "profile"))[1]
    assert (title == "0") == breaks and title.isdigit()


@NEEDS_CHROMIUM
def test_chromium_shows_curves_and_videos(run, tmp_path):
    dom = dom_of(run / "report.html", tmp_path)
    assert dom.count('<svg class="chart"') >= 14 and dom.count('class="curve s') >= 17
    assert dom.count("<video") == 12 and dom.count("</video>") == 12
    assert "<details" in dom and "quickstart" in dom
    assert "Paired comparison" in dom and dom.count('<line class="zero"') == 4, "three tasks and the total"
