"""Names, meanings and units of all metrics; a test compares `docs/metrics.md` with this table."""

from collections.abc import Mapping
from typing import NamedTuple

from rlinf.errors import ConfigError, did_you_mean


class Metric(NamedTuple):
    """Meaning and unit of a metric."""

    meaning: str
    unit: str


METRICS: dict[str, Metric] = {
    "rollout/success_rate": Metric("Success rate over each env's first episode (sampled actions).", "1"),
    "rollout/true_success_rate": Metric("Success rate reported by the simulator, if a classifier detects success.", "1"),
    "rollout/return_mean": Metric("Mean undiscounted return of these episodes.", "reward"),
    "rollout/episode_len": Metric("Mean length of these episodes.", "env steps"),
    "rollout/actions_clipped_fraction": Metric(
        "Fraction of action values in these episodes that were clipped to the env's bounds; warns above 5 %.", "1"),
    "rollout/actions_max_abs": Metric("Maximum magnitude of these action values before clipping.", "env units"),
    "rollout/states_far_fraction": Metric(
        "Fraction of states outside five half-widths of the policy's statistics; warns above 1 %.", "1"),
    "rollout/num_episodes": Metric("Number of first episodes used for the metrics above.", "episodes"),
    "rollout/lost_episodes": Metric(
        "Episodes restarted because their simulator was lost; the part before the loss is not trained on, and lost first episodes are "
        "excluded above.", "episodes"),
    "rollout/env_steps_total": Metric("Env steps executed since the run started, across all ranks.", "env steps"),
    "rollout/zero_variance_group_fraction": Metric("Fraction of groups with equal returns, up to rounding.", "1"),
    "rollout/logprob_gap_mean": Metric("Mean |rollout log-prob - trainer log-prob| before the update.", "nat"),
    "rollout/logprob_gap_max": Metric("Maximum |rollout log-prob - trainer log-prob| before the update.", "nat"),
    "rollout/logprob_gap_exp_mean": Metric(
        "Mean of exp |rollout log-prob - trainer log-prob|; values up to 1.05 are due to 16-bit rounding.", "1"),
    "rollout/importance_ratio_mean": Metric(
        "Mean trainer / rollout probability of a sampled action before the update; 1 if the two agree.", "1"),
    "rollout/importance_ratio_max": Metric(
        "Maximum trainer / rollout probability of a sampled action (all its tokens) before the update.", "1"),
    "rollout/staleness_iterations": Metric(
        "Training iterations between the rollout's weights and the weights just before its update; at most "
        "`cluster.max_staleness`.", "iterations"),
    "rollout/staleness_updates": Metric(
        "Staleness in optimiser steps; for an actor, the maximum over its actions (`algorithm.overlap`).", "updates"),
    "rollout/value_gap_max": Metric(
        "Maximum |rollout value - trainer value| before the update, relative to the maximum value (at least 1).", "1"),
    "rollout/parity_exceeded": Metric("1 if the gap exceeded the limit and the run continued (16-bit precision), otherwise 0.", "1"),
    "rollout/scored_fraction": Metric(
        "Fraction of a rollout's policy calls that the trainer scored, with `algorithm.old_logprobs=rollout`; 1 if the parity "
        "limit was exceeded. The gaps and ratios above are computed over these calls.", "1"),
    "rollout/base_policy_queries": Metric("Observations processed by an actor's base policy since the run started.", "observations"),
    "rollout/residual_norm": Metric(
        "Mean absolute difference between the actor's action without noise and the base policy's greedy action, normalised; not "
        "logged during warm-up.", "1"),
    "rollout/base_action_fraction": Metric(
        "Fraction of actions for which the critics chose an unmodified base-policy chunk (`expo`).", "1"),
    "rollout/success_rate_offline": Metric(
        "Fraction of the demonstrations in `algorithm.offline_dataset` that succeeded.", "1"),
    "rollout/base_policy_queries_offline": Metric(
        "Observations of demonstrations processed by the base policy; 0 if its outputs were cached.", "observations"),
    "rollout/transitions": Metric("Transitions in the replay buffer that can be sampled.", "transitions"),
    "train/loss": Metric("Total loss, averaged over the iteration's minibatches.", "1"),
    "train/policy_loss": Metric("Clipped policy-gradient loss.", "1"),
    "train/value_loss": Metric("Value loss, before multiplication by its coefficient.", "reward^2"),
    "train/entropy": Metric(
        "Mean entropy per action token or dimension; in recipes with `logging.report_entropy`, per trained token.", "nat"),
    "train/approx_kl": Metric("KL(old || new) estimated as mean of ratio - 1 - log ratio (Schulman 2020, k3).", "nat"),
    "train/clip_fraction": Metric("Fraction of importance ratios for which the clipped loss is larger than the unclipped loss.", "1"),
    "train/outside_fraction": Metric("Fraction of importance ratios outside the clip range, on either side.", "1"),
    "train/explained_variance": Metric("1 - Var[returns - values] / Var[returns]; 1 for a perfect critic.", "1"),
    "train/grad_norm": Metric("Global gradient norm before clipping, averaged over optimiser steps.", "1"),
    "train/learning_rate": Metric("Learning rate of the policy, averaged over optimiser steps.", "1"),
    "train/kl_to_reference": Metric("Estimated KL(policy || reference policy).", "nat"),
    "train/reward_scale": Metric(
        "Divisor of rewards with `algorithm.scale_rewards`; advantages, returns and value losses use scaled rewards.", "reward"),
    "train/advantage_mean": Metric("Mean advantage before normalisation.", "reward"),
    "train/return_mean": Metric(
        "Mean return of the samples: per policy call (PPO, where it is the value head's target; REINFORCE++) or per "
        "episode (GRPO, RLOO).", "reward"),
    "train/critic_loss": Metric("Squared error summed over critics and averaged over updates.", "reward^2"),
    "train/q_mean": Metric("Mean value of the sampled transitions.", "reward"),
    "train/q_mean_online": Metric("Mean value of sampled transitions collected in this run.", "reward"),
    "train/q_mean_offline": Metric("Mean value of sampled transitions from demonstrations.", "reward"),
    "train/target_mean": Metric("Mean target of the critics.", "reward"),
    "train/alpha": Metric("Entropy coefficient (SAC).", "reward/nat"),
    "train/action_saturation": Metric(
        "Fraction of actor outputs at their bound; above about 0.5, algorithm.actor.scale is too small.", "1"),
    "train/residual_norm": Metric("Mean absolute output of the actor, as a fraction of its scale.", "1"),
    "train/q_initial": Metric("Mean value of the first action in the episodes above, as predicted by the critics at that time.", "reward"),
    "train/return_initial": Metric(
        "Mean discounted return of these episodes; if it is far below train/q_initial, the critics overestimate. For truncated "
        "episodes, the return so far is used.", "reward"),
    "train/updates_total": Metric("Updates since RL started (off-policy).", "updates"),
    "sft/loss": Metric("Behaviour-cloning loss (cross-entropy of the demonstrated tokens).", "nat"),
    "sft/learning_rate": Metric("Learning rate of behaviour cloning.", "1"),
    "sft/grad_norm": Metric("Global gradient norm before clipping.", "1"),
    "sft/demonstrator_success_rate": Metric(
        "Fraction of the scripted expert's demonstrations that succeeded; first line only.", "1"),
    "sft/actions_beyond_statistics": Metric(
        "Maximum fraction of an action dimension's labels outside the statistics; first line only. Warns above 5 %, fails above "
        "half.", "1"),
    "sft/states_beyond_statistics": Metric("Maximum fraction of a state dimension's values outside the statistics; first line only.", "1"),
    "eval/success_rate": Metric("successes / episodes on the fixed list of held-out episodes.", "1"),
    "eval/true_success_rate": Metric("Success rate reported by the simulator, if a classifier detects success.", "1"),
    "eval/successes": Metric("Number of successful evaluation episodes.", "episodes"),
    "eval/episodes": Metric("Number of evaluation episodes.", "episodes"),
    "eval/interval_low": Metric("Lower end of the 95 % Wilson interval of the success rate.", "1"),
    "eval/interval_high": Metric("Upper end of the 95 % Wilson interval of the success rate.", "1"),
    "eval/return_mean": Metric("Mean undiscounted return of the evaluation episodes.", "reward"),
    "eval/return_low": Metric(
        "Lower end of its 95 % interval (Student's t over the episodes); null for one episode.", "reward"),
    "eval/return_high": Metric("Upper end of that interval.", "reward"),
    "time/rollout_s": Metric("Time to collect the rollout.", "s"),
    "time/logprob_s": Metric("Time to compute the trainer's log-probs and values for the rollout.", "s"),
    "time/update_s": Metric("Time for the iteration's optimiser steps.", "s"),
    "time/data_wait_s": Metric("Time spent waiting for a behaviour-cloning batch, averaged over the logged steps.", "s"),
    "time/sync_s": Metric("Time to push new weights to the rollout workers.", "s"),
    "time/eval_s": Metric("Evaluation.", "s"),
    "time/cpu_s": Metric("CPU time of all threads of rank 0 in an iteration.", "s"),
    "time/total_s": Metric("Training time since the run started (demonstrations, behaviour cloning and RL), excluding evaluation.", "s"),
    "throughput/env_steps_per_s": Metric("Env steps / time of rollout, log-probs, update and sync.", "env steps/s"),
    "throughput/samples_per_s": Metric("Policy calls trained on / time/update_s.", "samples/s"),
    "throughput/data_wait_fraction": Metric("Fraction of behaviour-cloning time spent waiting for batches since the last line.", "1"),
    "memory/rss_gib": Metric("Resident memory of rank 0's process.", "GiB"),
    "memory/cuda_gib": Metric("Peak GPU memory allocated by rank 0 since the run started.", "GiB"),
}  # fmt: skip


def register_metric(name: str, meaning: str, unit: str) -> None:
    """Declare a new metric ``"<section>/<name>"``, e.g. for a plug-in algorithm; use "1" as the unit of dimensionless values."""
    METRICS[name] = Metric(meaning, unit)


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ConfigError for unknown metric names; ``<known name>/<part>`` (e.g. ``eval/success_rate/reach``) is accepted."""
    for name in metrics:
        if name not in METRICS and "/".join(name.split("/")[:2]) not in METRICS:
            fix = "Declare a new one with rlinf.tracking.register_metric(name, meaning, unit)."
            raise ConfigError(f"Unknown metric '{name}'.{did_you_mean(name, METRICS)} {fix}")
