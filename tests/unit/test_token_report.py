"""The report of a recipe's run: what it draws and counts is what the files of the run hold."""

import json
import shutil
from html.parser import HTMLParser

import pytest

from rlinf.cli import main
from rlinf.errors import CheckpointError
from rlinf.evaluation.compare import Comparison, Pairs
from rlinf.number_formats import format_p_value
from rlinf.recipes.questions_result import QuestionResult, QuestionsResult
from rlinf.recipes.report_data import is_token_folder, read_token_run
from rlinf.recipes.token_trainer import write_samples
from rlinf.report.run_page import write_report

BEFORE, AFTER = [1, 0, 0, 0], [1, 1, 1, 0]


def lines_of(kind: str, steps: int = 6) -> list[dict]:
    lines = [{"step": 0, "phase": "rl", "time_s": 1.0, "eval/reward_mean": 0.25, "eval/reward_mean/gsm8k": 0.25}]
    names = {
        "rl": ["train/loss", "train/learning_rate", "train/grad_norm", "train/approx_kl", "rollout/reward_mean",
               "rollout/reward_mean/gsm8k", "rollout/reward_mean/format", "rollout/completion_length_mean"],
        "sft": ["sft/loss", "sft/learning_rate", "sft/grad_norm"],
    }[kind]  # fmt: skip
    for step in range(steps):
        shared = {"step": step, "phase": kind, "time_s": step + 2.0, "time/update_s": 1.0, "time/total_s": step + 1.0}
        numbers = {name: 0.1 + 0.1 * step for name in names}
        lines.append({**shared, "throughput/tokens_per_s": 100.0 + step, **numbers})
    after = {"eval/reward_mean": 0.75, "eval/reward_mean/gsm8k": 0.75, "eval/loss": 0.5}
    return [*lines, {"step": steps - 1, "phase": kind, "time_s": 99.0, **after}]


def samples(rewards: list[int], words: str) -> str:
    rows = [
        {"prompt": f"What is {n} < 5 & {n}?", "completion": f"{words} #### {n}", "reference": f"#### {n}",
         "reward": reward + 0.5, "rewards": {"gsm8k": reward, "length": 0.5}, "num_tokens": 7}
        for n, reward in enumerate(rewards)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run(tmp_path):
    """A GRPO run with a validation before and after training."""
    folder = tmp_path / "outputs" / "arithmetic" / "20261122120000"
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of("rl")))
    (folder / "samples" / "step_0.jsonl").write_text(samples(BEFORE, "dunno"))
    (folder / "samples" / "step_20.jsonl").write_text(samples(BEFORE, "halfway"))
    (folder / "samples" / "step_100.jsonl").write_text(samples(AFTER, "worked out"))
    config = "train: {train_policy: {type: grpo}, seed: 3}\nlogging: {experiment_name: sums}\n"
    (folder / "config.yaml").write_text(config)
    (folder / "checkpoints" / "step_100").mkdir(parents=True)
    (folder / "checkpoints" / "step_100" / "state.json").write_text("{}")
    (folder / "checkpoints" / "step_100" / "manifest.json").write_text('{"versions": {"torch": "2.13.0"}}')
    return folder


class Page(HTMLParser):
    """Collects headings and what would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "rect", "line", "circle", "path", "polyline", "polygon"):
            self.open.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "elements are closed in order"

    def handle_data(self, data):
        if self.open and self.open[-1] == "h3":
            self.headings.append(data)


def test_a_dpo_run_whose_model_got_worse_is_no_success_though_its_loss_fell(run, tmp_path):
    """The evaluation lies below the run, with its comparison: 28 of 150 questions fewer."""
    shutil.rmtree(run / "samples")
    lines = [
        {"step": n, "phase": "rl", "time_s": 1.0, "train/loss": 0.69 - 0.1 * n, "train/preference_accuracy": 0.9, "throughput/tokens_per_s": 1.0}
        for n in range(6)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "the loss certainly fell" in write_report(run).read_text(encoding="utf-8"), "all without an evaluation"
    pairs = Pairs(both=60, only_a=33, only_b=5, neither=52)
    (run / "eval" / "test").mkdir(parents=True)
    (run / "eval" / "test" / "compare.json").write_text(
        json.dumps(Comparison({"all": pairs}, a="sft", unit="questions").as_dict())
    )
    answers = [QuestionResult(str(n), "all", "1 + 1", "2", "2", "2", n < 65, 1, False) for n in range(150)]
    QuestionsResult(answers, "test.jsonl").to_json(run / "eval" / "test" / "result.json")
    text = write_report(run).read_text(encoding="utf-8")
    assert (
        "certainly fell: from 62.0% (93/150)" in text and "by -18.7 points" in text and "no problem found" not in text
    )
    assert format_p_value(pairs.p_value) in text


def test_the_page_holds_the_curves_of_the_run_and_nothing_from_elsewhere(run):
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and not page.links
    assert page.headings == [
        "Reward", "Reward gsm8k", "Reward format", "Loss", "Learning rate", "Gradient norm", "Completion length", "KL",
        "Throughput", "Time per step",
    ]  # fmt: skip
    assert "<title>sums/20261122120000 - rlinf</title>" in text and "method <b>grpo</b>" in text
    assert "torch <b>2.13.0</b>" in text and "checkpoints/step_100" in text


def test_before_and_after_are_paired_and_steps_are_ordered_as_numbers(run):
    """By hand: 1 of 4 before, 3 of 4 after, 2 only after, 0 only before: p = 2 / 2^2 = 0.5, the gain 50 points."""
    data = read_token_run(run)
    assert [line["steps"] for line in data.lines] == [0, 1, 2, 3, 4, 5, 6, 6], "validations at the steps done by then"
    assert [one.step for one in data.samples] == [0, 20, 100], "as text, step_100 would come before step_20"
    pairs = data.paired("gsm8k")
    assert (pairs.both, pairs.only_a, pairs.only_b, pairs.neither) == (1, 0, 2, 1) and pairs.p_value == 0.5
    assert data.paired("length") is None, "a reward of 0.5 is no count of right answers"
    text = write_report(run).read_text(encoding="utf-8")
    assert "25.0%" in text and "1/4 answers" in text and "75.0%" in text and "3/4 answers" in text and "+50.0" in text
    assert "dunno #### 1" in text and "worked out #### 1" in text and "halfway" not in text
    assert "What is 1 &lt; 5 &amp; 1?" in text, "text of a model is no HTML"
    first = text.index("What is 1 &lt;"), text.index("What is 2 &lt;")
    assert max(first) < text.index("What is 0 &lt;"), "changed ones come first"


def test_samples_are_the_same_rows_whatever_letters_they_have(run):
    rows = [json.loads(line) for line in samples(AFTER, "one\u2028two\x85three\x0c").split("\n") if line]
    write_samples(run / "samples", "step_100", rows)
    assert read_token_run(run).samples[-1].rows == rows
    assert "two\x85three" in write_report(run).read_text(encoding="utf-8")


def test_other_prompts_are_not_paired(run):
    rows = (run / "samples" / "step_0.jsonl").read_text().replace("What is 3", "What is 4")
    (run / "samples" / "step_0.jsonl").write_text(rows)
    assert read_token_run(run).before_and_after is None
    text = write_report(run).read_text(encoding="utf-8")
    assert "Gain in" not in text and "worked out #### 3" in text and "dunno" not in text


def test_fine_tuning_without_completions_has_a_report_too(tmp_path):
    text = "".join(json.dumps(line) + "\n" for line in lines_of("sft"))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert is_token_folder(tmp_path)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    said, *headings = page.headings
    assert said == "What the metrics show (rlinf why)", "the loss of these lines rises"
    assert headings[:4] == ["Reward gsm8k", "Loss", "Learning rate", "Gradient norm"]


def test_the_command_writes_it_and_refuses_several(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    other = shutil.copytree(run, run.with_name("20261122130000"))
    assert main(["report", str(run), str(other)]) == 2
    assert "run of a recipe" in capsys.readouterr().err


def test_a_folder_of_a_policy_is_not_taken_for_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "phase": "rl", "time_s": 1.0, "rollout/success_rate": 0.5}\n')
    assert not is_token_folder(tmp_path)
    with pytest.raises(CheckpointError, match="not a run folder"):
        read_token_run(tmp_path / "nothing")
