"""What is said of a run: each rule names its fault, with numbers, and keeps quiet where there is none or nothing was measured."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlinf.cli import main
from rlinf.config.schema import field_types
from rlinf.evaluation.collapse import has_collapsed, is_collapsed
from rlinf.evaluation.finding_rules import RULES, smaller_rate
from rlinf.evaluation.findings import NotMeasured, Record, Series, diagnose
from rlinf.evaluation.intervals import difference_interval
from rlinf.evaluation.result import Success
from rlinf.recipes.config import RecipeConfig

BY_NAME = {rule.__name__: rule for rule in RULES}
STEPS = 12


def lines(phase: str = "rl", **metrics) -> list[dict]:
    """Return ``STEPS`` lines; a metric is a number, or a function of its step. ``train__x`` is ``train/x``."""
    return [
        {"step": step, "phase": phase, "time_s": float(step)}
        | {name.replace("__", "/"): value(step) if callable(value) else value for name, value in metrics.items()}
        for step in range(STEPS)
    ]


def evaluations(*successes: int, episodes: int = 100, phase: str = "rl") -> list[dict]:
    return [
        {"step": 10 * place, "phase": phase, "time_s": 0.0, "eval/successes": count, "eval/episodes": episodes}
        for place, count in enumerate(successes)
    ]


def falls(start: float, end: float):
    return lambda step: start + (end - start) * step / (STEPS - 1)


PLAYED = {"rollout__num_episodes": 64}
SEVERAL = {"rollout": {"num_envs": 64, "num_chunks": 16}, "trainer": {"minibatch_size": 256, "learning_rate": 1e-3}}

CASES = {  # rule: faulty lines and settings, words of the sentence, override; lines and settings of a healthy run
    "collapsed": (
        evaluations(20, 80, 10), SEVERAL, "80.0% (80/100)", "trainer.learning_rate=0.0002",
        evaluations(20, 80, 70), SEVERAL,
    ),
    "never_a_success": (
        lines(rollout__success_rate=0.0, rollout__episode_len=16.0, **PLAYED), {"env": {"max_episode_steps": 16}}, "None of 768 episodes", "env.max_episode_steps=32",
        lines(rollout__success_rate=1 / 64, rollout__episode_len=16.0, **PLAYED), {},
    ),
    "reward_misses_success": (
        lines(rollout__success_rate=falls(0.75, 0.25), rollout__return_mean=falls(1, 2), **PLAYED),
        {"env": {"reward_mode": "shaped"}}, "rose from 1.14 to 1.86",
        "env.reward_mode=sparse",
        lines(rollout__success_rate=falls(0.25, 0.75), rollout__return_mean=falls(1, 2), **PLAYED), {},
    ),
    "ratios_clipped": (
        lines(train__clip_fraction=0.6, train__approx_kl=0.2), SEVERAL, "60% of the importance ratios", "trainer.learning_rate=0.0002",
        lines(train__clip_fraction=0.1, train__approx_kl=0.01), SEVERAL,
    ),
    "critic_diverges": (
        lines(train__value_loss=100.0, rollout__return_mean=1.5), {}, "errs by 10", "trainer.value_learning_rate=0.0001",
        lines(train__value_loss=2.0, rollout__return_mean=0.0), {},
    ),
    "critic_blind": (
        lines(train__explained_variance=lambda step: -0.1 + 0.02 * (-1) ** step), {}, "no better than a constant", "trainer.value_learning_rate=0.01",
        lines(train__explained_variance=lambda step: -0.0005 * (step % 2)), {},
    ),
    "rate_rounds_away": (
        [*lines("sft", sft__learning_rate=1e-3), *lines(train__learning_rate=1e-10)],
        {"sft": {"learning_rate": 1e-3}, "trainer": {"learning_rate": 1e-10}}, "The learning rate of RL is 1e-10", "trainer.learning_rate=1e-05",
        lines(train__learning_rate=1e-6), {},
    ),
    "policy_stands_still": (
        lines(train__approx_kl=1e-9, train__clip_fraction=0.0), SEVERAL, "1e-09 nat", "trainer.learning_rate=0.01",
        lines(train__approx_kl=1e-4, train__clip_fraction=0.0), SEVERAL,
    ),
    "equal_groups": (
        lines(rollout__zero_variance_group_fraction=0.9), {"rollout": {"group_size": 8}}, "In 90% of the groups", "rollout.group_size=16",
        lines(rollout__zero_variance_group_fraction=0.93**8 + 0.07**8, rollout__success_rate=0.93, **PLAYED), {},
    ),
    "entropy_gone": (
        lines(train__entropy=falls(1.0, -3.5)), SEVERAL, "The entropy is -2.89 nat, after 0.386 nat", "algorithm.entropy_coef=0.01",
        lines(train__entropy=falls(1.42, 0.04)), SEVERAL,
    ),
    "entropy_explodes": (
        lines(train__entropy=falls(0.9, 3.0)), {"algorithm": {"entropy_coef": 1.0}}, "rises from 0.9", "algorithm.entropy_coef=0.1",
        lines(train__entropy=lambda step: 1.0 + 0.6 * (step % 2)), {},
    ),
    "gradient_clipped": (
        lines(train__grad_norm=3.0), {"trainer": {"max_grad_norm": 0.01}}, "300 times the limit of 0.01", "trainer.max_grad_norm=3",
        lines(train__grad_norm=3.0), {"trainer": {"max_grad_norm": 1.0}},
    ),
    "lost_episodes": (
        lines(rollout__lost_episodes=2, **PLAYED), {}, "24 episodes began again", "rollout.num_envs=32",
        lines(rollout__lost_episodes=0, **PLAYED), {},
    ),
    "parity_near_gate": (
        lines(rollout__logprob_gap_max=6e-4), {}, "0.0006 at a limit of 0.001", "rollout.backend=torch",
        lines(rollout__logprob_gap_max=1e-6), {},
    ),
    "stale_rollouts": (
        lines(rollout__staleness_iterations=3, rollout__importance_ratio_max=80.0, rollout__importance_ratio_mean=1.0),
        {"algorithm": {"tis_cap": 2.0}}, "reach 80", "cluster.max_staleness=2",
        lines(rollout__staleness_iterations=3, rollout__importance_ratio_max=8.0, rollout__importance_ratio_mean=1.0),
        {"algorithm": {"tis_cap": 2.0}},
    ),
    "critic_dreams": (
        lines(train__q_first=4.0, train__return_first=0.5), {}, "expect 4 of an episode", "algorithm.updates_per_env_step=0.25",
        lines(train__q_first=0.6, train__return_first=0.5), {},
    ),
    "head_saturated": (
        lines(train__at_bound=0.8), {"algorithm": {"head": {"scale": 0.1}}}, "80% of the numbers", "algorithm.head.scale=0.2",
        lines(train__at_bound=0.2), {},
    ),
    "answers_cut": (
        lines(rollout__truncated_fraction=0.6), {"train": {"train_policy": {}}, "rollout": {"max_response_length": 64}},
        "cut at 64 tokens", "rollout.max_response_length=128",
        lines(rollout__truncated_fraction=0.05), {"train": {"train_policy": {}}},
    ),
    "cloning_diverges": (
        lines("sft", sft__loss=falls(2, 9)), {"sft": {"learning_rate": 1.0}}, "is 8.05, after 2", "sft.learning_rate=0.2",
        lines("sft", sft__loss=falls(2, 1)), {},
    ),
    "cloning_stands_still": (
        lines("sft", sft__loss=lambda step: 2 + 0.01 * (-1) ** step), {"sft": {"learning_rate": 1e-8}}, "nothing is learnt",
        "sft.learning_rate=0.0001",
        lines("sft", sft__loss=falls(2, 1)), {},
    ),
    "overfitted": (
        [*lines("sft", sft__loss=falls(2, 0.1)), *({"step": n, "phase": "sft", "eval/loss": x} for n, x in enumerate((2, 1, 1.5, 2.5)))],
        {"train": {"train_policy": {}, "optm_lr": 1e-4}}, "rose from 1 to 2.5", "train.optm_lr=2e-05",
        [*lines("sft", sft__loss=falls(2, 0.1)), *({"step": n, "phase": "sft", "eval/loss": x} for n, x in enumerate((2, 1, 0.9, 0.91)))],
        {"train": {"train_policy": {}}},
    ),
    "clone_is_bound": (
        [*lines("sft", sft__demonstrator_success_rate=0.4), *evaluations(38, phase="sft")], {}, "38.0% (38/100), and its demonstrator in 40.0%",
        "trainer.max_steps=60",
        [*lines("sft", sft__demonstrator_success_rate=0.95), *evaluations(93, phase="sft")], {},
    ),
    "data_starves": (
        lines("sft", throughput__data_wait_fraction=0.7), {"sft": {"dataset": "rows"}}, "70% of its time", "sft.num_workers=4",
        lines("sft", throughput__data_wait_fraction=0.01), {"sft": {"dataset": "rows"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_names_its_fault_and_not_a_healthy_run(name):
    faulty, settings, words, override, healthy, healthy_settings = CASES[name]
    finding = BY_NAME[name](Record(faulty, settings))
    assert words in finding.text and override in finding.set
    assert BY_NAME[name](Record(healthy, healthy_settings)) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_says_nothing_of_what_was_not_measured(name):
    with pytest.raises(NotMeasured):
        BY_NAME[name](Record([], {}))


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_to_be_typed_are_overrides_of_keys_that_there_are(name):
    faulty, settings, *_ = CASES[name]
    record = Record(faulty, settings)
    text = BY_NAME[name](record).set
    words = re.split(r" or | ", text)
    if record.is_recipe:
        known = set(field_types(RecipeConfig()))
    else:
        known = set(field_types()) | {"env.max_episode_steps", "algorithm.head.scale", "algorithm.learning_rate",
                                      "algorithm.updates_per_env_step"}  # fmt: skip
    assert words and all(word.partition("=")[0] in known and "=" in word for word in words), text


def test_one_bad_step_is_not_a_finding():
    spike = lines(train__clip_fraction=lambda step: 0.9 if step == STEPS - 2 else 0.1, train__approx_kl=0.01)
    assert BY_NAME["ratios_clipped"](Record(spike, SEVERAL)) is None


def test_windows_are_thirds():
    series = Series(list(range(12)), [float(value) for value in range(12)])
    assert series.early == [0, 1, 2, 3] and series.late == [8, 9, 10, 11] and series.late_steps == (8, 11)


def test_the_warm_up_of_the_critic_does_not_count():
    still = lines(train__approx_kl=0.0, train__clip_fraction=0.0)
    with pytest.raises(NotMeasured):
        BY_NAME["policy_stands_still"](Record(still, SEVERAL | {"algorithm": {"critic_warmup_steps": 8}}))
    begun = Record(evaluations(80, 5), SEVERAL | {"algorithm": {"critic_warmup_steps": 8}})
    assert BY_NAME["collapsed"](begun).steps == (0, 10), "an evaluation before RL counts all the same"


def test_one_step_per_iteration_has_no_kl():
    still, one = lines(train__approx_kl=0.0, train__clip_fraction=0.0), {"rollout": {"num_envs": 8, "num_chunks": 4}}
    with pytest.raises(NotMeasured, match="one optimiser step"):
        BY_NAME["policy_stands_still"](Record(still, one | {"trainer": {"minibatch_size": 32}}))


RECIPE = {"train": {"train_policy": {"type": "grpo", "reward_function": ["gsm8k"]}, "optm_lr": 1e-6}}
BATCHES = random.Random(0)
HEALTHY = {  # lines and settings of runs in which nothing is wrong; what a batch or a rollout shows varies by chance
    "recipe on policy": (
        lines(train__approx_kl=0.0, train__clip_fraction=0.0, rollout__reward_mean=falls(0.2, 0.5), train__entropy=falls(0.5, 0.3)), RECIPE,
    ),
    "recipe of two steps": (
        lines(train__approx_kl=1e-4, train__clip_fraction=0.001, rollout__reward_mean=falls(0.2, 0.5)),
        {"train": {"train_policy": {"type": "grpo", "mu_iterations": 2}}},
    ),
    "recipe that learns its task": (
        lines(rollout__reward_mean=lambda step: min(1.0, 0.2 + 0.1 * step), train__entropy=falls(0.5, 0.005),
              rollout__zero_variance_group_fraction=falls(0.1, 0.95)), RECIPE,
    ),
    "recipe that knows its task": (
        lines(rollout__reward_mean=1.0, rollout__zero_variance_group_fraction=1.0, train__entropy=falls(0.01, 0.005)), RECIPE,
    ),
    "recipe without rewards": (lines(train__entropy=falls(0.5, 0.005)), {"train": {"train_policy": {"type": "dpo"}}}),
    "recipe of SFT": (
        [*lines("sft", sft__loss=lambda step: BATCHES.gauss(0.5, 0.02), sft__grad_norm=2.0, sft__learning_rate=1e-5),
         *({"step": n, "phase": "sft", "eval/loss": x} for n, x in enumerate((0.5, 0.49, 0.48, 0.485)))],
        {"train": {"train_policy": {"type": "sft"}}},
    ),
    "tokens": (
        lines(train__entropy=falls(1.5, 0.2), train__approx_kl=2e-3, train__clip_fraction=0.05, train__explained_variance=falls(-0.3, 0.6),
              train__grad_norm=1.5, train__learning_rate=1e-5, rollout__success_rate=falls(0.1, 0.8), rollout__return_mean=falls(0.1, 0.8),
              **PLAYED), SEVERAL,
    ),
    "flow of fixed noise": (lines(train__entropy=0.0, train__approx_kl=2e-3, train__clip_fraction=0.05), SEVERAL),
    "sparse GRPO on tasks half of which are easy": (
        lines(rollout__zero_variance_group_fraction=(1 + 0.5**7) / 2, rollout__success_rate=0.75, rollout__return_mean=0.75, **PLAYED), {},
    ),
    "sparse GRPO that succeeds seldom": (
        lines(rollout__zero_variance_group_fraction=0.9**8, rollout__success_rate=0.1, rollout__return_mean=0.1, **PLAYED), {},
    ),
    "RL whose return rises before its first success": (
        lines(rollout__success_rate=0.0, rollout__episode_len=50.0, rollout__return_mean=falls(0, 1), **PLAYED), {},
    ),
    "head that corrects by as much as it can": (lines(train__at_bound=0.7), {"algorithm": {"head": {"scale": 2.0}}}),
    "demonstrations in memory": (lines("sft", throughput__data_wait_fraction=0.7), {"sft": {"num_workers": 2}}),
    "cloning that goes on": (
        lines("sft", sft__loss=0.2, sft__grad_norm=0.5, sft__learning_rate=1e-4), {"init_from": "outputs/clone"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_another_kind_is_not_accused(name):
    found = diagnose(Record(*HEALTHY[name]), RULES)
    assert [str(finding) for finding in found.findings] == []


def test_control_the_same_kinds_with_a_fault_are():
    """Recipes and token policies that do not learn."""
    flat = lines(
        rollout__reward_mean=0.1, rollout__zero_variance_group_fraction=0.9, train__entropy=lambda step: 0.5**step
    )
    found = [finding.rule for finding in diagnose(Record(flat, RECIPE), RULES).findings]
    assert found == ["equal_groups", "entropy_gone"]
    two = {"train": {"train_policy": {"type": "grpo", "mu_iterations": 2}}}
    still = lines(rollout__reward_mean=0.1, train__approx_kl=0.0, train__clip_fraction=0.0)
    assert BY_NAME["policy_stands_still"](Record(still, two)) is not None
    hopeless = lines(rollout__zero_variance_group_fraction=0.96**8, rollout__success_rate=0.04, **PLAYED)
    assert BY_NAME["equal_groups"](Record(hopeless, {})) is not None
    certain, tokens = lines(train__entropy=lambda step: 2 * 0.5**step), {"actions": {"n_action_bins": 256}}
    assert BY_NAME["entropy_gone"](Record(certain, SEVERAL, tokens)) is not None
    assert BY_NAME["entropy_gone"](Record(certain, SEVERAL, {"actions": {}})) is None


def test_batches_that_differ_are_no_divergence():
    """Of 400 clones that go on at a loss whose batches differ by 10 %, at most one in a hundred is accused."""
    generator, said = random.Random(1), 0
    for _ in range(400):
        loss = [{"step": 10 * n, "phase": "sft", "sft/loss": generator.gauss(1, 0.1)} for n in range(30)]
        said += len(diagnose(Record(loss, {"init_from": "outputs/clone"}), RULES).findings)
    assert said <= 4
    jump = [one | {"sft/loss": one["sft/loss"] + (n > 0)} for n, one in enumerate(loss)]
    assert BY_NAME["cloning_diverges"](Record(jump, {})) is not None, "the same noise around twice the loss"


def test_an_unchanged_policy_is_seldom_said_to_be_worse():
    """The first and the last evaluation of 4000 policies that stay where they are, 50 episodes each."""
    generator, said = random.Random(2), 0
    for _ in range(4000):
        first, last = (sum(generator.random() < 0.75 for _ in range(50)) for _ in range(2))
        said += BY_NAME["collapsed"](Record(evaluations(first, last, episodes=50), {})) is not None
    assert said <= 4000 / 200


def test_only_keys_of_the_env_are_to_be_typed():
    """An env of a user has neither a time limit nor kinds of rewards to choose from."""
    never = lines(rollout__success_rate=0.0, rollout__episode_len=16.0, **PLAYED)
    pays = lines(rollout__success_rate=falls(0.75, 0.25), rollout__return_mean=falls(1, 2), **PLAYED)
    for name, record in (("never_a_success", Record(never, {})), ("reward_misses_success", Record(pays, {}))):
        assert "env." not in BY_NAME[name](record).set


def test_rl_that_ends_below_its_beginning_has_made_the_policy_worse():
    assert "RL made the policy worse" in BY_NAME["collapsed"](Record(evaluations(80, 60), SEVERAL)).text
    assert BY_NAME["collapsed"](Record(evaluations(80, 74), SEVERAL)) is None


def test_a_run_that_stays_where_it_is_seldom_collapses_and_a_mere_difference_would_say_so():
    """100 runs of 50 evaluations of 100 episodes each, for three success rates."""

    def differs(best: Success, later: Success) -> bool:
        return difference_interval((best.successes, later.successes), (best.episodes, later.episodes))[0] > 0

    generator, ours, naive = np.random.default_rng(0), 0, 0
    for rate in (0.05, 0.2, 0.5):
        for counts in generator.binomial(100, rate, (100, 50)).tolist():
            run = [Success(count, 100) for count in counts]
            ours += any(has_collapsed(run[:end]) for end in range(3, 51))
            best = [max(run[:end], key=lambda one: one.successes) for end in range(1, 51)]
            naive += any(all(differs(best[end - 2], run[end + late]) for late in (-1, 0)) for end in range(2, 50))
    assert ours <= 6 < 150 < naive


def test_a_collapse_is_two_evaluations_in_a_row_far_below_the_best_before_them():
    good, bad, middle = Success(80, 100), Success(10, 100), Success(60, 100)
    assert is_collapsed(good, bad) and not is_collapsed(good, middle)
    assert has_collapsed([Success(0, 100), good, bad, bad])
    assert (
        not has_collapsed([good, bad])
        and not has_collapsed([good, bad, middle])
        and not has_collapsed([good, middle, bad])
    )
    assert not has_collapsed([Success(0, 100)] * 5)


def test_the_worst_comes_first_and_the_rest_is_listed_with_its_reason():
    faulty = [
        *lines(train__clip_fraction=0.6, train__approx_kl=0.2, train__entropy=falls(0.9, 3.0)),
        *evaluations(80, 5),
    ]
    diagnosis = diagnose(Record(faulty, SEVERAL), RULES)
    assert [finding.rule for finding in diagnosis.findings] == ["collapsed", "ratios_clipped", "entropy_explodes"]
    assert "policy_stands_still" in diagnosis.fine and diagnosis.silent["critic_blind"] == "no train/explained_variance"
    listed = [finding.rule for finding in diagnosis.findings] + diagnosis.fine + list(diagnosis.silent)
    assert sorted(listed) == sorted(BY_NAME)


@pytest.fixture
def folder(tmp_path):
    """A run folder whose ratios are clipped."""
    path = tmp_path / "run"
    path.mkdir()
    found = lines(train__clip_fraction=0.6, train__approx_kl=0.2)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    (path / "config.yaml").write_text(yaml.safe_dump(SEVERAL))
    return path


def test_the_command_prints_sentences_or_json(folder, capsys):
    assert main(["why", str(folder)]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("ratios_clipped: 60% of the importance ratios") and "Set trainer.learning_rate=0.0002" in text
    )
    assert "not evaluated" in text and "critic_blind" in text
    assert main(["why", "--json", str(folder)]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["findings"][0]["rule"] == "ratios_clipped" and found["findings"][0]["steps"] == [8, 11]


def test_a_manifest_tells_whether_a_policy_samples_tokens(folder, capsys):
    certain = lines(train__entropy=lambda step: 2 * 0.5**step)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in certain))
    for actions, said in (({"n_action_bins": 21}, "entropy_gone: The entropy is"), ({}, "nothing to say")):
        (folder / "manifest.json").write_text(json.dumps({"actions": actions}))
        assert main(["why", str(folder)]) == 0 and capsys.readouterr().out.startswith(said)


def test_a_run_without_a_finding_says_so(folder, capsys):
    healthy = lines(train__clip_fraction=0.1, train__approx_kl=0.01)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in healthy))
    assert main(["why", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("nothing to say: 2 rules found nothing")


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["why", str(tmp_path / "nowhere")]) == 2 and "There is no folder" in capsys.readouterr().err
    assert main(["why"]) == 2 and "rlinf why outputs/quickstart/latest" in capsys.readouterr().err


def test_the_page_lists_the_rules_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", page.partition("## When a run")[0], flags=re.M)
    assert rows == [(rule.__name__, rule.__doc__) for rule in RULES]


def test_a_smaller_rate_is_smaller_than_that_of_a_run_that_has_gone_back():
    played = lines(train__learning_rate=lambda step: 1e-3 if step < 6 else 2.5e-4)
    assert smaller_rate(Record([*played, *evaluations(80)], SEVERAL)) == "trainer.learning_rate=5e-05"
    assert smaller_rate(Record(lines(phase="sft", train__learning_rate=0.1), SEVERAL)) == "trainer.learning_rate=0.0002"
    head = SEVERAL | {"algorithm": {"learning_rate": 5e-3}}
    assert smaller_rate(Record(played, head)) == "algorithm.learning_rate=0.001"
