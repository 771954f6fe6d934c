"""The rules of `rlinf why`, each with a threshold that follows from what it measures. docs/why.md lists them."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from statistics import fmean, median

from rlinf.report.why.findings import Diagnosis, Finding, NotMeasured, Record, Rule, read_record
from rlinf.report.why.outcome import FELL, MATTERS, ROSE, UNKNOWN, Outcome, outcome_of_counts, outcome_of_values

STILL_KL = 1e-8
"""KL in nat that float32 cannot tell from 0: the rounding of ``ratio - 1 - log ratio``."""
LARGEST_KL = 0.1
"""KL of an iteration in nat above which the clipped loss says nothing about the new policy; healthy runs stay below 0.05."""
LEAST_WAY, LARGEST_RATE, LARGEST_DECAY = 1e-4, 0.02, 0.1
"""Way of a weight in the whole run, in one step of AdamW, and the fraction that decays in a step; weights are some hundredths."""


def explain(folder: str | os.PathLike) -> Diagnosis:
    """Return the outcome of the run in ``folder`` and the findings; raise CheckpointError if it is not the folder of a run."""
    return diagnose(read_record(folder))


def diagnose(record: Record) -> Diagnosis:
    """Tell the outcome, then ask the rules: ``CAUSES`` in their order until one speaks, unless the outcome is good."""
    diagnosis = Diagnosis(record.outcome)
    for rule in (*ALWAYS, *(() if record.outcome.is_good else CAUSES)):
        try:
            finding = rule(record)
        except NotMeasured:
            continue
        if finding is None:
            diagnosis.passed.append(rule.__name__)
            continue
        diagnosis.findings.append(replace(finding, rule=rule.__name__))
        if rule in CAUSES:
            break
    return diagnosis


def overfitted(record: Record) -> Finding | None:
    """The held-out loss of a recipe rises by 5 %, and by 5 % of its fall, while the training loss falls."""
    held_out, loss = record.lines_with("eval/loss"), record.series("sft/loss")
    if len(held_out) < 4:
        raise NotMeasured
    values = [line["eval/loss"] for line in held_out]
    least = min(range(len(values)), key=values.__getitem__)
    # By a twentieth, and in each of the last two validations: not the noise of one of them.
    rises = min(values[-2:]) - values[least]
    is_slight = rises < 0.05 * max(values[least], values[0] - values[least])
    if is_slight or least >= len(values) - 2 or median(loss.late) >= median(loss.early):
        return None
    text = f"The loss on held-out rows rose from {values[least]:.3g} to {values[-1]:.3g} while the training loss fell: the model overfits"
    fewer = f"train.epoch={max(1, record.setting('train.epoch', 1) // 2)}"
    return Finding(text, fewer, (held_out[least]["step"], held_out[-1]["step"]))


def imitation_ceiling(record: Record) -> Finding | None:
    """A clone is as good as its demonstrator, which succeeds in 90 % or less, and no RL follows."""
    lines = record.lines_with("sft/demonstrator_success_rate")
    step, clone = record.evaluations("sft")[-1]
    demonstrator = lines[-1]["sft/demonstrator_success_rate"]
    if record.has_rl:
        raise NotMeasured
    if demonstrator > 0.9 or not clone.interval[0] <= demonstrator <= clone.interval[1]:
        return None
    text = (
        f"The clone succeeds in {clone}, and its demonstrator in {demonstrator:.1%}: imitation cannot exceed it, RL can"
    )
    return Finding(text, "trainer.max_steps=60", (lines[0]["step"], step))


def constant_return(record: Record) -> Finding | None:
    """Every iteration has the same return; of a recipe, every answer has the same reward."""
    returns = record.series(record.return_name)
    spread = max(returns.values) - min(returns.values)
    if record.is_recipe:
        spread = max(record.series("rollout/reward_std").values)
    if spread > 1e-5 * max(map(abs, returns.values)):
        return None
    if record.setting("init_from") and record.outcome.measure == "return" and returns.values[0] > 0:
        raise NotMeasured  # a trained policy may have all the return that there is
    text = f"Every iteration has the return {returns.values[0]:.4g}, whatever the actions were: there is nothing to learn from"
    if record.is_recipe:
        if median(record.series("rollout/truncated_fraction").late) >= 0.3:
            raise NotMeasured  # answers that are cut before their end say nothing of their rewards
        text = f"Every answer has the reward {returns.values[0]:g}: its function or column does not fit, or no answer is right"
    return Finding(text, "", returns.all_steps)


def zero_variance_groups(record: Record) -> Finding | None:
    """From the start, all returns are equal in half of the groups, not counting those in which all attempts succeed."""
    fraction = record.series("rollout/zero_variance_group_fraction")
    # Groups in which all attempts succeed teach nothing either. They are at most as frequent as success.
    has_counts = record.has_success and not record.is_recipe
    first, last = (one.success_rate for _, one in record.rollout_ends(3)) if has_counts else (0.0, 0.0)
    # Groups that became equal later are a consequence, not a cause.
    if min(median(fraction.early) - first, median(fraction.late) - last) < 0.5:
        return None
    text = f"In {median(fraction.late):.0%} of the groups all returns are equal, so their advantages are 0: choose tasks in which some attempts succeed"
    key = "rollout.n_generation" if record.is_recipe else "rollout.group_size"
    return Finding(text, f"{key}=8" if record.setting(key, 8) < 4 else "", fraction.late_steps)


def steps_too_small(record: Record) -> Finding | None:
    """AdamW moves no weight by more than 1e-4 in the whole run, or its epsilon exceeds the norm of the gradient."""
    name, (key, rate) = "sft" if record.trained_phase == "sft" else "train", rate_of(record)
    used, norms = record.series(f"{name}/learning_rate"), [line.get(f"{name}/grad_norm") for line in record.lines]
    eps = record.setting("trainer.adam_eps", 0.0)
    norm = max((value for value in norms if value is not None), default=math.inf)
    updates, mean = num_updates(record, used.steps)[0], fmean(used.values)
    # The first moment over the root of the second is at most about 1, and less for gradients below epsilon.
    way = mean * updates * (1.0 if math.isinf(norm) else norm / (norm + eps) if norm else 0.0)
    if way >= LEAST_WAY and eps <= norm:
        return None
    text = f"AdamW moves a weight by at most {way:.2g} in the whole run ({updates:.0f} steps at {mean:.2g}, gradient norm up to {norm:.2g})"
    change = f"{key}={min(1e-3, max(1e-5, rate * 0.1 / max(way, 1e-9))):.1g}"
    if used.values[0] < used.values[-1] < 0.1 * record.setting(key, rate):
        change = "train.optm_warmup_steps=0" if record.is_recipe else "trainer.warmup_steps=0"
    elif norm == 0 or eps > norm:
        change = "trainer.adam_eps=1e-8" if norm else ""
    return Finding(text, change, used.late_steps)


def policy_never_moves(record: Record) -> Finding | None:
    """The KL of several updates is 0 but for rounding in every iteration, or the whole run is warm-up of the critic."""
    warmup, planned = record.setting("algorithm.critic_warmup_steps", 0), record.setting("trainer.max_steps", 0)
    if 0 < planned <= warmup and record.has_rl:
        text = f"The first {warmup} iterations train the critic alone, and the run has {planned}"
        return Finding(text, "algorithm.critic_warmup_steps=0", record.outcome.steps)
    kl = record.series("train/approx_kl")
    largest = max(map(abs, kl.values))
    if largest > STILL_KL or num_updates(record, kl.steps)[1] <= 1:  # of a single update, the KL is measured before it
        return None
    text = f"The KL of old to new policy is at most {largest:.1g} nat in every iteration, which is 0 but for rounding"
    return Finding(text, "", kl.all_steps)


def kl_penalty_too_strong(record: Record) -> Finding | None:
    """The KL to the reference stays below 0.05 nat, and the weight of its penalty allows no more."""
    key = "train.train_policy.kl_beta" if record.is_recipe else "algorithm.kl_coef"
    weight, kl = record.setting(key, 0), record.series("train/kl_to_reference")
    # Advantages of deviation 1 gain at most sqrt(2 KL) over the reference: beyond this KL, the penalty is the larger of the two.
    allowed = 1 / (2 * weight**2) if weight else math.inf
    if allowed > 0.05 or median(kl.late) > 0.05:
        return None
    text = f"The policy stays within {median(kl.late):.2g} nat of the reference: {key}={weight:g} outweighs any gain in return above a KL of {allowed:.1g} nat"
    return Finding(text, f"{key}=0.01", kl.late_steps)


def steps_too_large(record: Record) -> Finding | None:
    """The KL of an iteration is above 0.1 nat, or a step of AdamW moves a weight by 0.02 or decays it by a tenth."""
    (key, rate), moved, steps = rate_of(record), 0.0, record.outcome.steps
    decay = record.setting("trainer.weight_decay", 0.0) * rate
    is_large = rate >= LARGEST_RATE or decay > LARGEST_DECAY  # known, however few iterations have told their KL
    with suppress(NotMeasured) if is_large else nullcontext():
        if record.trained_phase == "rl" and any("train/approx_kl" in line for line in record.lines):
            kl = record.series("train/approx_kl")
            moved, steps = median(kl.late), kl.late_steps
        elif not record.settings:
            raise NotMeasured
    if moved <= LARGEST_KL and not is_large:
        return None
    text = f"AdamW moves each weight by up to {rate:.2g} in a step, and weights are some hundredths"
    if moved > LARGEST_KL:
        text = f"The policy moves by {moved:.3g} nat in an iteration; above {LARGEST_KL:g} its old samples say nothing about it"
    change = f"{key}={min(rate / 2, max(rate / 100, rate * math.sqrt(0.02 / max(moved, LARGEST_KL)), 1e-6), 2e-3):.1g}"
    if decay > LARGEST_DECAY:
        change = "trainer.weight_decay=0"
        text = f"Weight decay takes {decay:.0%} of each weight in every step, so that nothing learnt stays"
    elif moved > LARGEST_KL and not record.has_tokens and record.series("train/entropy").values[0] < -1:
        change = ""  # of narrow actions, any step of the weights is a large one
    return Finding(text, change, steps)


def entropy_collapse(record: Record) -> Finding | None:
    """The entropy of Gaussian actions is below -2.5 nat or fell by 3, or tokens have almost none, and the return does not rise."""
    entropy = record.series("train/entropy")
    before, after = median(entropy.early), median(entropy.late)
    if len(set(entropy.values)) == 1:
        raise NotMeasured  # the policy does not learn its noise
    # Of Gaussian actions, -2.5 nat is a std of 1 % of the range, and 3 nat less a twentieth of it. Of tokens, the entropy ends at 0.
    tokens_gone = after < 0.01 or (after < 0.05 and after < before / 10)
    is_gone = tokens_gone if record.has_tokens else after < -2.5 or before - after > 3
    if not is_gone or return_change(record).verdict == ROSE:
        return None
    text = f"The entropy is {after:.3g} nat, after {before:.3g} at the start: the policy no longer explores"
    key = "model.init_config.initial_log_std"
    return Finding(text, f"{key}=-0.5" if record.setting(key, 0) < -2 else "", entropy.late_steps)


def too_few_updates(record: Record) -> Finding | None:
    """An off-policy run has made fewer updates than its target critics take to follow the critics (1 / `algorithm.tau`)."""
    line = record.lines_with("train/updates_total")[-1]
    updates, needed = line["train/updates_total"], 1 / (record.setting("algorithm.tau") or 0.005)
    if updates >= needed:
        return None
    text = f"The run has made {updates:.0f} updates, and target critics follow within {needed:.0f} (1 / algorithm.tau): nothing can be learnt yet"
    return Finding(text, "", (record.lines[0]["step"], line["step"]))


def q_overestimation(record: Record) -> Finding | None:
    """The critics expect more than the episodes return, by half of the largest return."""
    expected, reached = record.series("train/q_initial"), record.series("train/return_initial")
    late, real = median(expected.late), median(reached.late)
    # Half of the largest return that was ever reached: critics are off by a tenth or two in healthy runs.
    if late - real <= 0.5 * max(map(abs, reached.values)):
        return None
    text = f"The critics expect {late:.3g} of an episode, which then returns {real:.3g}: the policy follows the errors of its critics"
    return Finding(text, "", expected.late_steps)


def stale_rollouts(record: Record) -> Finding | None:
    """Importance ratios of rollouts played ahead are off by a tenth on average, or reach ten times `algorithm.tis_cap`."""
    lag = record.series("rollout/staleness_iterations")
    largest, cap = record.series("rollout/importance_ratio_max"), record.setting("algorithm.tis_cap", math.inf)
    if not median(lag.late):
        raise NotMeasured
    mean = median(record.series("rollout/importance_ratio_mean").late)
    # The mean of true ratios is 1. Where it is off by a tenth, few samples carry the estimate.
    if abs(mean - 1) <= 0.1 and median(largest.late) <= 10 * cap:
        return None
    old = f"Rollouts are {median(lag.late):.0f} iterations old"
    text = f"{old}: importance ratios reach {median(largest.late):.3g}, and are {mean:.3g} on average instead of 1"
    return Finding(text, f"cluster.max_staleness={max(0, round(median(lag.late)) - 1)}", lag.late_steps)


def return_without_success(record: Record) -> Finding | None:
    """The return of the rollouts certainly rises, in the last third less than before, and the success of the same episodes does not."""
    returns, change = record.series("rollout/return_mean"), return_change(record)
    played = record.lines_with("rollout/return_mean", "rollout/success_rate")
    rates, values = ([line[name] for line in played] for name in ("rollout/success_rate", "rollout/return_mean"))
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
    # The return of a slow run rises before its first success.
    is_slow = success.verdict != FELL and late - middle > (middle - early) / 2
    if change.verdict != ROSE or is_slow:
        return None
    bonus, needed = record.setting("env.success_bonus", 0.0), record.setting("env.success_return", -math.inf)
    reached = max(returns.values) / record.setting("env.reward_scale", 1.0)
    text = f"The return of the rollouts rises, {change.text}, and the success of the same episodes does not: the reward does not measure success, or the success criterion is wrong"
    fix = f"env.success_bonus={-bonus:g}" if bonus < 0 else ""
    if reached < needed and not ends[1][1].successes:
        fix = f"env.success_return={reached:.3g}"
    return Finding(text, fix, returns.all_steps)


def return_falls(record: Record) -> Finding | None:
    """The return certainly falls, although the policy moves by small steps: by at most 0.1 nat an iteration, where that is measured."""
    change = record.outcome if record.outcome.measure == "return" else return_change(record)
    # `steps_too_large` has passed.
    if change.verdict != FELL:
        return None
    scale = record.setting("env.reward_scale", 1.0)
    text = f"The return falls, {change.text}: the updates lower what they should raise, as with a turned sign or a diverged critic"
    return Finding(text, f"env.reward_scale={-scale:g}" if scale < 0 else "", change.steps)


def return_change(record: Record) -> Outcome:
    """Return the change of the return of the rollouts, or of the reward of a recipe's answers."""
    returns = record.series(record.return_name)
    return outcome_of_values("return", returns.steps, returns.values, "")


def rate_of(record: Record) -> tuple[str, float]:
    """Return key and value of the learning rate of the last phase; a run that was rolled back uses a fraction of the configured rate."""
    phase = record.trained_phase
    keys = ["train.optm_lr"] if record.is_recipe else ["sft.learning_rate"] if phase == "sft" else []
    # A head on a frozen policy has a rate of its own.
    for key in [*keys, "algorithm.learning_rate", "trainer.learning_rate"]:
        rate = record.setting(key)
        if isinstance(rate, float | int):
            used = [line.get("train/learning_rate") for line in record.lines if line.get("phase") == phase]
            return key, next(filter(None, reversed(used)), rate) if key == "trainer.learning_rate" else rate
    return "trainer.learning_rate", 1e-4


def num_updates(record: Record, steps: list[int]) -> tuple[float, float]:
    """Return the optimiser steps over ``steps``, and of an iteration; infinity where the configuration does not tell."""
    counted = [line["train/updates_total"] for line in record.lines if line.get("train/updates_total") is not None]
    if counted:  # off-policy
        return counted[-1], counted[-1] / len(counted)
    num_steps, an_iteration = steps[-1] - steps[0] + 1, 1.0  # cloning logs one step of several
    if record.is_recipe:
        an_iteration = record.setting("train.train_policy.mu_iterations", 1)
    elif record.trained_phase == "rl":
        samples = record.setting("rollout.num_envs", 0) * record.setting("rollout.num_chunks", 0)
        minibatch = record.setting("trainer.minibatch_size", 0)
        known = samples and minibatch
        an_iteration = record.setting("algorithm.update_epochs", 1) * samples / minibatch if known else math.inf
    return num_steps * an_iteration, an_iteration


ALWAYS: tuple[Rule, ...] = (overfitted, imitation_ceiling)
"""Rules about more than the outcome."""
CAUSES: tuple[Rule, ...] = (
    kl_penalty_too_strong, steps_too_large, constant_return, zero_variance_groups, steps_too_small, policy_never_moves, entropy_collapse, too_few_updates,
    q_overestimation, stale_rollouts, return_without_success, return_falls,
)  # fmt: skip
"""Rules that explain a bad outcome, causes before their consequences."""
