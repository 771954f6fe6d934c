"""The rules of `rlinf why`, the worst first. docs/why.md shows them, and how they were tried."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Sequence
from statistics import median

from rlinf.algorithms.offpolicy_config import LARGEST_SCALE
from rlinf.evaluation.collapse import is_collapsed
from rlinf.evaluation.findings import MIN_POINTS, Diagnosis, Finding, NotMeasured, Record, Series, diagnose, read_record
from rlinf.evaluation.intervals import difference_interval
from rlinf.evaluation.report_page import warning_card
from rlinf.evaluation.result import Success
from rlinf.models.config import MAX_EXP_GAP

MASTERED = 0.95
"""Rollout success rate from which equal groups, a certain policy and small steps are what learning ends with."""

NEAR_WEIGHT, SPACING = 0.03, 2.0**-29
"""Size of a typical weight, and the distance of neighbouring float32 numbers there."""

Z_WORSE = 2.807033768343811
"""99.75 % quantile of the standard normal distribution: one of 400 unchanged policies ends so far below its beginning."""


def explain(folder: str | os.PathLike) -> Diagnosis:
    """Return what all rules say of the run in ``folder``.

    Raises:
        CheckpointError: It is not the folder of a run.
    """
    return diagnose(read_record(folder), RULES)


def findings_section(record: Record) -> str:
    """Return what `rlinf why` says of a run, for its report; "" for what is no run."""
    if not record.lines:
        return ""
    found = diagnose(record, RULES)
    if found.findings:
        return warning_card(
            [f"{finding.rule}: {finding}" for finding in found.findings], "What the metrics say (rlinf why)"
        )
    numbers = f"{len(found.fine)} rules found nothing in the metrics, and {len(found.silent)} could not be evaluated"
    return f'<p class="note">{numbers}: <code>rlinf why</code> lists them.</p>'


def collapsed(record: Record) -> Finding | None:
    """The last evaluation of RL is certainly less than half of the best, or certainly less than the first."""
    evaluations = record.evaluations("rl")
    if len(evaluations) < 2:
        raise NotMeasured("one evaluation of RL only; required: 2")
    (first_step, first), (last_step, last) = evaluations[0], evaluations[-1]
    best_step, best = max(evaluations, key=lambda each: each[1].success_rate)
    low, _ = difference_interval((first.successes, last.successes), (first.episodes, last.episodes), Z_WORSE)
    if is_collapsed(best, last):
        text = f"The policy succeeded in {best} of the evaluation at step {best_step} and in {last} at the end"
    elif low > 0:  # against the first one, which nobody has chosen because it is good
        best_step = first_step
        text = f"RL made the policy worse: {first} of the first evaluation, {last} of the last"
    else:
        return None
    return Finding(
        f"{text}; it should not fall. The checkpoint of the best evaluation is kept",
        f"{smaller_rate(record)} trainer.eval_every={record.setting('trainer.eval_every') or 5} trainer.on_collapse=stop",
        (best_step, last_step),
    )


def never_a_success(record: Record) -> Finding | None:
    """None of at least 100 episodes of the rollouts succeeded, and the return rises no more."""
    rollouts = record.rollouts()
    total = sum_of(rollouts)
    if total.successes or total.episodes < 100 or return_rises(record):  # 0 of 100: the rate is certainly below 4 %
        return None
    steps = rollouts[0][0], rollouts[-1][0]
    lengths = set(record.series("rollout/episode_len").values)
    found = f"None of {total.episodes} episodes of the rollouts succeeded"
    begin = f"sft.max_steps={max(1000, 2 * record.setting('sft.max_steps', 0))}"
    if len(lengths) == 1:
        limit = round(lengths.pop())
        found += f", and each lasted {limit} env steps, its limit"
        return Finding(
            f"{found}. Without a success there is nothing to repeat: give episodes more time, or begin with a policy that succeeds "
            "now and then",
            f"env.max_episode_steps={2 * limit} or {begin}" if record.setting("env.max_episode_steps") else begin,
            steps,
        )
    return Finding(
        f"{found}: they ended early, in failure. Begin with a policy that succeeds now and then, or reward what leads to success",
        begin,
        steps,
    )


def reward_misses_success(record: Record) -> Finding | None:
    """The return rises while success certainly falls, by 5 points or more."""
    rollouts, returns = record.rollouts(), record.series("rollout/return_mean")
    window = len(rollouts) // 3
    before, after = sum_of(rollouts[:window]), sum_of(rollouts[-window:])
    low, _ = difference_interval((before.successes, after.successes), (before.episodes, after.episodes))
    # The certain fall of many episodes may be tiny; and a median above all early values is no noise.
    fell = low > 0 and before.success_rate - after.success_rate >= 0.05
    if not fell or median(returns.late) <= max(returns.early):
        return None
    is_dense = record.setting("env.reward_mode", "sparse") != "sparse"
    return Finding(
        f"The return rose from {median(returns.early):.3g} to {median(returns.late):.3g} while success fell from {before} to {after}: "
        "the reward pays for something else than success",
        "env.reward_mode=sparse" if is_dense else "trainer.eval_every=5 trainer.on_collapse=stop",
        returns.all_steps,
    )


def ratios_clipped(record: Record) -> Finding | None:
    """More than 40 % of the importance ratios are clipped, or the KL of an iteration is above 0.1 nat."""
    clip, kl = record.series("train/clip_fraction"), record.series("train/approx_kl")
    clipped, moved = median(clip.late), median(kl.late)
    # Healthy runs stay below 0.2 and 0.03 here; twice that is where PPO's surrogate stops saying anything about the new policy.
    if clipped <= 0.4 and moved <= 0.1:
        return None
    return Finding(
        f"{clipped:.0%} of the importance ratios are clipped and the KL of an iteration is {moved:.3g} nat; they should be below 30 % "
        "and 0.05: each update leaves the region in which the loss says something about the policy",
        smaller_rate(record),
        clip.late_steps,
    )


def critic_diverges(record: Record) -> Finding | None:
    """The errors of the critic are three times as large as any return."""
    loss, returns = record.series("train/value_loss"), record.series("rollout/return_mean")
    error = math.sqrt(max(0.0, median(loss.late)))
    # A mean return may be near 0 although returns are not, but one success is worth its bonus.
    largest = max(record.setting("env.success_bonus", 1.0), *map(abs, returns.values))
    if error <= 3 * largest:
        return None
    rate = record.setting("trainer.value_learning_rate", 1e-3)
    return Finding(
        f"The critic errs by {error:.3g} (root of the value loss), while episodes return {largest:.3g} at most; its errors should be far "
        "smaller than what it has to predict",
        f"trainer.value_learning_rate={rate / 10:.3g}",
        loss.late_steps,
    )


def critic_blind(record: Record) -> Finding | None:
    """The explained variance of the critic is below -0.05, before the task is mastered."""
    explained = record.series("train/explained_variance")
    late = median(explained.late)
    # Close to 0 it is noise, or returns do not vary; and where all episodes succeed, returns vary by noise alone.
    if late >= -0.05 or is_mastered(record):
        return None
    rate = record.setting("trainer.value_learning_rate", 1e-3)
    return Finding(
        f"The explained variance of the critic is {late:.3g} late in the run; it should be well above 0: the critic predicts no "
        "better than a constant, so advantages are as noisy as returns",
        f"trainer.value_learning_rate={min(1.0, 10 * rate):.3g}",
        explained.late_steps,
    )


def rate_rounds_away(record: Record) -> Finding | None:
    """The learning rate of cloning or of RL is smaller than the distance of neighbouring weights."""
    rates = {}
    for phase, name in (("sft", "sft/learning_rate"), ("rl", "train/learning_rate")):
        with contextlib.suppress(NotMeasured):
            rates[phase] = record.series(name)
    if not rates:
        raise NotMeasured(f"fewer than {MIN_POINTS} steps with a learning rate")
    for phase, rate in rates.items():
        late = median(rate.late)
        if 0 < late < SPACING:  # 0: the policy is frozen on purpose
            return Finding(
                f"The learning rate of {'cloning' if phase == 'sft' else 'RL'} is {late:.3g}. AdamW moves a weight by about that much in "
                f"a step, and neighbouring float32 numbers near {NEAR_WEIGHT:g} are {SPACING:.2g} apart, so the steps of most weights are "
                "rounded away",
                larger_rate(record, 1e-5, phase),
                rate.late_steps,
            )
    return None


def policy_stands_still(record: Record) -> Finding | None:
    """The KL of an iteration of several optimiser steps is below 1e-6 nat."""
    kl, clip = record.series("train/approx_kl"), record.series("train/clip_fraction")
    if num_updates(record) <= 1:
        raise NotMeasured("one optimiser step per iteration, whose KL is always 0")
    # A healthy step is 1e-4 to 1e-2 nat. 1e-6 is a thousandth of a standard deviation in each action.
    if median(kl.late) > 1e-6 or median(clip.late) > 0 or is_mastered(record):
        return None
    return Finding(
        f"The KL of an iteration is {median(kl.late):.2g} nat and no ratio is clipped; 0.0001 to 0.01 nat are usual: the policy hardly "
        "moves",
        larger_rate(record, 1e-5, "rl"),
        kl.late_steps,
    )


def equal_groups(record: Record) -> Finding | None:
    """In half of the groups or more, all returns are equal and no attempt succeeds."""
    share = record.series("rollout/zero_variance_group_fraction")
    late = median(share.late)
    # Groups in which all attempts succeed teach nothing either, but that is what learning ends with. Their share is at most the
    # success rate.
    if late - (late_success(record) or 0.0) < 0.5 or is_mastered(record):
        return None
    if record.is_recipe:
        key = (
            f"rollout.n_generation={2 * record.setting('rollout.n_generation', 16)} or train.train_policy.variant=dapo"
        )
    else:
        key = f"rollout.group_size={2 * record.setting('rollout.group_size', 8)} or rollout.temperature=1.0"
    return Finding(
        f"In {late:.0%} of the groups all returns are equal, so they teach nothing; it should be below half: tasks of which some "
        "attempts succeed, and attempts that differ",
        key,
        share.late_steps,
    )


def entropy_gone(record: Record) -> Finding | None:
    """The entropy of Gaussian actions is below -2.5 nat or fell by 3, or that of tokens is almost 0, before the task is mastered."""
    entropy = record.series("train/entropy")
    before, after = median(entropy.early), median(entropy.late)
    if len(set(entropy.values)) == 1:
        raise NotMeasured(f"an entropy of exactly {after:g} throughout, which the policy does not learn")
    # Of Gaussian actions, -2.5 nat is a deviation of 1 % of the range, and 3 nat less a twentieth of it. Of tokens, the entropy ends at 0.
    if record.has_tokens:
        is_gone = after < 0.01 or (after < 0.05 and after < before / 10)
    else:
        is_gone = after < -2.5 or before - after > 3
    if not is_gone or is_mastered(record):
        return None
    return Finding(
        f"The entropy is {after:.3g} nat, after {before:.3g} nat at the beginning: the policy always does the same, so it finds nothing "
        "new, and does not succeed yet",
        f"{smaller_rate(record)} or algorithm.entropy_coef=0.01" if not record.is_recipe else smaller_rate(record),
        entropy.late_steps,
    )


def entropy_explodes(record: Record) -> Finding | None:
    """The entropy rises by half a nat, and by more than its noise."""
    entropy = record.series("train/entropy")
    before, after = entropy.values[0], median(entropy.late)
    # Half a nat is a deviation 1.6 times as large: learning narrows the policy, and only a bonus or a broken update widens it so.
    if after - before <= max(0.5, noise_of(entropy)):
        return None
    coefficient = record.setting("algorithm.entropy_coef", 0)
    return Finding(
        f"The entropy rises from {before:.3g} to {after:.3g} nat; learning should lower it: the actions become random",
        f"algorithm.entropy_coef={coefficient / 10:.3g}" if coefficient else smaller_rate(record),
        entropy.late_steps,
    )


def gradient_clipped(record: Record) -> Finding | None:
    """The gradient norm is more than ten times its limit, and above it in every step."""
    key = "train.optm_grad_norm_clip" if record.is_recipe else "trainer.max_grad_norm"
    limit = record.setting(key, 1.0)
    if not limit:
        raise NotMeasured("gradients have no limit")
    names = [name for name in ("train/grad_norm", "sft/grad_norm") if any(name in line for line in record.lines)]
    if not names:
        raise NotMeasured("no train/grad_norm or sft/grad_norm")
    for name in names:
        norm = record.series(name)
        late = median(norm.late)
        # Norms of a few times the limit are usual. From ten times on, each step has the same length whatever the batch says.
        if late > 10 * limit and min(norm.late) > limit:
            return Finding(
                f"The gradient norm is {late:.3g}, {late / limit:.0f} times the limit of {limit:g}, and above it in every late step: "
                "batches that say much count no more than those that say little",
                f"{key}={late:.1g}",
                norm.late_steps,
            )
    return None


def lost_episodes(record: Record) -> Finding | None:
    """1 % of the episodes, and at least three, began again because their simulator was lost."""
    lines = record.lines_with("rollout/lost_episodes", "rollout/num_episodes")
    lost, episodes = record.total("rollout/lost_episodes"), record.total("rollout/num_episodes")
    if lost < 3 or lost < 0.01 * episodes:  # a simulator may crash now and then
        return None
    return Finding(
        f"{lost:.0f} episodes began again because their simulator was lost, beside {episodes:.0f} that ended; there should be hardly "
        "any: simulators crash, hang or run out of memory, and the log of the run says which",
        f"rollout.num_envs={max(1, record.setting('rollout.num_envs', 64) // 2)}",
        (lines[0]["step"], lines[-1]["step"]),
    )


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
    return Finding(
        f"{name} is {late:.4g} at a limit of {limit:.4g}{also}; rounding alone stays far below: rollout and trainer see different "
        "weights, inputs or temperatures (`rlinf diagnose` tells which)",
        "model.precision=fp32" if in_16_bits else "rollout.backend=torch",
        gap.late_steps,
    )


def stale_rollouts(record: Record) -> Finding | None:
    """Importance ratios of rollouts played ahead are off by a tenth on average, or reach ten times `algorithm.tis_cap`."""
    lag = record.series("rollout/staleness_iterations")
    largest, cap = record.series("rollout/importance_ratio_max"), record.setting("algorithm.tis_cap")
    if not median(lag.late):
        raise NotMeasured("rollouts are played with the present weights")
    mean = record.series("rollout/importance_ratio_mean")
    # The mean of true ratios is 1. Where it is off by a tenth, few samples carry the estimate.
    is_far = abs(median(mean.late) - 1) > 0.1
    if not is_far and (cap is None or median(largest.late) <= 10 * cap):
        return None
    weighed = "" if cap is None else f", of which algorithm.tis_cap={cap:g} cuts off the rest"
    return Finding(
        f"Rollouts are {median(lag.late):.0f} iterations old: their importance ratios reach {median(largest.late):.3g}{weighed}, and are "
        f"{median(mean.late):.3g} on average instead of 1: they are no longer those of the policy that is trained",
        f"cluster.max_staleness={max(0, round(median(lag.late)) - 1)} or {smaller_rate(record)}",
        lag.late_steps,
    )


def critic_dreams(record: Record) -> Finding | None:
    """The critics of a head expect more than what came of it, by half of the largest return."""
    expected, reached = record.series("train/q_first"), record.series("train/return_first")
    late, real = median(expected.late), median(reached.late)
    spread = max(map(abs, reached.values))
    # Half of the largest return that was ever reached: critics are off by a tenth or two in healthy runs.
    if spread == 0 or late - real <= 0.5 * spread:
        return None
    rate, ratio = record.setting("algorithm.learning_rate", 5e-4), record.setting("algorithm.updates_per_env_step", 0.5)
    return Finding(
        f"The critics expect {late:.3g} of an episode, which then reaches {real:.3g}; the two should agree: the head follows errors "
        "of its critics",
        f"algorithm.updates_per_env_step={ratio / 2:.3g} or algorithm.learning_rate={rate / 5:.3g}",
        expected.late_steps,
    )


def head_saturated(record: Record) -> Finding | None:
    """More than half of the numbers of a head are at their bound, and its scale can grow."""
    share = record.series("train/at_bound")
    late, scale = median(share.late), record.setting("algorithm.head.scale", 1.0)
    if scale >= LARGEST_SCALE:
        raise NotMeasured(f"algorithm.head.scale={scale:g} is the largest there is")
    if late <= 0.5 or is_mastered(record):
        return None
    return Finding(
        f"{late:.0%} of the numbers of the head are at their bound; it should be below half: it cannot correct by more than its scale "
        f"of {scale:g}",
        f"algorithm.head.scale={min(LARGEST_SCALE, 2 * scale):g}",
        share.late_steps,
    )


def answers_cut(record: Record) -> Finding | None:
    """30 % of the answers of a recipe, or more, are cut at the largest length."""
    share = record.series("rollout/truncated_fraction")
    late = median(share.late)
    if late < 0.3:  # a third of the answers is judged without its end
        return None
    limit = record.setting("rollout.max_response_length")
    return Finding(
        f"{late:.0%} of the answers are cut at {'the limit' if limit is None else f'{limit} tokens'} before their end; it should be "
        "below 10 %: their reward is that of an answer without a result",
        f"rollout.max_response_length={2048 if limit is None else 2 * limit}",
        share.late_steps,
    )


def cloning_diverges(record: Record) -> Finding | None:
    """The loss of cloning ends above that of its first step, by a tenth and by more than its noise."""
    loss = record.series("sft/loss")
    first, late = loss.values[0], median(loss.late)
    if late - first <= max(0.1 * abs(first), noise_of(loss)):
        return None
    return Finding(
        f"The loss of cloning is {late:.3g}, after {first:.3g} at its first step; it should fall",
        smaller_rate(record, "sft"),
        loss.all_steps,
    )


def cloning_stands_still(record: Record) -> Finding | None:
    """The loss of cloning falls by less than 3 %, from untrained weights."""
    loss = record.series("sft/loss")
    if record.is_recipe or record.setting("init_from") or record.setting("model.model_path"):
        raise NotMeasured("cloning begins with trained weights, whose loss may stay where it is")
    before, late = median(loss.values[:3]), median(loss.late)
    # Batches differ by a few percent; a clone that learns loses a tenth of its loss in its first steps.
    if late > 1.1 * before or late < before - 0.03 * abs(before):
        return None
    return Finding(
        f"The loss of cloning is {late:.3g}, after {before:.3g} at the beginning: nothing is learnt",
        larger_rate(record, 1e-4, "sft"),
        loss.all_steps,
    )


def overfitted(record: Record) -> Finding | None:
    """The held-out loss of a recipe rises by 5 % while that of training falls."""
    held_out, loss = record.lines_with("eval/loss"), record.series("sft/loss")
    if len(held_out) < 4:
        raise NotMeasured(f"{len(held_out)} validations only; required: 4")
    values = [line["eval/loss"] for line in held_out]
    least = min(range(len(values)), key=values.__getitem__)
    # By a twentieth, and in each of the last two validations: not the noise of one of them.
    if min(values[-2:]) < 1.05 * values[least] or least >= len(values) - 2 or median(loss.late) >= median(loss.early):
        return None
    return Finding(
        f"The loss on held-out rows rose from {values[least]:.3g} to {values[-1]:.3g} while that of training fell from "
        f"{median(loss.early):.3g} to {median(loss.late):.3g}: the rest is learnt by heart",
        f"train.epoch=1 or {smaller_rate(record, 'sft')}",
        (held_out[least]["step"], held_out[-1]["step"]),
    )


def clone_is_bound(record: Record) -> Finding | None:
    """A clone is as good as its demonstrator, which succeeds in 90 % or less, and no RL follows."""
    lines = record.lines_with("sft/demonstrator_success_rate")
    step, clone = record.evaluations("sft")[-1]
    demonstrator = lines[-1]["sft/demonstrator_success_rate"]
    if any(line["phase"] == "rl" for line in record.lines):
        raise NotMeasured("RL follows the cloning")
    low, high = clone.interval
    if demonstrator > 0.9 or not low <= demonstrator <= high:
        return None
    return Finding(
        f"The clone succeeds in {clone}, and its demonstrator in {demonstrator:.1%}: imitation cannot pass what it imitates, so that "
        "more steps change little; RL can, and so can better demonstrations",
        "trainer.max_steps=60",
        (lines[0]["step"], step),
    )


def data_starves(record: Record) -> Finding | None:
    """Cloning waits for its rows in half of its time or more."""
    share = record.series("throughput/data_wait_fraction")
    late = median(share.late)
    if late < 0.5:  # half of the time
        return None
    if record.setting("sft.dataset") is None:
        raise NotMeasured("the rows of cloning are in memory (sft.dataset is null)")
    workers = record.setting("sft.num_workers", 2)
    return Finding(
        f"Cloning waits for its rows in {late:.0%} of its time; it should hardly wait",
        f"sft.num_workers={max(2, 2 * workers)}",
        share.late_steps,
    )


def smaller_rate(record: Record, phase: str = "rl") -> str:
    """Return the override that divides the learning rate by five."""
    key, rate = rate_of(record, phase)
    return f"{key}={rate / 5:.2g}"


def larger_rate(record: Record, at_least: float, phase: str) -> str:
    """Return the override that raises the learning rate tenfold, or to ``at_least``."""
    key, rate = rate_of(record, phase)
    return f"{key}={max(at_least, 10 * rate):.2g}"


def rate_of(record: Record, phase: str) -> tuple[str, float]:
    """Return key and value of the learning rate of a phase; a run that has gone back uses a fraction of what is configured."""
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


def is_mastered(record: Record) -> bool:
    """Return whether the late rollouts nearly always succeed.

    The answers of a recipe have rewards instead, whose largest value nobody knows: it counts that they rose, or that they are nearly
    those of right answers throughout, 1 for each reward times its weight.

    Raises:
        NotMeasured: A recipe has too few rewards.
    """
    if not record.is_recipe:
        return (late_success(record) or 0.0) >= MASTERED
    rewards = record.series("rollout/reward_mean")
    given = record.setting("train.train_policy.reward_function", "one")
    full = sum(given.values()) if isinstance(given, dict) else 1 if isinstance(given, str) else len(given)
    late = median(rewards.late)
    return late > max(rewards.values[:3]) or late >= MASTERED * full


def late_success(record: Record) -> float | None:
    """Return the success rate of the late rollouts; None if it was not measured."""
    try:
        rollouts = record.rollouts()
    except NotMeasured:
        return None
    return sum_of(rollouts[-max(3, len(rollouts) // 3) :]).success_rate


def return_rises(record: Record) -> bool:
    """Return whether the return still rises: late in the run by more than half as much as before."""
    try:
        returns = record.series("rollout/return_mean")
    except NotMeasured:
        return False
    values, third = returns.values, len(returns.values) // 3
    early, middle, late = median(returns.early), median(values[third : len(values) - third]), median(returns.late)
    return late > max(returns.early) and late - middle > max(0.0, middle - early) / 2


def noise_of(series: Series) -> float:
    """Return by how much the late median of a series that stays where it is may seldom be above its first value."""
    steps = [abs(after - before) for before, after in itertools.pairwise(series.values)]
    # The median size of the difference of two normal numbers is 0.954 of their deviation. Few steps may hide it; late values show it.
    return max(3 * median(steps) / 0.954, max(series.late) - min(series.late))


def sum_of(counts: Sequence[tuple[int, Success]]) -> Success:
    """Return the sum of counts by step."""
    return Success(sum(one.successes for _, one in counts), sum(one.episodes for _, one in counts))


RULES = (
    collapsed,
    never_a_success,
    reward_misses_success,
    ratios_clipped,
    critic_diverges,
    critic_blind,
    rate_rounds_away,
    policy_stands_still,
    equal_groups,
    entropy_gone,
    entropy_explodes,
    gradient_clipped,
    lost_episodes,
    parity_near_gate,
    stale_rollouts,
    critic_dreams,
    head_saturated,
    answers_cut,
    cloning_diverges,
    cloning_stands_still,
    overfitted,
    clone_is_bound,
    data_starves,
)
