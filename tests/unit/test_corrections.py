"""What a head changes: sizes by hand, the largest of each episode, and what the report makes of them."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlinf.evaluation.result import EvaluationResult
from rlinf.offpolicy.corrections import NUM_LARGEST, Corrections
from rlinf.report.offpolicy import warmup_success
from rlinf.report.run_page import write_report
from rlinf.tracking import Tracker, TrackingConfig
from rlinf.types import EpisodeResult, EpisodeSpec, Observation


def spec(number: int, task: int = 0) -> EpisodeSpec:
    return EpisodeSpec("tabletop", task, number, 1)


def seen(*sentences: str) -> Observation:
    images = np.stack([np.full((200, 100, 3), 10 * row, np.uint8) for row in range(len(sentences))])
    return Observation({"front": images}, None, list(sentences))


def two_rows() -> Corrections:
    """Two envs, a chunk of two actions of two numbers, two policy calls; the first env ends an episode in between."""
    corrections = Corrections(["reach", "push"], 2)
    corrections.begin(0, spec(5))
    corrections.begin(1, spec(7, task=1))
    corrections.pass_by()
    base = torch.zeros(2, 4)
    corrections.add(seen("go", "push it"), base, torch.tensor([[0.1, 0.0, 0.3, 0.0], [0.0, -0.4, 0.0, 0.4]]))
    corrections.begin(0, spec(6))
    corrections.add(seen("go left", "push it"), base + 0.5, torch.tensor([[0.5] * 4, [0.5, 0.5, 0.5, 1.3]]))
    return corrections


def test_sizes_and_changes_are_those_by_hand(tmp_path):
    corrections = two_rows()
    corrections.gather()
    sizes = corrections.metrics()
    by_task = {"rollout/correction/reach": 0.05, "rollout/correction/push": 0.2}
    assert sizes == pytest.approx({"rollout/correction": 0.125, **by_task})
    corrections.write(tmp_path, step=3)
    found = json.loads((tmp_path / "corrections.json").read_text())
    rows = {row["instruction"]: row for row in found["sentences"]}
    assert found["step"] == 3 and rows["push it"]["calls"] == 2 and rows["push it"]["task"] == "push"
    assert rows["go"]["change"] == pytest.approx([0.2, 0]) and rows["go left"]["size"] == 0
    assert rows["push it"]["change"] == pytest.approx([0, 0.2]) and rows["push it"]["size"] == pytest.approx(0.2)


def test_the_largest_correction_of_each_episode_is_kept_with_what_was_seen(tmp_path):
    corrections = two_rows()
    corrections.write(tmp_path, step=0)
    largest = json.loads((tmp_path / "corrections.json").read_text())["largest"]
    assert [(each["init_state_id"], each["call"]) for each in largest] == [(7, 1), (5, 1), (6, 0)]
    assert largest[0]["base"] == [0, 0] and largest[1]["action"] == pytest.approx([0.2, 0])
    image = Image.open(io.BytesIO(base64.b64decode(largest[0]["picture"])))
    assert image.size == (48, 96) and np.asarray(image).min() == np.asarray(image).max() == 10  # row 1
    corrections.begin_again([1])
    corrections.add(seen("go left", "push it"), torch.zeros(2, 4), torch.tensor([[0.0] * 4, [0.9] * 4]))
    corrections.write(tmp_path, step=0)
    largest = json.loads((tmp_path / "corrections.json").read_text())["largest"]
    assert (largest[0]["init_state_id"], largest[0]["call"], len(largest)) == (7, 0, 3), "it began again"


def test_no_more_than_the_largest_are_kept(tmp_path):
    corrections = Corrections(["reach"], 1)
    sizes = np.random.default_rng(0).permutation(40) / 40
    for number, size in enumerate(sizes.tolist()):
        corrections.begin(0, spec(number))
        corrections.add(Observation({}, None, ["go"]), torch.zeros(1, 1), torch.tensor([[size]]))
    corrections.write(tmp_path, step=0)
    largest = json.loads((tmp_path / "corrections.json").read_text())["largest"]
    assert [each["size"] for each in largest] == pytest.approx(sorted(sizes.tolist(), reverse=True)[:NUM_LARGEST])
    assert all(each["picture"] is None for each in largest)


def test_nothing_is_written_of_a_warm_up(tmp_path):
    corrections = Corrections(["reach"], 1)
    corrections.begin(0, spec(0))
    corrections.pass_by()
    corrections.write(tmp_path, step=0)
    assert corrections.metrics() == {} and not list(tmp_path.iterdir())


def outcomes(num_successes: int, num_episodes: int = 100) -> EvaluationResult:
    return EvaluationResult([EpisodeResult(spec(i), "reach", i < num_successes, 0.0, 5) for i in range(num_episodes)])


def make_run(folder: Path, rates: list[int], noise: float = 0.5, head: str = "residual") -> Path:
    """Write a run whose warm-up are the first two of its iterations of 512 env steps; ``rates``: successes after each."""
    outcomes(20).to_json(folder / "eval" / "before_rl" / "result.json")
    with Tracker(folder, TrackingConfig(tensorboard=False), {}) as tracker:
        for step, successes in enumerate(rates):
            steps = 512 * (step + 1)
            metrics = {
                "rollout/env_steps_total": steps, "rollout/base_calls_total": steps + 40 * (step + 1),
                "rollout/success_rate": noise if step < 2 else 0.8, "rollout/num_episodes": 32,
                "train/q_first": 0.5, "train/return_first": 0.4,
            }  # fmt: skip
            tracker.log(step, metrics, "rl")
            result = outcomes(successes)
            tag = "after_rl" if step == len(rates) - 1 else f"step_{step:06d}"
            result.to_json(folder / "eval" / tag / "result.json")
            tracker.log(step, result.metrics() | {"rollout/env_steps_total": steps}, "rl")
    algorithm = f"{{name: sac, warmup_env_steps: 1024, head: {{name: {head}, scale: 1.0}}}}"
    (folder / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    two_rows().write(folder, step=len(rates) - 1)
    return folder


def words_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8")).split())


def test_the_report_says_when_rates_were_reached_and_what_was_changed_where(tmp_path):
    page = write_report(make_run(tmp_path, [30, 55, 79, 81]))
    words = words_of(page)
    assert "50% 1,024 1,104 55.0% (55/100" in words and "80% 2,048 2,208 81.0% (81/100" in words
    assert "90% not within 2,048" in words
    assert "expected by the critics" in words and "Critics against returns" in words
    assert "An episode that a time limit cut counts with what it had reached until then" in words
    assert "push it push 2 0.200 +0.00, +0.20 50%" in words and "go reach 1 0.100 +0.20, +0.00 100%" in words
    assert "reach, init state 5 1 0.100 +0.00, +0.00 +0.20, +0.00" in words
    assert page.read_text(encoding="utf-8").count('<img src="data:image/png;base64,') == 3
    assert "without any learning, solved" not in words


@pytest.mark.parametrize(("noise", "is_said"), [(0.5, False), (0.75, True)])
def test_a_head_that_is_no_better_than_noise_is_said_so(tmp_path, noise, is_said):
    words = words_of(write_report(make_run(tmp_path, [30, 55, 79, 81], noise)))
    assert f"uniform noise: the warm-up (training episodes) {noise:.1%} ({round(64 * noise)}/64" in words
    assert ("Uniform noise around the frozen policy, without any learning, solved 75.0% (48/64)" in words) == is_said


def test_only_the_warm_up_counts_and_only_where_it_is_noise_around_the_frozen_policy():
    line = {"rollout/base_calls_total": 1.0, "rollout/success_rate": 0.25, "rollout/num_episodes": 32.0}
    lines = [{"eval/success_rate": 0.9}, *({**line, "rollout/env_steps_total": steps} for steps in (512, 1024, 1536))]
    config = {"warmup_env_steps": 1024, "head": {"name": "residual"}}
    found = warmup_success(lines, config)
    assert found is not None and (found.successes, found.episodes) == (16, 64)
    assert warmup_success(lines, config | {"head": {"name": "direct"}}) is None
    assert warmup_success(lines, config | {"warmup_env_steps": 0}) is None and warmup_success(lines, {}) is None
