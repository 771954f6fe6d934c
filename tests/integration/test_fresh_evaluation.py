"""The chosen checkpoint of a run is evaluated once more, on episodes that did not choose it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from run_results import SMALL_RUN, give_success, run_config

from rlinf.commands import fresh as fresh_module
from rlinf.commands.evaluate import evaluate
from rlinf.commands.hydra_app import configure, parse
from rlinf.commands.train import train
from rlinf.evaluation.partial import PartialResults
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.report.runs import compared_pairs, group_runs, read_runs
from rlinf.training.state import LoopState

RUN = [
    *SMALL_RUN, "trainer.max_steps=2", "trainer.eval_every=1", "evaluation.num_episodes=6", "evaluation.num_fresh_episodes=null",
    "trainer.max_keep=-1", "trainer.save_every=1", "algorithm.critic_warmup_steps=0", "evaluation.baselines=true",
]  # fmt: skip


def config_of(folder: Path, *overrides: str):
    return run_config(folder, *RUN, *overrides)


def evaluated(folder: Path, *overrides: str) -> EvaluationResult:
    """The result of ``rlinf evaluate`` in a new folder."""
    return evaluate(configure(parse([*overrides, f"output_dir={folder}"]), "evaluate"))


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def baseline():
    """The one baseline of every evaluation that has some."""
    row = {"name": "a baseline", "meaning": "", "note": "", "success": Success(3, 6).as_dict()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlinf.commands.evaluate.evaluate_baselines", lambda *args, **options: [row])
        yield row


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run whose evaluation after the first iteration was the best."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        give_success(patch, 0.0, 0.5, 0.0)
        train(config_of(folder))
    return folder


def episodes_of(folder: Path) -> list:
    return [row.spec for row in EvaluationResult.from_json(folder / "result.json").results]


def test_the_reported_number_is_the_one_of_rlinf_evaluate_on_other_episodes(finished, tmp_path):
    reported = summary_of(finished)["reported"]
    fresh = EvaluationResult.from_json(finished / "eval" / "fresh" / "result.json")
    assert not set(episodes_of(finished / "eval" / "after_rl")) & set(episodes_of(finished / "eval" / "fresh"))
    assert reported["checkpoint"] == "rl_000001" and reported["chosen_success_rate"] == 0.5
    assert (reported["successes"], reported["episodes"]) == (fresh.successes, 6)
    assert (reported["first_episode"], reported["num_candidates"]) == (6, 2)
    checkpoint = f"checkpoint={finished / 'checkpoints' / 'rl_000001'}"
    again = evaluated(tmp_path / "again", checkpoint, "evaluation.first_episode=6")
    assert again.results == fresh.results and not any("chose this" in line for line in again.warnings)
    other = evaluated(tmp_path / "other", checkpoint, "evaluation.first_episode=4")
    assert other.results[2:] == fresh.results[:4], "control: the list moves by two"
    (warning,) = (line for line in other.warnings if "chose this checkpoint" in line)
    assert "2 of these 6" in warning and "evaluation.first_episode=6" in warning
    last = evaluated(tmp_path / "last", f"checkpoint={finished / 'checkpoints' / 'rl_000002'}")
    assert not any("chose this" in line for line in last.warnings), "these episodes did not choose it"


def test_baselines_run_beside_the_reported_number_only(finished, baseline):
    summary = summary_of(finished)
    with_some = [name for name, value in summary.items() if isinstance(value, dict) and "baselines" in value]
    assert with_some == ["reported"] and summary["reported"]["baselines"] == [baseline]
    assert (finished / "report.html").read_text().count("a baseline") == 1


def test_the_same_episodes_are_compared_with_sampled_actions(finished, tmp_path):
    sampled = EvaluationResult.from_json(finished / "eval" / "fresh" / "sampled" / "result.json")
    assert episodes_of(finished / "eval" / "fresh" / "sampled") == episodes_of(finished / "eval" / "fresh")
    stored = summary_of(finished)["sampled"]
    assert (sampled.greedy, stored["temperature"], stored["successes"]) == (False, 1.0, sampled.successes)
    assert stored["paired_with_greedy"]["successes_a"] == summary_of(finished)["reported"]["successes"]
    words = [
        f"checkpoint={finished / 'checkpoints' / 'rl_000001'}",
        "evaluation.first_episode=6",
        "evaluation.greedy=false",
    ]
    hot = evaluated(tmp_path / "hot", *words, "evaluation.temperature=3")
    same = evaluated(tmp_path / "same", *words, "rollout.temperature=3")
    typed = evaluated(tmp_path / "one", *words)
    assert hot.temperature == 3 and hot.results == same.results
    assert typed.results == sampled.results != hot.results


def test_a_finished_run_is_not_evaluated_again_unless_its_choice_changes(finished, tmp_path, monkeypatch):
    run, ran = tmp_path / "run", []
    shutil.copytree(finished, run)
    run_again = fresh_module.evaluate_rank
    monkeypatch.setattr(fresh_module, "evaluate_rank", lambda work: ran.append(work[0].checkpoint) or run_again(work))
    give_success(monkeypatch, 0.25)
    config = config_of(run, f"resume={run}", "evaluation.num_episodes=3")
    train(config_of(finished, f"resume={finished}"))
    assert not ran and summary_of(finished)["reported"]["checkpoint"] == "rl_000001"
    give_success(monkeypatch, 0.75)
    train(config)
    assert [os.path.basename(path) for path in ran] == ["rl_000002"] * 2, "greedy, then sampled"
    reported = summary_of(run)["reported"]
    assert (reported["checkpoint"], reported["first_episode"]) == ("rl_000002", 6), (
        "the first six chose between the two"
    )
    assert episodes_of(run / "eval" / "fresh") == episodes_of(finished / "eval" / "fresh")[:3]


@pytest.mark.parametrize(
    ("override", "on_workers", "reason"),
    [
        ("evaluation.num_fresh_episodes=0", False, "num_fresh_episodes=0"),
        ("evaluation.split=train", False, "split=train"),
        ("evaluation.num_episodes=6", True, "evaluation.first_episode=6 evaluation.num_episodes=4"),
    ],
)
def test_a_choice_that_is_not_evaluated_again_has_a_reason(finished, monkeypatch, override, on_workers, reason):
    monkeypatch.delattr(fresh_module, "evaluate_rank")
    names = ["rl_000001", "rl_000002"]
    state = LoopState(evaluations={name: {"checkpoint": name, "success_rate": 0.5} for name in names})
    config = config_of(finished, override)
    assert reason in fresh_module.evaluate_chosen(config, state, names, range(6, 10), True, on_workers)["not_fresh"]
    assert (finished / "eval" / "fresh" / "result.json").exists(), "an earlier result is not deleted"


def test_a_run_that_is_interrupted_in_its_fresh_evaluation_finishes_it(finished, tmp_path, monkeypatch):
    add, added = PartialResults.add, []

    def interrupted(self, result):
        add(self, result)
        added.append(result.spec)
        if len(added) == 2:
            raise KeyboardInterrupt

    give_success(monkeypatch, 0.0, 0.5, 0.0, 0.0)
    monkeypatch.setattr(PartialResults, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config_of(tmp_path, "evaluation.num_envs=1"))
    assert not (tmp_path / "summary.json").exists()
    train(config_of(tmp_path, "evaluation.num_envs=1", f"resume={tmp_path}"))
    assert added[:6] == episodes_of(tmp_path / "eval" / "fresh"), "each once"
    assert summary_of(tmp_path)["reported"] == summary_of(finished)["reported"]


def test_without_episodes_left_or_without_a_choice_there_is_no_fresh_evaluation(tmp_path, monkeypatch, capsys):
    give_success(monkeypatch, 0.0, 0.5, 0.0)
    train(config_of(tmp_path / "used", "env.num_eval_init_states=6"))
    summary = summary_of(tmp_path / "used")
    assert "reported" not in summary and summary["best_checkpoint"]["num_candidates"] == 2
    assert "no episodes after" in summary["not_fresh"] and summary["not_fresh"] in capsys.readouterr().out
    assert "No fresh evaluation" in (tmp_path / "used" / "report.html").read_text()
    give_success(monkeypatch, 0.0, 0.5)
    train(config_of(tmp_path / "single", "trainer.eval_every=0"))
    assert {"reported", "not_fresh"}.isdisjoint(summary_of(tmp_path / "single"))
    assert "no fresh" not in capsys.readouterr().out
    assert not list(tmp_path.glob("*/eval/fresh"))


def test_the_pages_have_the_fresh_number_first(finished, tmp_path):
    with_fresh, without = read_runs([finished, shutil.copytree(finished, tmp_path / "without")])
    without.fresh = None
    (group,) = group_runs([with_fresh])
    assert group.pooled["reported"].totals == [with_fresh.fresh.result.total]
    pairs = [compared_pairs([group, *group_runs([other])])[0][2] for other in (with_fresh, without)]
    returns = [paired["returns"]["total"]["mean_a"] for paired in pairs]
    assert returns[0] == pytest.approx(with_fresh.fresh.result.return_mean)
    assert returns[1] == pytest.approx(with_fresh.after.result.return_mean) != returns[0], "the list that both have"
    page = (finished / "report.html").read_text()
    assert page.index("Success to report") < page.index("Success after RL")
