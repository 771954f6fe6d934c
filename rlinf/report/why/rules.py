"""The rules of `rlinf why`, the worst first. docs/why.md shows them, and how they were tried."""

from __future__ import annotations

import itertools
import math
import os
from statistics import median

from rlinf.algorithms.offpolicy_config import LARGEST_SCALE
from rlinf.models.config import MAX_EXP_GAP
from rlinf.report.why.findings import (
    DOES_WELL,
    GOOD,
    MASTERED,
    NAMED,
    Diagnosis,
    Finding,
    NotMeasured,
    Record,
    Rule,
    diagnose,
    read_record,
    sum_of,
)
from rlinf.report.why.outcome import FELL, ROSE, UNKNOWN, outcome_of_values

USUAL: dict[str, tuple[float, float, float]] = {
    "algorithm.clip_range_high": (0.01, 1, 0.2), "algorithm.clip_range_low": (0.01, 1, 0.2), "algorithm.entropy_coef": (0, 0.3, 0.005),
    "algorithm.gamma": (0.5, 1, 0.97), "algorithm.head.scale": (0.02, math.inf, 0.5), "algorithm.huber_delta": (1e-3, math.inf, 1.0), "algorithm.kl_coef": (0, 2, 0.01),
    "algorithm.learning_rate": (1e-7, 0.05, 5e-4), "algorithm.tau": (1e-4, 0.5, 0.005), "algorithm.update_epochs": (1, 20, 4),
    "algorithm.value_clip_range": (1e-3, math.inf, 0.2), "algorithm.value_coef": (1e-3, 100, 0.5),
    "env.max_episode_steps": (4, math.inf, 50), "env.reward_scale": (1e-5, 100, 0.1), "env.success_bonus": (0, math.inf, 1.0),
    "model.init_config.initial_log_std": (-3, 1, -0.5), "rollout.n_generation": (3, math.inf, 8), "rollout.temperature": (0.3, 2, 1.0),
    "sft.expert.jitter": (0, 1, 0.3), "sft.learning_rate": (1e-7, 0.03, 1e-3), "sft.num_demonstrations": (10, math.inf, 500),
    "train.epsilon": (0, 1e-4, 1e-8), "train.optm_grad_norm_clip": (1e-3, math.inf, 1.0), "train.optm_lr": (0, 0.01, 1e-4),
    "train.optm_weight_decay": (0, 10, 0.01), "train.train_policy.dpo_beta": (1e-3, 10, 0.1), "train.train_policy.kl_beta": (0, 2, 0.01),
    "train.train_policy.mu_iterations": (1, 20, 1), "train.train_policy.temperature": (0.3, 2, 1.0), "trainer.adam_beta1": (0, 0.99, 0.9),
    "trainer.adam_beta2": (0.5, 0.9999, 0.95), "trainer.adam_eps": (0, 1e-4, 1e-8), "trainer.max_grad_norm": (1e-3, math.inf, 1.0),
    "trainer.value_learning_rate": (1e-6, 0.03, 1e-3), "trainer.weight_decay": (0, 10, 0.0),
}  # fmt: skip
"""Smallest and largest value with which runs learn, and one to type instead; of another sign: the same without it."""

OFF_AT_0 = ("train.optm_grad_norm_clip", "sft.num_demonstrations")


def explain(folder: str | os.PathLike) -> Diagnosis:
    """Return the outcome of the run in ``folder``, and what all rules say of it; raise CheckpointError if it is not the folder of a run."""
    return diagnose(read_record(folder), RULES)


def findings_of(record: Record) -> Diagnosis | None:
    """Return the diagnosis of `rlinf why` for the report of a run; None without metrics."""
    return diagnose(record, RULES) if record.lines else None


def return_misses_success(record: Record) -> Finding | None:
    """The return certainly rose, in the last third less than before, and success certainly did not."""
    if record.outcome.measure != "success" or record.outcome.verdict == UNKNOWN:
        raise NotMeasured("no success, or too few episodes to tell")
    returns = record.series("rollout/return_mean")
    change = outcome_of_values("return", returns.steps, returns.values, "")
    early, middle, late = median(returns.early), median(returns.middle), median(returns.late)
    # The return of a slow run rises before its first success.
    if change.verdict != ROSE or late - middle > (middle - early) / 2:
        return None
    scale, needed = record.setting("env.reward_scale", 1.0), record.setting("env.success_return", -math.inf)
    reached = max(returns.values) / scale
    cure = f"env.success_return={reached:.3g}" if reached < needed and not sum_of(record.rollouts()).successes else ""
    text = f"The return certainly rises, {change.text}, and success does not: the reward or what counts as a success is another than meant"
    return Finding(text, cure, returns.all_steps)


def equal_returns(record: Record) -> Finding | None:
    """Every iteration has the same return; of a recipe, every answer has the same reward."""
    returns = record.series(record.return_name)
    spread = max(returns.values) - min(returns.values)
    if record.is_recipe:
        spread = max(record.series("rollout/reward_std").values)
    if spread > 1e-5 * max(map(abs, returns.values)):
        return None
    if record.setting("init_from") and record.outcome.measure == "return" and returns.values[0] > 0:
        raise NotMeasured("the run begins with a trained policy, which may have all the return that there is")
    text = f"Every iteration has the return {returns.values[0]:.4g}: rewards do not depend on the actions, or the env ignores these"
    if record.is_recipe:
        if median(record.series("rollout/truncated_fraction").late) >= 0.3:
            raise NotMeasured("answers are cut before their end, which says nothing of their rewards")
        text = f"Every answer has the reward {returns.values[0]:g}: its function, weight or column does not fit, or no answer is right"
    elif not any(returns.values) and record.setting("env.reward_mode") == "sparse":
        text = "No episode has a reward, which is sparse: nothing can be learnt before the first success (clone first, or reward progress)"
    return Finding(text, "", returns.all_steps)


def policy_frozen(record: Record) -> Finding | None:
    """The whole run is warm-up of the critic, in which the policy is not trained."""
    warmup, planned = record.setting("algorithm.critic_warmup_steps", 0), record.setting("trainer.max_steps", math.inf)
    if not any("train/approx_kl" in line for line in record.lines):
        raise NotMeasured("no train/approx_kl")
    if warmup < planned or not warmup:
        return None
    text = f"The first {warmup} iterations train the critic alone, and the run has {planned}"
    return Finding(text, "algorithm.critic_warmup_steps=0", record.outcome.steps)


def rate_too_small(record: Record) -> Finding | None:
    """The learning rate moves weights by less than 1e-4 in the whole run, or the policy by less than 1e-5 nat an iteration."""
    phase = "rl" if record.is_preference or any(line["phase"] == "rl" for line in record.lines) else "sft"
    key, rate = rate_of(record, phase)
    used = record.series("sft/learning_rate" if phase == "sft" else "train/learning_rate")
    updates, kl = (1 if phase == "sft" else num_updates(record)), math.inf
    if phase == "rl" and updates > 1:
        kl = max(1e-12, median(record.series("train/approx_kl").late))
    steps_a_line = (used.steps[-1] - used.steps[0]) / (len(used.steps) - 1)  # cloning logs one step of several
    way = sum(used.values) * steps_a_line * (1 if math.isinf(updates) else updates)
    # AdamW moves a weight by about the rate, and weights are some hundredths. A healthy iteration is 1e-4 to 1e-2 nat.
    if way >= (1e-4 if record.outcome.is_bad else 1e-5) and (kl > 1e-5 or rate > 1e-5):
        return None
    late, configured = median(used.late), record.setting(key, rate)
    larger = 100 * rate if math.isinf(kl) else rate * min(1e4, math.sqrt(3e-3 / kl))
    cure = f"{key}={min(1e-3, max(1e-5, larger)):.1g}"
    if used.values[-1] < 0.1 * configured and used.values[-1] > used.values[0]:
        cure = "train.optm_warmup_steps=0" if record.is_recipe else "trainer.warmup_steps=0"
    moves = "" if math.isinf(kl) else f", and the policy moves by {kl:.2g} nat an iteration (0.0001 to 0.01 are usual)"
    text = f"The learning rate is {late:.3g}: AdamW moves a weight by at most {way:.2g} in the whole run{moves}"
    return Finding(text, cure, used.late_steps)


def clip_range_closed(record: Record) -> Finding | None:
    """30 % of the ratios are clipped or more although the KL is below 0.01 nat, and a clip range is below 0.02."""
    clip, kl = record.series("train/clip_fraction"), record.series("train/approx_kl")
    clipped, moved = median(clip.values), median(kl.values)
    name = "train.train_policy.epsilon_" if record.is_recipe else "algorithm.clip_range_"
    closed = [name + side for side in ("low", "high") if record.setting(name + side, 0.2) < 0.02]
    if not closed or clipped < 0.3 or moved > 0.01:
        return None
    text = f"{clipped:.0%} of the importance ratios are clipped at a KL of {moved:.2g} nat: the clip range ends each update as it begins"
    return Finding(text, " ".join(f"{key}=0.2" for key in closed), clip.all_steps)


def penalty_holds(record: Record) -> Finding | None:
    """The KL to the reference stays below 0.05 nat, and the weight of its penalty allows no more."""
    key = "train.train_policy.kl_beta" if record.is_recipe else "algorithm.kl_coef"
    weight, kl = record.setting(key, 0), record.series("train/kl_to_reference")
    # Advantages of deviation 1 gain at most sqrt(2 KL) over the reference: beyond this KL, the penalty is the larger of the two.
    allowed = 1 / (2 * weight**2) if weight else math.inf
    if allowed > 0.05 or median(kl.late) > 0.05:
        return None
    text = f"The policy stays within {median(kl.late):.2g} nat of the reference: {weight:g} a nat is more than actions gain beyond {allowed:.1g}"
    return Finding(text, f"{key}=0.01", kl.late_steps)


def steps_too_large(record: Record) -> Finding | None:
    """The KL of an iteration is above 0.1 nat, or more than 40 % of the ratios are clipped at 0.02 nat or more."""
    clip, kl = record.series("train/clip_fraction"), record.series("train/approx_kl")
    clipped, moved = median(clip.late), median(kl.late)
    # Healthy runs stay below 0.2 and 0.03; twice that is where PPO's surrogate stops saying anything about the new policy.
    if moved <= 0.1 and (clipped <= 0.4 or moved <= 0.02):
        return None
    key, rate = rate_of(record, "rl")
    cures = [cure for _, cure in unusual(record)]
    narrow = not record.has_tokens and record.series("train/entropy").values[0] < -1
    if not cures and not narrow:  # of narrow actions, a usual rate is a large step
        cures = [f"{key}={rate * max(0.01, min(0.5, math.sqrt(0.02 / max(moved, 1e-9)))):.1g}"]
    text = f"{clipped:.0%} of the importance ratios are clipped at a KL of {moved:.3g} nat an iteration; below 30 % and 0.05 are usual"
    return Finding(text, cures[0] if len(cures) == 1 else "", clip.late_steps)


def equal_groups(record: Record) -> Finding | None:
    """In half of the groups or more, all returns are equal, beside those in which all attempts succeed."""
    share = record.series("rollout/zero_variance_group_fraction")
    # Groups in which all attempts succeed teach nothing either. Their share is at most the success rate.
    rollouts = record.rollouts() if record.has_success and not record.is_recipe else []
    late = median(share.late) - (sum_of(rollouts[-(len(rollouts) // 3) :]).success_rate if rollouts else 0.0)
    if late < 0.5:
        return None
    text = f"In {median(share.late):.0%} of the groups all returns are equal, so they teach nothing; tasks should be such that some attempts succeed"
    key = "rollout.n_generation" if record.is_recipe else "rollout.group_size"
    return Finding(text, f"{key}=8" if record.setting(key, 8) < 4 else "", share.late_steps)


def entropy_gone(record: Record) -> Finding | None:
    """The entropy of Gaussian actions is below -2.5 nat or fell by 3, or tokens have almost none, and the return does not rise."""
    entropy = record.series("train/entropy")
    before, after = median(entropy.early), median(entropy.late)
    if len(set(entropy.values)) == 1:
        raise NotMeasured(f"an entropy of exactly {after:g} throughout, which the policy does not learn")
    # Of Gaussian actions, -2.5 nat is a deviation of 1 % of the range, and 3 nat less a twentieth of it. Of tokens, the entropy ends at 0.
    tokens_gone = after < 0.01 or (after < 0.05 and after < before / 10)
    is_gone = tokens_gone if record.has_tokens else after < -2.5 or before - after > 3
    if not is_gone or return_rose(record):
        return None
    text = f"The entropy is {after:.3g} nat, after {before:.3g} at the beginning: the policy always does the same, so it finds nothing new"
    key = "model.init_config.initial_log_std"
    return Finding(text, f"{key}=-0.5" if record.setting(key, 0) < -2 else "", entropy.late_steps)


def setting_unusual(record: Record) -> Finding | None:
    """A setting, or two, is outside the range in which runs learn (`USUAL`), and success does not rise above a half."""
    found = unusual(record)
    if not record.settings:
        raise NotMeasured("no configuration")
    if not 1 <= len(found) <= 2:
        return None
    return Finding("; ".join(text for text, _ in found), " ".join(cure for _, cure in found), record.outcome.steps)


def stale_rollouts(record: Record) -> Finding | None:
    """Importance ratios of rollouts played ahead are off by a tenth on average, or reach ten times `algorithm.tis_cap`."""
    lag = record.series("rollout/staleness_iterations")
    largest, cap = record.series("rollout/importance_ratio_max"), record.setting("algorithm.tis_cap", math.inf)
    if not median(lag.late):
        raise NotMeasured("rollouts are played with the present weights")
    mean = median(record.series("rollout/importance_ratio_mean").late)
    # The mean of true ratios is 1. Where it is off by a tenth, few samples carry the estimate.
    if abs(mean - 1) <= 0.1 and median(largest.late) <= 10 * cap:
        return None
    old = f"Rollouts are {median(lag.late):.0f} iterations old"
    text = f"{old}: importance ratios reach {median(largest.late):.3g}, and are {mean:.3g} on average instead of 1"
    return Finding(text, f"cluster.max_staleness={max(0, round(median(lag.late)) - 1)}", lag.late_steps)


def critic_dreams(record: Record) -> Finding | None:
    """The critics of a head expect more than what came of it, by half of the largest return."""
    expected, reached = record.series("train/q_first"), record.series("train/return_first")
    late, real = median(expected.late), median(reached.late)
    # Half of the largest return that was ever reached: critics are off by a tenth or two in healthy runs.
    if late - real <= 0.5 * max(map(abs, reached.values)):
        return None
    rate = record.setting("algorithm.learning_rate", 5e-4)
    text = f"The critics expect {late:.3g} of an episode, which then reaches {real:.3g}: the head follows errors of its critics"
    return Finding(text, f"algorithm.learning_rate={min(5e-4, rate / 5):.3g}", expected.late_steps)


def head_saturated(record: Record) -> Finding | None:
    """More than half of the numbers of a head are at their bound, and its scale can grow."""
    share = record.series("train/at_bound")
    late, scale = median(share.late), record.setting("algorithm.head.scale", 1.0)
    if scale >= LARGEST_SCALE:
        raise NotMeasured(f"algorithm.head.scale={scale:g} is the largest there is")
    if late <= 0.5:
        return None
    text = f"{late:.0%} of the numbers of the head are at their bound: it cannot correct by more than its scale of {scale:g}"
    return Finding(text, f"algorithm.head.scale={min(LARGEST_SCALE, 2 * scale):g}", share.late_steps)


def answers_cut(record: Record) -> Finding | None:
    """30 % of the answers of a recipe, or more, are cut at the largest length, at an entropy below 2 nat."""
    share = record.series("rollout/truncated_fraction")
    late, limit = median(share.late), record.setting("rollout.max_response_length", 1024)
    entropies = [line["train/entropy"] for line in record.lines if line.get("train/entropy") is not None]
    # Tokens drawn nearly at random, 2 nat are seven equally likely ones, find no end at any length.
    if late < 0.3 or (entropies and median(entropies) > 2):
        return None
    if share.values[0] < 0.1 and record.outcome.verdict == FELL:
        raise NotMeasured("answers were whole at first, so that cut ones may follow from the fall")
    text = f"{late:.0%} of the answers are cut at {limit} tokens before their end: they are rewarded as answers without a result"
    return Finding(text, f"rollout.max_response_length={2 * limit}", share.late_steps)


def cloning_diverges(record: Record) -> Finding | None:
    """The loss of cloning ends above its first value, by a tenth and by more than its noise."""
    loss, (key, rate) = record.series("sft/loss"), rate_of(record, "sft")
    first, late = loss.values[0], median(loss.late)
    # The median size of the difference of two normal numbers is 0.954 of their deviation. Few steps may hide it; late values show it.
    step = median(abs(after - before) for before, after in itertools.pairwise(loss.values)) / 0.954
    if late - first <= max(0.1 * abs(first), 3 * step, max(loss.late) - min(loss.late)):
        return None
    text = f"The loss of cloning is {late:.3g}, after {first:.3g} at its first step"
    return Finding(text, f"{key}={min(1e-3, rate / 5):.2g}", loss.all_steps)


def clone_misses(record: Record) -> Finding | None:
    """The loss of cloning fell, and success is certainly less than half of the demonstrator's, or the reward did not rise."""
    loss = record.series("sft/loss")
    change = outcome_of_values("loss", loss.steps, loss.values, "")
    if change.verdict != FELL or any(line["phase"] == "rl" for line in record.lines):
        raise NotMeasured("no clone whose loss fell")
    if record.is_recipe:
        if record.outcome.measure != "reward" or not record.outcome.is_bad:
            return None
        reached = "the rewards of the validation did not rise"
    else:
        clone, shown = record.evaluations("sft")[-1][1], record.lines_with("sft/demonstrator_success_rate")[-1]
        if clone.interval[1] >= shown["sft/demonstrator_success_rate"] / 2:
            return None
        reached = f"the clone succeeds in {clone}, its demonstrator in {shown['sft/demonstrator_success_rate']:.0%}"
    text = f"The loss of cloning fell, and {reached}: the rows are too few, or do not show the asked task (labels, observations)"
    return Finding(text, "", record.outcome.steps)


def overfitted(record: Record) -> Finding | None:
    """The held-out loss of a recipe rises by 5 %, and by 5 % of its fall, while the training loss falls."""
    held_out, loss = record.lines_with("eval/loss"), record.series("sft/loss")
    if len(held_out) < 4:
        raise NotMeasured(f"{len(held_out)} validations only; required: 4")
    values = [line["eval/loss"] for line in held_out]
    least = min(range(len(values)), key=values.__getitem__)
    # By a twentieth, and in each of the last two validations: not the noise of one of them.
    rises = min(values[-2:]) - values[least]
    is_slight = rises < 0.05 * max(values[least], values[0] - values[least])
    if is_slight or least >= len(values) - 2 or median(loss.late) >= median(loss.early):
        return None
    text = f"The loss on held-out rows rose from {values[least]:.3g} to {values[-1]:.3g} while the training loss fell: it learns by heart"
    cure = f"train.epoch={max(1, record.setting('train.epoch', 1) // 2)}"
    return Finding(text, cure, (held_out[least]["step"], held_out[-1]["step"]))


def clone_is_bound(record: Record) -> Finding | None:
    """A clone is as good as its demonstrator, which succeeds in 90 % or less, and no RL follows."""
    lines = record.lines_with("sft/demonstrator_success_rate")
    step, clone = record.evaluations("sft")[-1]
    demonstrator = lines[-1]["sft/demonstrator_success_rate"]
    if any(line["phase"] == "rl" for line in record.lines):
        raise NotMeasured("RL follows the cloning")
    if demonstrator > 0.9 or not clone.interval[0] <= demonstrator <= clone.interval[1]:
        return None
    text = f"The clone succeeds in {clone}, and its demonstrator in {demonstrator:.1%}: imitation cannot pass what it imitates. RL can"
    return Finding(text, "trainer.max_steps=60", (lines[0]["step"], step))


def lost_episodes(record: Record) -> Finding | None:
    """1 % of the episodes, and at least three, began again because their simulator was lost."""
    lines = record.lines_with("rollout/lost_episodes", "rollout/num_episodes")
    lost, episodes = record.total("rollout/lost_episodes"), record.total("rollout/num_episodes")
    if lost < 3 or lost < 0.01 * episodes:  # a simulator may crash now and then
        return None
    text = f"{lost:.0f} episodes began again because their simulator was lost (the log says why), beside {episodes:.0f} that ended"
    cure = f"rollout.num_envs={max(1, record.setting('rollout.num_envs', 64) // 2)}"
    return Finding(text, cure, (lines[0]["step"], lines[-1]["step"]))


def parity_near_gate(record: Record) -> Finding | None:
    """Rollout and trainer differ by half of what the parity gate accepts, or did so by more."""
    exceeded = record.total("rollout/parity_exceeded")
    own, in_16_bits = record.setting("trainer.parity_max_gap"), record.setting("model.precision", "fp32") != "fp32"
    if own is None and (in_16_bits or record.is_recipe):
        name, limit, exact = "rollout/logprob_gap_exp_mean", MAX_EXP_GAP, 1.0
    else:
        name, limit, exact = "rollout/logprob_gap_max", 1e-3 if own is None else own, 0.0
    gap = record.series(name)
    late = median(gap.late)
    if not exceeded and late - exact <= (limit - exact) / 2:
        return None
    also = f", and was beyond it in {exceeded:.0f} steps" if exceeded else ""
    text = f"{name} is {late:.4g} at a limit of {limit:.4g}{also}: rollout and trainer differ (`rlinf diagnose` tells in what)"
    return Finding(text, "model.precision=fp32" if in_16_bits else "rollout.backend=torch", gap.late_steps)


def return_stays(record: Record) -> Finding | None:
    """The policy moves and its return certainly does not rise; the critic explains less than a tenth of the returns, or half and more."""
    explained, kl = record.series("train/explained_variance"), record.series("train/approx_kl")
    late, moved = median(explained.late), median(kl.late)
    if len(set(record.series(record.return_name).values)) == 1:
        raise NotMeasured("all returns are equal, so that a critic has nothing to explain")
    is_constant = max(map(abs, explained.values)) < 1e-6
    speaks = is_constant or (moved >= 1e-3 and not 0.1 < late < 0.5)
    if not speaks or not record.outcome.is_bad or return_rose(record):
        return None
    cause = "observations tell the return, and actions hardly change it"
    if late <= 0.1:
        noise = "noise in the reward, in the observations, or in the executed actions"
        cause = "the observations never change" if is_constant else noise
    text = f"The policy moves by {moved:.2g} nat an iteration, its return does not rise, and the critic explains {late:.2g} of it: {cause}"
    return Finding(text, "", explained.all_steps)


def unusual(record: Record) -> list[tuple[str, str]]:
    """Return a sentence and an override for each setting outside the range in which runs learn."""
    found = []
    for key, (low, high, usual) in USUAL.items():
        value = record.setting(key)
        if isinstance(value, int | float) and not low <= value <= high and not (value == 0 and key in OFF_AT_0):
            ends = f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
            cure = f"{key}={-value if value < 0 <= low else usual:g}"
            found.append((f"{key} is {value:g}, and runs learn with {ends}", cure))
    return found


def return_rose(record: Record) -> bool:
    """Return whether the return of the rollouts certainly rose."""
    returns = record.series(record.return_name)
    return outcome_of_values("return", returns.steps, returns.values, "").verdict == ROSE


def rate_of(record: Record, phase: str) -> tuple[str, float]:
    """Return key and value of the learning rate of a phase; a run that was rolled back uses a fraction of the configured rate."""
    keys = ["train.optm_lr"] if record.is_recipe else ["sft.learning_rate"] if phase == "sft" else []
    # A head on a frozen policy has a rate of its own.
    for key in [*keys, "algorithm.learning_rate", "trainer.learning_rate"]:
        rate = record.setting(key)
        if isinstance(rate, float | int):
            used = [line.get("train/learning_rate") for line in record.lines if line.get("phase") == phase]
            return key, next(filter(None, reversed(used)), rate) if key == "trainer.learning_rate" else rate
    return "trainer.learning_rate", 1e-4


def num_updates(record: Record) -> float:
    """Return how many optimiser steps an iteration takes; infinity if it is not known."""
    if record.is_recipe:
        return record.setting("train.train_policy.mu_iterations", 1)
    samples = record.setting("rollout.num_envs", 0) * record.setting("rollout.num_chunks", 0)
    minibatch = record.setting("trainer.minibatch_size", 0)
    return record.setting("algorithm.update_epochs", 1) * samples / minibatch if samples and minibatch else math.inf


RULES: dict[str, tuple[Rule, ...]] = {
    "": (lost_episodes, parity_near_gate, overfitted, clone_is_bound, clone_misses),
    MASTERED: (clip_range_closed, penalty_holds, steps_too_large, equal_returns, answers_cut),
    GOOD: (policy_frozen, rate_too_small, cloning_diverges, stale_rollouts, critic_dreams),
    DOES_WELL: (setting_unusual,),
    NAMED: (head_saturated, return_misses_success, equal_groups, entropy_gone, return_stays),
}  # fmt: skip
"""Rules by what must not hold for them to be asked."""
