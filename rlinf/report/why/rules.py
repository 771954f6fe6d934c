"""Rules of `rlinf why`, each with a threshold that follows from the measured quantity; docs/why.md lists them."""

import math
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from statistics import fmean, median

from rlinf.report.why.findings import Diagnosis, Finding, NotMeasured, Record, Rule, read_record
from rlinf.report.why.outcome import (
    FELL,
    MASTERED,
    MATTERS,
    ROSE,
    UNKNOWN,
    Outcome,
    outcome_of_counts,
    outcome_of_values,
)

LARGEST_KL = 0.1
"""KL per iteration, in nat, above which the clipped loss is not valid for the new policy; healthy runs stay below 0.05."""
LEAST_DISTANCE, LARGEST_RATE, LARGEST_DECAY = 1e-4, 0.02, 0.1
"""Minimum distance a weight must move over the run, and maximum AdamW step and fraction decayed per step.

Weights typically have a magnitude of a few hundredths.
"""

LOW_ENTROPY = 2.0
"""Entropy in nat per token or dimension, equal to 7 equally likely values, above which a policy tries enough actions."""


def explain(folder: str | os.PathLike) -> Diagnosis:
    """Return the outcome and the findings for the run in ``folder``; raise CheckpointError if it is not a run folder."""
    return diagnose(read_record(folder))


def diagnose(record: Record) -> Diagnosis:
    """Return the outcome and the findings from ``Record.own_rules``, ``ALWAYS`` and the first one from ``CAUSES`` (unless the outcome is good) and ``LAST``."""
    diagnosis = Diagnosis(record.outcome)
    for rule in (*record.own_rules, *ALWAYS, *(() if record.outcome.is_good else CAUSES), *LAST):
        try:
            finding = rule(record)
        except NotMeasured:
            continue
        if finding is None:
            diagnosis.passed.append(rule.__name__)
            continue
        diagnosis.findings.append(replace(finding, rule=rule.__name__))
        # Causes precede their consequences, so only report the first one.
        if rule in CAUSES:
            break
    return diagnosis


def imitation_ceiling(record: Record) -> Finding | None:
    """The BC policy is as good as its demonstrator, whose success rate is at most 90 %, and the run has no RL phase."""
    lines = record.lines_with("sft/demonstrator_success_rate")
    step, bc_success = record.evaluations("sft")[-1]
    demonstrator = lines[-1]["sft/demonstrator_success_rate"]
    if record.has_rl:
        raise NotMeasured
    if demonstrator > 0.9 or not bc_success.interval[0] <= demonstrator <= bc_success.interval[1]:
        return None
    text = f"The BC policy succeeds in {bc_success}, its demonstrator in {demonstrator:.1%}: imitation cannot exceed it, RL can"
    return Finding(text, "trainer.max_steps=60", (lines[0]["step"], step))


def constant_return(record: Record) -> Finding | None:
    """Every iteration has the same return, or every completion of a recipe has the same reward."""
    returns = record.series(record.return_name)
    if record.return_spread() > 1e-5 * max(map(abs, returns.values)):
        return None
    if record.setting("init_from") and record.outcome.measure == "return" and returns.values[0] > 0:
        raise NotMeasured  # a trained policy may already achieve the maximum return
    return Finding(record.constant_return_text(returns.values[0]), "", returns.all_steps)


def steps_too_small(record: Record) -> Finding | None:
    """AdamW moves no weight by more than 1e-4 over the entire run, or its epsilon exceeds the gradient norm."""
    name, (key, rate) = "sft" if record.trained_phase == "sft" else "train", rate_of(record)
    used, norms = record.series(f"{name}/learning_rate"), [line.get(f"{name}/grad_norm") for line in record.lines]
    eps = record.setting("trainer.adam_eps", 0.0)
    norm = max((value for value in norms if value is not None), default=math.inf)
    updates, mean = num_updates(record, used.steps), fmean(used.values)
    # AdamW's ratio of the first moment to the root of the second is at most about 1, and smaller for gradients below epsilon.
    distance = mean * updates * (1.0 if math.isinf(norm) else norm / (norm + eps) if norm else 0.0)
    if distance >= LEAST_DISTANCE and eps <= norm:
        return None
    text = f"AdamW moves a weight by at most {distance:.2g} in the entire run ({updates:.0f} steps at {mean:.2g}, gradient norm up to {norm:.2g})"
    change = f"{key}={min(1e-3, max(1e-5, rate * 0.1 / max(distance, 1e-9))):.1g}"
    if used.values[0] < used.values[-1] < 0.1 * record.setting(key, rate):
        change = f"{record.warmup_key}=0"
    elif norm == 0 or eps > norm:
        change = "trainer.adam_eps=1e-8" if norm else ""
    return Finding(text, change, used.late_steps)


def only_the_critic_learns(record: Record) -> Finding | None:
    """The critic's warm-up lasts for the entire run."""
    warmup, planned = record.setting("algorithm.critic_warmup_steps", 0), record.setting("trainer.max_steps", 0)
    if not record.has_rl:
        raise NotMeasured
    if not 0 < planned <= warmup:
        return None
    text = f"The first {warmup} iterations only train the critic, and the run has {planned}"
    return Finding(text, "algorithm.critic_warmup_steps=0", record.outcome.steps)


def kl_penalty_too_strong(record: Record) -> Finding | None:
    """The KL to the reference stays below 0.05 nat, and the KL penalty's weight prevents it from growing."""
    key = record.kl_key
    weight, kl = record.setting(key, 0), record.series("train/kl_to_reference")
    # With advantages of std 1, a policy can gain at most sqrt(2 KL) over the reference. Above this KL, the penalty exceeds the gain.
    allowed = 1 / (2 * weight**2) if weight else math.inf
    if allowed > 0.05 or median(kl.late) > 0.05:
        return None
    text = f"The policy stays within {median(kl.late):.2g} nat of the reference: {key}={weight:g} outweighs any gain in return above a KL of {allowed:.1g} nat"
    return Finding(text, f"{key}=0.01", kl.late_steps)


def steps_too_large(record: Record) -> Finding | None:
    """The KL of an iteration exceeds 0.1 nat, or a single AdamW step can move a weight by 0.02 or decay it by a tenth."""
    (key, rate), moved, steps = rate_of(record), 0.0, record.outcome.steps
    decay = record.setting("trainer.weight_decay", 0.0) * rate
    is_large = rate >= LARGEST_RATE or decay > LARGEST_DECAY  # depends only on the configuration
    with suppress(NotMeasured) if is_large else nullcontext():
        if record.trained_phase == "rl" and any("train/approx_kl" in line for line in record.lines):
            kl = record.series("train/approx_kl")
            moved, steps = median(kl.late), kl.late_steps
        elif not record.settings:
            raise NotMeasured
    if moved <= LARGEST_KL and not is_large:
        return None
    text = f"AdamW moves each weight by up to {rate:.2g} per step, and weights are a few hundredths"
    if moved > LARGEST_KL:
        text = f"The policy moves by {moved:.3g} nat per iteration; above {LARGEST_KL:g} its old samples do not describe it"
    change = f"{key}={min(rate / 2, max(rate / 100, rate * math.sqrt(0.02 / max(moved, LARGEST_KL)), 1e-6), 2e-3):.1g}"
    entropies = [line["train/entropy"] for line in record.lines if line.get("train/entropy") is not None]
    if decay > LARGEST_DECAY:
        change = "trainer.weight_decay=0"
        text = f"Weight decay removes {decay:.0%} of each weight per step, so whatever is learned is lost again"
    elif moved > LARGEST_KL and entropies and entropies[0] < -1:
        change = ""  # with a narrow action distribution, any weight change causes a large KL
    return Finding(text, change, steps)


def too_few_updates(record: Record) -> Finding | None:
    """An off-policy run has made fewer updates than the time constant of its target critics (1 / `algorithm.tau`)."""
    line = record.lines_with("train/updates_total")[-1]
    updates, needed = line["train/updates_total"], 1 / (record.setting("algorithm.tau") or 0.005)
    if updates >= needed:
        return None
    text = f"The run has made {updates:.0f} updates, but target critics need {needed:.0f} (1 / algorithm.tau) to follow: too early to learn anything"
    return Finding(text, "", (record.lines[0]["step"], line["step"]))


def return_without_success(record: Record) -> Finding | None:
    """The return of the rollouts certainly rises, though more slowly in the last third, but the success of the same episodes does not."""
    returns, change = record.series("rollout/return_mean"), return_change(record)
    lines = record.lines_with("rollout/return_mean", "rollout/success_rate")
    rates, values = ([line[name] for line in lines] for name in ("rollout/success_rate", "rollout/return_mean"))
    per_success = sum(r * v for r, v in zip(rates, values, strict=True)) / (sum(r * r for r in rates) or math.inf)
    ends = record.rollout_ends(4)
    success = outcome_of_counts(ends, "", "")
    if success.verdict in (ROSE, UNKNOWN) or ends[1][1].success_rate - ends[0][1].success_rate > MATTERS / 4:
        return None
    is_success = all(
        abs(v - per_success * r) < 1e-3 * max(map(abs, values)) for r, v in zip(rates, values, strict=True)
    )
    if is_success and per_success > 0:
        return None
    early, middle, late = median(returns.early), median(returns.middle), median(returns.late)
    # In a slow run, the return rises before the first success.
    is_slow = success.verdict != FELL and late - middle > (middle - early) / 2
    if change.verdict != ROSE or is_slow:
        return None
    bonus, needed = record.setting("env.success_bonus", 0.0), record.setting("env.success_return", -math.inf)
    reached = max(returns.values) / record.setting("env.reward_scale", 1.0)
    text = f"The return of the rollouts rises, {change.text}, but the success of the same episodes does not: the reward does not measure success, or the success criterion is wrong"
    fix = f"env.success_bonus={-bonus:g}" if bonus < 0 else ""
    if reached < needed and not ends[1][1].successes:
        fix = f"env.success_return={reached:.3g}"
    return Finding(text, fix, returns.all_steps)


def return_falls(record: Record) -> Finding | None:
    """The return certainly falls, although the policy moves by at most 0.1 nat per iteration, if that is measured."""
    change = record.outcome if record.outcome.measure == "return" else return_change(record)
    if change.verdict != FELL:  # `steps_too_large` comes earlier in CAUSES and has passed
        return None
    scale = record.setting("env.reward_scale", 1.0)
    text = f"The return falls, {change.text}: the updates lower the return, as with a wrong sign or a diverged critic"
    return Finding(text, f"env.reward_scale={-scale:g}" if scale < 0 else "", change.steps)


def explores_too_little(record: Record) -> Finding | None:
    """A BC policy of less than 2 nat samples about as many successes as its greedy actions have, and RL closes less than two thirds of the gap to 95 %, although it moves the policy far enough."""
    is_cloned = record.setting("init_from") or any(line["phase"] == "sft" for line in record.lines)
    (step, greedy), kl = record.evaluations("rl")[0], record.series("train/approx_kl")
    (start, sampled), (_, last) = record.rollout_ends(5)
    entropy = record.series("train/entropy").values[0]
    is_greedy = record.setting("evaluation.greedy", True) and step <= start
    if not is_cloned or not is_greedy or record.setting("rollout.temperature", 1.0) > 1:
        raise NotMeasured
    # An iteration gains at most sqrt(2 KL) std of the return. Success has a std of at most 1/2, so 2 std lead from 0 to 100 %; gains
    # stay below this bound, so require 2.5.
    reach = sum(math.sqrt(2 * max(value, 0.0)) for value in kl.values)
    is_similar = abs(sampled.success_rate - greedy.success_rate) <= MATTERS
    expected = (sampled.success_rate + 2 * MASTERED) / 3
    if not is_similar or entropy >= LOW_ENTROPY or reach < 2.5 or last.success_rate >= expected:
        return None
    text = f"Sampled actions first succeeded in {sampled}, greedy ones in {greedy}, with an entropy of {entropy:.2f} nat: the policy explores too little for RL, which reached {last}. Fewer cloning steps (sft.max_steps) also leave more entropy"
    return Finding(text, "rollout.temperature=1.6", (start, kl.steps[-1]))


def return_change(record: Record) -> Outcome:
    """Return how the return of the rollouts, or the reward of a recipe's completions, has changed."""
    returns = record.series(record.return_name)
    return outcome_of_values("return", returns.steps, returns.values, "")


def rate_of(record: Record) -> tuple[str, float]:
    """Return the key and value of the last phase's learning rate."""
    for key in record.rate_keys:
        rate = record.setting(key)
        if isinstance(rate, float | int):
            # A run that was rolled back uses only a fraction of the configured rate.
            phase = record.trained_phase
            used = [line.get("train/learning_rate") for line in record.lines if line.get("phase") == phase]
            return key, next(filter(None, reversed(used)), rate) if key == "trainer.learning_rate" else rate
    return "trainer.learning_rate", 1e-4


def num_updates(record: Record, steps: list[int]) -> float:
    """Return the number of optimiser steps over ``steps``; infinity if unknown."""
    counted = [line["train/updates_total"] for line in record.lines if line.get("train/updates_total") is not None]
    # Off-policy runs count their updates; cloning does not log every step.
    return counted[-1] if counted else (steps[-1] - steps[0] + 1) * record.updates_per_iteration()


ALWAYS: tuple[Rule, ...] = (imitation_ceiling,)
"""Rules that are checked regardless of the outcome, after ``Record.own_rules``."""
CAUSES: tuple[Rule, ...] = (
    kl_penalty_too_strong, steps_too_large, constant_return, steps_too_small, only_the_critic_learns, too_few_updates,
    return_without_success, return_falls,
)  # fmt: skip
"""Rules that explain a bad outcome, ordered so that causes precede their consequences."""
LAST: tuple[Rule, ...] = (explores_too_little,)
"""Rules that are checked whatever the outcome, unless a cause was found."""
