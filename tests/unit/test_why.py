"""What is said of a run: each rule names its fault, with numbers, and keeps quiet where there is none or nothing was measured."""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlinf.cli import main
from rlinf.config.schema import field_types
from rlinf.evaluation.intervals import difference_interval
from rlinf.evaluation.result import Success
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.why import RecipeRecord, overfitted
from rlinf.report.why.findings import MetricSeries, NotMeasured, Record
from rlinf.report.why.outcome import change_interval, outcome_of_counts, outcome_of_values
from rlinf.report.why.rules import ALWAYS, CAUSES, LAST, diagnose, rate_of
from rlinf.training.collapse import has_collapsed, is_collapsed

BY_NAME = {rule.__name__: rule for rule in (overfitted, *ALWAYS, *CAUSES, *LAST)}


def record_of(run: list[dict], settings: dict | None = None, gain: dict | None = None) -> Record:
    """Make the record of a recipe's run if its settings are a recipe's."""
    kind = RecipeRecord if "train" in (settings or {}) else Record
    return kind(run, settings or {}, gain)


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


def BUMPS(step: int) -> float:
    return (0.3, -0.2, 0.5, -0.6, 0.1, -0.1)[step % 6]


PLAYED = {"rollout__num_episodes": 64}
SEVERAL = {"rollout": {"num_envs": 64, "num_chunks": 16}, "trainer": {"minibatch_size": 256, "learning_rate": 1e-3}}

FLAT = {"rollout__success_rate": 0.0, **PLAYED}
GRPO = {"train": {"train_policy": {"type": "grpo", "reward_function": "gsm8k", "kl_beta": 0.0}, "optm_lr": 1e-4}}
MOVES = {"train__approx_kl": 0.01, "train__clip_fraction": 0.1}

CLONED = [*lines("sft", sft__loss=falls(2, 1)), *evaluations(10)]

CASES = {  # rule: faulty lines and settings, a number of the sentence, override; lines and settings of a healthy run
    "kl_penalty_too_strong": (
        lines(train__kl_to_reference=1e-5), {"algorithm": {"kl_coef": 1000.0}}, "1e-05 nat", "algorithm.kl_coef=0.01",
        lines(train__kl_to_reference=1e-5), {"algorithm": {"kl_coef": 0.1}},
    ),
    "steps_too_large": (
        lines(train__approx_kl=0.2, train__entropy=0.9), SEVERAL, "0.2 nat", "trainer.learning_rate=0.0003",
        lines(train__approx_kl=0.02, train__entropy=0.9), SEVERAL,
    ),
    "constant_return": (
        lines(rollout__return_mean=3.0, **FLAT), {}, "return 3", "",
        lines(rollout__return_mean=lambda step: 3 + 0.01 * (step % 2), **FLAT), {},
    ),
    "only_the_critic_learns": (
        lines(train__approx_kl=0.0, **FLAT), {"algorithm": {"critic_warmup_steps": 12}, "trainer": {"max_steps": 12}}, "the run has 12",
        "algorithm.critic_warmup_steps=0",
        lines(train__approx_kl=1e-3, **FLAT), {"algorithm": {"critic_warmup_steps": 3}, "trainer": {"max_steps": 12}},
    ),
    "steps_too_small": (  # 12 iterations of 4 updates
        lines(train__learning_rate=1e-6, train__grad_norm=1.0, train__approx_kl=1e-6, **FLAT), SEVERAL, "4.8e-05", "trainer.learning_rate=0.001",
        lines(train__learning_rate=1e-3, train__grad_norm=1.0, train__approx_kl=1e-3, **FLAT), SEVERAL,
    ),
    "too_few_updates": (
        lines(train__updates_total=lambda step: step), {"algorithm": {"tau": 0.01}}, "11 updates", "",
        lines(train__updates_total=lambda step: 100 * step), {"algorithm": {"tau": 0.01}},
    ),
    "return_without_success": (
        lines(rollout__return_mean=lambda step: min(2.0, 1 + 0.2 * step), **FLAT), {"env": {"success_bonus": -5.0}}, "from 1.2",
        "env.success_bonus=5",
        lines(rollout__return_mean=lambda step: 1 + step % 2, **FLAT), {},
    ),
    "return_falls": (
        lines(rollout__return_mean=falls(-55, -98), **MOVES), {"env": {"success_return": None, "reward_scale": -0.1}}, "from -58.91",
        "env.reward_scale=0.1",
        lines(rollout__return_mean=falls(-55, -40), **MOVES), {},
    ),
    "overfitted": (
        [*lines("sft", sft__loss=falls(2, 0.1)), *({"step": n, "phase": "sft", "eval/loss": x} for n, x in enumerate((2, 1, 1.5, 2.5)))],
        {"train": {"train_policy": {}, "optm_lr": 1e-4, "epoch": 6}}, "from 1 to 2.5", "train.epoch=3",
        [*lines("sft", sft__loss=falls(2, 0.1)), *({"step": n, "phase": "sft", "eval/loss": x} for n, x in enumerate((2, 1, 0.9, 0.91)))],
        {"train": {"train_policy": {}}},
    ),
    "imitation_ceiling": (
        [*lines("sft", sft__loss=falls(2, 1), sft__demonstrator_success_rate=0.4), *evaluations(38, phase="sft")], {},
        "38.0% (38/100), its demonstrator in 40.0%", "trainer.max_steps=60",
        [*lines("sft", sft__loss=falls(2, 1), sft__demonstrator_success_rate=0.95), *evaluations(93, phase="sft")], {},
    ),
    "explores_too_little": (  # 12 sqrt(2 * 0.025) = 2.68 std; two thirds of the gap from 14 to 95 % are at 68 %
        [*CLONED, *lines(rollout__success_rate=falls(0.125, 0.5), train__approx_kl=0.025, train__entropy=1.5, **PLAYED)], {},
        "14.1% (18/128), greedy ones in 10.0% (10/100), with an entropy of 1.50 nat", "rollout.temperature=1.6",
        [*CLONED, *lines(rollout__success_rate=falls(0.125, 0.8), train__approx_kl=0.025, train__entropy=1.5, **PLAYED)], {},
    ),
}  # fmt: skip


OTHER_KEYS = {
    "algorithm.actor.scale",
    "algorithm.learning_rate",
    "env.success_bonus",
    "env.reward_scale",
    "env.success_return",
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_names_its_fault_and_a_key_that_exists_and_not_a_healthy_run_or_what_was_not_measured(name):
    faulty, settings, words, override, healthy, healthy_settings = CASES[name]
    record, rule = record_of(faulty, settings), BY_NAME[name]
    finding = rule(record)
    assert words in finding.text and override in finding.set
    known = field_types(RecipeConfig()) if isinstance(record, RecipeRecord) else {*field_types(), *OTHER_KEYS}
    assert all("=" in word and word.partition("=")[0] in known for word in finding.set.split()), finding.set
    assert rule(record_of(healthy, healthy_settings)) is None
    with pytest.raises(NotMeasured):
        rule(record_of([], {}))


def test_one_bad_step_is_not_a_finding_because_windows_are_thirds():
    spike = lines(train__approx_kl=lambda step: 0.9 if step == STEPS - 2 else 0.01)
    assert BY_NAME["steps_too_large"](record_of(spike, SEVERAL)) is None
    series = MetricSeries(list(range(12)), [float(value) for value in range(12)])
    assert series.early == [0, 1, 2, 3] and series.late == [8, 9, 10, 11] and series.late_steps == (8, 11)


def test_a_warm_up_does_not_count():
    """Updates of the critic alone, and rollouts of random actions."""
    still = lines(train__approx_kl=0.5, train__entropy=1.0)
    with pytest.raises(NotMeasured):
        BY_NAME["steps_too_large"](record_of(still, SEVERAL | {"algorithm": {"critic_warmup_steps": 8}}))
    begun = record_of(evaluations(80, 5), SEVERAL | {"algorithm": {"critic_warmup_steps": 8}})
    assert begun.outcome.steps == (0, 10), "an evaluation before RL counts all the same"
    played = {
        "rollout__env_steps_total": lambda step: 100 * (step + 1),
        "rollout__success_rate": lambda step: float(step >= 4),
        **PLAYED,
    }
    rollouts = record_of(lines(**played), {"algorithm": {"learning_starts": 400}}).rollout_ends(4)
    assert [(step, success.successes) for step, success in rollouts] == [(4, 128), (10, 128)]


RECIPE = {"train": {"train_policy": {"type": "grpo", "reward_function": ["gsm8k"]}, "optm_lr": 1e-6}}
BATCHES = random.Random(0)
HEALTHY = {  # lines and settings of runs in which nothing is wrong; what a batch or a rollout shows varies by chance
    "recipe on policy": (
        lines(train__approx_kl=0.0, train__clip_fraction=0.0, rollout__reward_mean=falls(0.2, 0.5), train__entropy=falls(0.5, 0.3)), RECIPE,
    ),
    "recipe that learns its task": (
        lines(rollout__reward_mean=lambda step: min(1.0, 0.2 + 0.1 * step), train__entropy=falls(0.5, 0.005),
              rollout__zero_variance_group_fraction=falls(0.1, 0.95)), RECIPE,
    ),
    "recipe that knows its task": (
        lines(rollout__reward_mean=1.0, rollout__zero_variance_group_fraction=1.0, train__entropy=falls(0.01, 0.005)), RECIPE,
    ),
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
    "RL whose return rises before its first success": (
        lines(rollout__success_rate=0.0, rollout__episode_len=50.0, rollout__return_mean=falls(0, 1), **PLAYED), {},
    ),
    "cloning that continues": (
        lines("sft", sft__loss=0.2, sft__grad_norm=0.5, sft__learning_rate=1e-4), {"init_from": "outputs/clone"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_another_kind_is_not_accused(name):
    diagnosis = diagnose(record_of(*HEALTHY[name]))
    assert [str(finding) for finding in diagnosis.findings] == []


def said(run: list[dict], settings: dict) -> list[str]:
    return [finding.rule for finding in diagnose(record_of(run, settings)).findings]


def test_control_the_same_kinds_with_a_fault_are():
    """Recipes and token policies that do not learn."""
    nothing = {"rollout__reward_mean": 0.0, "rollout__reward_std": 0.0, "rollout__truncated_fraction": 0.0}
    assert said(lines(**nothing), RECIPE) == ["constant_return"]
    two = {"train": {"train_policy": {"type": "grpo", "mu_iterations": 2}, "optm_lr": 1e-9}}
    still = lines(rollout__reward_mean=0.1, train__approx_kl=0.0, train__learning_rate=1e-9)
    assert said(still, two) == ["steps_too_small"]
    assert said(lines(train__approx_kl=0.2), RECIPE) == ["steps_too_large"], "without logging.report_entropy"


@pytest.mark.parametrize(
    ("changed", "settings", "key"),
    [
        ({}, {"learning_rate": 1e-9}, "trainer.learning_rate=0.001"),
        ({}, {"learning_rate": 0.0}, "trainer.learning_rate=1e-05"),
        ({}, {"adam_eps": 10.0}, "trainer.adam_eps=1e-8"),
        ({}, {"weight_decay": 500.0}, "trainer.weight_decay=0"),
        ({"train__learning_rate": lambda step: 1e-9 * (step + 1)}, {}, "trainer.warmup_steps=0"),
        ({"train__grad_norm": 0.0}, {}, ""),  # not the learning rate
    ],
)  # fmt: skip
def test_the_key_is_that_of_the_term_that_stops_adamw(changed, settings, key):
    trainer = SEVERAL["trainer"] | settings
    metrics = {
        "train__learning_rate": trainer["learning_rate"],
        "train__grad_norm": 1.0,
        "train__approx_kl": 1e-4,
    } | changed
    (finding,) = diagnose(record_of(lines(**metrics, **FLAT), SEVERAL | {"trainer": trainer})).findings
    assert finding.set == key


@pytest.mark.parametrize(
    ("changed", "settings", "measured"),
    [
        ({}, {}, True),
        ({"rollout__success_rate": falls(0.25, 0.5)}, {}, False),  # 25 % sampled, 10 % greedy
        ({"train__entropy": 2.1}, {}, False),
        ({"train__approx_kl": 0.02}, {}, False),  # 2.4 std
        ({}, {"rollout": {"temperature": 1.6}}, None),
        ({}, {"evaluation": {"greedy": False}}, None),
    ],
)  # fmt: skip
def test_exploration_is_blamed_only_with_all_of_its_signs(changed, settings, measured):
    metrics = {"rollout__success_rate": falls(0.125, 0.4), "train__approx_kl": 0.025, "train__entropy": 1.5} | changed
    run, rule = lines(**metrics, **PLAYED), "explores_too_little"
    diagnosis = diagnose(record_of([*CLONED, *run], settings))
    assert diagnosis.outcome.verdict == "rose" and diagnosis.outcome.is_good
    assert [finding.rule for finding in diagnosis.findings] == [rule] * (measured is True)
    assert (rule in diagnosis.passed) == (measured is False)
    with pytest.raises(NotMeasured):  # not cloned
        BY_NAME[rule](record_of([*evaluations(10), *run]))


def test_a_reward_that_is_success_itself_is_not_accused():
    """Sampled success, and so the return, rises by 4 points; greedy success does not."""
    rates = {"rollout__success_rate": lambda step: 0.60 + 0.04 * min(1.0, step / 4), "rollout__num_episodes": 640}
    run = [*lines(**rates), *evaluations(150, 152, episodes=200)]
    sparse = [
        line | {"rollout/return_mean": 10 * line["rollout/success_rate"]} if "rollout/success_rate" in line else line
        for line in run
    ]
    assert said(sparse, {}) == []
    turned = [{"step": n, "phase": "rl", "rollout/success_rate": max(0.0, 0.6 - 0.1 * n), "rollout/return_mean": min(0.0, -0.6 + 0.1 * n),
               "rollout/num_episodes": 64} for n in range(12)]  # fmt: skip
    assert said(turned, {}) == ["return_without_success"], "minus success is not success"
    other = [line | {"rollout/return_mean": min(2.0, 1 + 0.2 * line["step"]), "rollout/success_rate": 0.6} if "rollout/success_rate" in line else line
             for line in run]  # fmt: skip
    assert said(other, {}) == ["return_without_success"], "control: the return rises with something else"


def test_an_evaluation_before_and_after_on_the_same_episodes_is_compared_in_pairs():
    gain = {"total": {"successes_a": 150, "successes_b": 130, "episodes": 200, "interval": [-0.16, -0.04]}}
    pair = evaluations(150, 130, episodes=200)
    alone, paired = record_of(pair).outcome, record_of(pair, gain=gain).outcome
    assert (alone.verdict, paired.verdict) == ("did_not_rise", "fell") and "-16.0 to -4.0" in paired.text
    other = record_of(evaluations(150, 131, episodes=200), gain=gain).outcome
    assert "-16.0 to -4.0" not in other.text, "the pairs are those of other evaluations"


def test_an_evaluation_against_another_model_outranks_the_loss_of_preferences():
    """The loss falls from 0.69 to 0.1 while correct answers fall by 18.7 points."""
    run = lines(train__loss=falls(0.69, 0.1), train__preference_accuracy=0.9)
    recipe = {"train": {"train_policy": {"type": "dpo"}}}
    assert record_of(run, recipe).outcome.is_good
    total = {"successes_a": 93, "successes_b": 65, "episodes": 150, "interval": [-0.28, -0.09]}
    worse = record_of(run, recipe, gain={"total": total, "unit": "questions", "a": "outputs/sft/eval/test"}).outcome
    assert (
        worse.verdict == "fell"
        and not worse.is_good
        and "62.0% (93/150)" in worse.text
        and "-18.7 points" in worse.text
    )
    open_ = record_of(
        run, recipe, gain={"total": total | {"interval": [-0.3, 0.2]}, "unit": "questions", "a": "a"}
    ).outcome
    assert open_.verdict == "inconclusive", "nor does the loss then speak for it"


def test_the_interval_of_a_change_holds_the_true_one_with_and_without_a_trend():
    """Of 2000 series of 16 or 40 iterations each, at least 93 % of the intervals hold the true change; a t interval of both ends does not."""
    generator = np.random.default_rng(0)
    for count, slope in ((16, 0.0), (40, 0.0), (40, 2.0)):
        window = max(3, count // 4)
        true = slope * (count - window)
        held = 0
        for _ in range(2000):
            values = (slope * np.arange(count) + generator.normal(size=count)).tolist()
            low, high, _ = change_interval(values, window)
            held += low <= true <= high
        assert held >= 0.93 * 2000, (count, slope, held)
    rising = (50 * np.arange(16) + generator.normal(size=16)).tolist()
    low, high, deviation = change_interval(rising, 4)
    assert low > 500 and high - low < 10 and deviation < 5, "a trend is no noise"


@pytest.mark.parametrize(
    ("counts", "verdict", "words"),
    [
        (((0, 50), (12, 50)), "rose", "from 0.0% (0/50) at step 0 to 24.0% (12/50) at step 10"),
        (((0, 40), (0, 40)), "did_not_rise", "a rise by 10 points is excluded"),
        (((0, 20), (1, 20)), "inconclusive", "To decide, set evaluation.num_episodes=200"),
        (((45, 50), (10, 50)), "fell", "by -70.0 points"),
        (((50, 50), (50, 50)), "did_not_rise", "nothing was left to learn"),
        (((0, 50), (40, 50), (2, 50)), "inconclusive", "it was 80.0% (40/50) at step 10"),
    ],
)
def test_success_is_compared_by_its_interval(counts, verdict, words):
    found = [(10 * place, Success(*each)) for place, each in enumerate(counts)]
    outcome = outcome_of_counts(found, "of the evaluations", "evaluation.num_episodes=200")
    assert outcome.verdict == verdict and words in outcome.text


def test_of_runs_that_stay_where_they_are_one_in_fifty_is_said_to_have_changed():
    generator, changed, naive = np.random.default_rng(2), 0, 0
    for rate in (0.1, 0.5, 0.8):
        for first, last in generator.binomial(100, rate, (400, 2)).tolist():
            outcome = outcome_of_counts([(0, Success(first, 100)), (9, Success(last, 100))], "", "")
            changed += outcome.verdict in ("rose", "fell")
            low, high = difference_interval((last, first), (100, 100))
            naive += low > 0 or high < 0
    assert changed <= 0.02 * 1200 < naive


def test_an_unchanged_return_is_seldom_said_to_have_changed_and_a_doubled_one_is():
    generator = np.random.default_rng(1)
    changed = [
        outcome_of_values("return", range(24), generator.normal(10, 1, 24).tolist(), "").verdict in ("rose", "fell")
        for _ in range(1000)
    ]
    assert sum(changed) <= 50
    doubled = outcome_of_values("return", range(24), (np.linspace(10, 20, 24) + generator.normal(size=24)).tolist(), "")
    assert doubled.verdict == "rose" and doubled.is_good
    loss = outcome_of_values("loss", range(24), np.linspace(2, 1, 24).tolist(), "")
    assert loss.verdict == "fell" and loss.is_good and loss.made_worse(None) == []
    assert str(loss).startswith("outcome: the loss certainly fell: from 1.891")


def test_rollouts_tell_what_few_evaluation_episodes_cannot_and_returns_what_success_cannot():
    played = lines(rollout__success_rate=falls(0.0, 0.6), **PLAYED)
    told = record_of([*evaluations(0, 3, episodes=10), *played]).outcome
    assert told.verdict == "rose" and "of the rollouts" in told.text
    alone = record_of(evaluations(0, 3, episodes=10)).outcome
    assert alone.verdict == "inconclusive" and "evaluation.num_episodes=200" in alone.text
    played = lines(rollout__success_rate=0.0, rollout__return_mean=falls(1, 2), **PLAYED)
    assert record_of(played, {"env": {"success_return": None}}).outcome.measure == "return"
    assert record_of(played, {"env": {"success_return": -300}}).outcome.verdict == "did_not_rise"
    assert record_of(played).outcome.measure == "success"


def test_no_rule_blames_a_run_that_mastered_its_task():
    """Each fault of the rules, with a success that rose to 1: only rules about other things speak."""
    mastered = lines(rollout__success_rate=lambda step: min(1.0, step / 4), **PLAYED)
    for name, (faulty, settings, *_) in CASES.items():
        run = [one | two | {"phase": "rl"} for one, two in zip(faulty, mastered, strict=False)]
        if BY_NAME[name] in CAUSES:
            assert said(run, settings) == [], name


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
    for run in ([good, bad], [good, bad, middle], [good, middle, bad], [Success(0, 100)] * 5):
        assert not has_collapsed(run)


def test_the_first_cause_ends_the_search():
    faulty = [
        *lines(train__approx_kl=0.2, train__entropy=falls(0.9, -4.0), rollout__return_mean=BUMPS),
        *evaluations(80, 5),
    ]
    diagnosis = diagnose(record_of(faulty, SEVERAL))
    fell = "outcome: the success certainly fell: from 80.0% (80/100) at step 0 to 5.0% (5/100) at step 10"
    assert str(diagnosis).startswith(fell)
    assert [finding.rule for finding in diagnosis.findings] == ["steps_too_large"], "entropy that fell is a consequence"
    assert diagnosis.passed == [], "the KL penalty was not measured"


@pytest.fixture
def folder(tmp_path):
    """A run folder whose ratios are clipped."""
    path = tmp_path / "run"
    path.mkdir()
    found = lines(train__approx_kl=0.2, train__entropy=0.9)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    (path / "config.yaml").write_text(yaml.safe_dump(SEVERAL))
    return path


def test_the_command_prints_sentences_or_json(folder, capsys):
    assert main(["why", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("outcome: inconclusive whether the return changed")
    assert second.startswith("steps_too_large: ") and second.endswith("Set trainer.learning_rate=0.0003")
    assert main(["why", "--json", str(folder)]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["findings"][0]["rule"] == "steps_too_large" and found["findings"][0]["steps"] == [8, 11]
    assert next(iter(found)) == "outcome" and found["outcome"]["verdict"] == "inconclusive"


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["why", str(tmp_path / "nowhere")]) == 2 and "There is no folder" in capsys.readouterr().err
    assert main(["why"]) == 2 and "rlinf why outputs/quickstart/latest" in capsys.readouterr().err


def test_the_page_lists_the_rules_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", page.partition("## When a run")[0], flags=re.M)
    assert rows == [(rule.__name__, rule.__doc__) for rule in BY_NAME.values()]


def test_the_rate_is_that_of_a_run_that_has_gone_back():
    played = lines(train__learning_rate=lambda step: 1e-3 if step < 6 else 2.5e-4)
    assert rate_of(record_of([*played, *evaluations(80)], SEVERAL)) == ("trainer.learning_rate", 2.5e-4)
    cloning = lines(phase="sft", train__learning_rate=0.1)
    assert rate_of(record_of([*cloning, *evaluations(80)], SEVERAL)) == ("trainer.learning_rate", 1e-3)
    actor = SEVERAL | {"algorithm": {"learning_rate": 5e-3}}
    assert rate_of(record_of(played, actor)) == ("algorithm.learning_rate", 5e-3)


def held_out() -> list[dict]:
    text = (Path(__file__).parents[1] / "fixtures" / "why_heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_outcomes_of_runs_that_somebody_else_made_are_right_and_no_wrong_key_is_named():
    named = 0
    for run in held_out():
        diagnosis = diagnose(record_of(run["metrics"], run["config"]))
        assert diagnosis.outcome.verdict in run["outcome"], run["name"]
        keys = {word.partition("=")[0] for finding in diagnosis.findings for word in finding.set.split()}
        assert keys <= set(run["fault_key"]), run["name"]
        assert run["kind"] == "fault" or not diagnosis.findings, run["name"]
        named += bool(diagnosis.findings)
    assert named == 7, "the others leave no trace in what has a physical threshold"
    (run,) = (run for run in held_out() if run["name"] == "answers_lr_huge")
    outcome = record_of(run["metrics"], run["config"]).outcome
    assert (outcome.verdict, outcome.measure) == ("fell", "reward")
    (line,) = outcome.made_worse("models/base")
    assert "41.8% (167/400)" in line and "models/base" in line


def test_returns_of_evaluations_are_compared_by_their_intervals():
    def evaluated(last: float) -> str:
        found = [{"step": step, "phase": "rl", "eval/return_mean": mean, "eval/return_low": mean - 3, "eval/return_high": mean + 3}
                 for step, mean in ((0, -60.0), (20, last))]  # fmt: skip
        return str(record_of(found, {"env": {"success_return": None}}).outcome)

    rose = "the return certainly rose: from -60 at step 0 to -50 at step 20 of the evaluations, by +10"
    assert f"{rose} (95 % {10 - math.hypot(3, 3):+.3g}" in evaluated(-50)
    assert "certainly fell" in evaluated(-70)
    assert "certainly did not rise" in evaluated(-59) and "a rise by 12 is excluded" in evaluated(-59)


def test_a_return_that_falls_in_evaluations_is_a_fact_unless_a_cause_is_larger():
    evaluated = [
        {"step": 6 * n, "phase": "rl", "eval/return_mean": mean, "eval/return_low": mean - 4, "eval/return_high": mean + 4}
        for n, mean in enumerate((-55.0, -80.0, -98.0))
    ]  # fmt: skip
    for kl, rules in ((0.01, ["return_falls"]), (0.7, ["steps_too_large"])):
        played = lines(train__approx_kl=kl, train__entropy=0.9)
        assert said([*evaluated, *played], {"env": {"success_return": None}}) == rules


def test_sac_with_a_few_updates_is_not_blamed_on_its_rate():
    few = lines(train__updates_total=lambda step: step, **FLAT)
    settings = {"algorithm": {"name": "sac", "learning_rate": 1e-3, "tau": 0.005}}
    assert said(few, settings) == ["too_few_updates"]
    assert record_of(few[:3], settings).outcome.verdict == "inconclusive", "too few steps"


def test_a_policy_that_begins_trained_may_have_all_the_return_there_is():
    flat, untrained = lines(rollout__return_mean=20.0), {"env": {"success_return": None}}
    rules = [finding.rule for finding in diagnose(record_of(flat, untrained)).findings]
    assert rules == ["constant_return"]
    assert diagnose(record_of(flat, untrained | {"init_from": "runs/a"})).findings == []
