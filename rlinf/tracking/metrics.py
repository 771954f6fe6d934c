"""Every metric name, with its meaning and unit. `docs/metrics.md` is tested against this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlinf.errors import ConfigError, did_you_mean


class Metric(NamedTuple):
    """Meaning and unit of a metric."""

    meaning: str
    unit: str


METRICS: dict[str, Metric] = {
    "rollout/success_rate": Metric("Fraction of successes among the first episodes of the envs (sampled actions).", "1"),
    "rollout/true_success_rate": Metric("The same by the simulator, where a classifier or planted errors decide.", "1"),
    "rollout/return_mean": Metric("Mean undiscounted return of these episodes.", "reward"),
    "rollout/episode_len": Metric("Mean length of these episodes.", "env steps"),
    "rollout/actions_clipped_fraction": Metric(
        "Fraction of the numbers of the actions of these episodes that lay outside the bounds of the env and were "
        "cut; a warning above 5 %.", "1"),
    "rollout/actions_max_abs": Metric("Largest magnitude of these numbers before the cut.", "env units"),
    "rollout/states_far_fraction": Metric(
        "Fraction of states beyond five half-widths of the policy's statistics; a warning above 1 %.", "1"),
    "rollout/num_episodes": Metric("First episodes of the envs, which the six above are over.", "episodes"),
    "rollout/lost_episodes": Metric(
        "Episodes that started again because their simulator was lost; their first part is not trained on, and "
        "where it was the first episode of an env, the envs of that process have no success, return and length.", "episodes"),
    "rollout/env_steps_total": Metric("Env steps executed since the run started, over all ranks.", "env steps"),
    "rollout/zero_variance_group_fraction": Metric("Fraction of groups whose returns are equal, but for rounding.", "1"),
    "rollout/logprob_gap_mean": Metric("Mean |rollout log-prob - trainer log-prob| before the update.", "nat"),
    "rollout/logprob_gap_max": Metric("Largest |rollout log-prob - trainer log-prob| before the update.", "nat"),
    "rollout/logprob_gap_exp_mean": Metric(
        "Mean of exp |rollout log-prob - trainer log-prob|; up to 1.05 is rounding of 16 bits.", "1"),
    "rollout/importance_ratio_mean": Metric(
        "Mean trainer / rollout probability of a sampled action before the update; 1 if the two agree.", "1"),
    "rollout/importance_ratio_max": Metric(
        "Largest trainer / rollout probability of a sampled action (all its tokens) before the update.", "1"),
    "rollout/staleness_iterations": Metric(
        "Iterations of training between the weights that played the rollout and those before its update; at most "
        "`cluster.max_staleness`.", "iterations"),
    "rollout/staleness_updates": Metric(
        "The same in optimiser steps. Of an actor: the most updates that the weights of an action lacked "
        "(`algorithm.overlap`).", "updates"),
    "rollout/value_gap_max": Metric(
        "Largest |rollout value - trainer value| before the update, in fractions of the largest value (of 1, where "
        "all are smaller).", "1"),
    "rollout/parity_exceeded": Metric("1 if the gap exceeded the limit and the run continued (16 bits), else 0.", "1"),
    "rollout/scored_fraction": Metric(
        "Fraction of the policy calls of a rollout that the trainer scored, under `algorithm.old_logprobs=rollout`: the sample of the "
        "parity gate; 1 where that exceeded the limit. Gaps and ratios above are over these calls.", "1"),
    "rollout/reward_mean": Metric(
        "Mean reward of the answers of a recipe, weighted sum of its parts; `rollout/reward_mean/<part>`: of a "
        "part, unweighted.", "reward"),
    "rollout/reward_std": Metric("Standard deviation of these rewards over all answers.", "reward"),
    "rollout/completion_length_mean": Metric("Mean length of an answer, with the token that ends it.", "tokens"),
    "rollout/completion_length_max": Metric("Length of the longest answer.", "tokens"),
    "rollout/truncated_fraction": Metric("Fraction of answers that reached the largest length without an end.", "1"),
    "rollout/replaced_groups": Metric("Groups of answers with equal rewards that were replaced.", "groups"),
    "rollout/base_policy_queries": Metric(
        "Observations about which the frozen policy below an actor was asked, each once, since the run started.", "observations"),
    "rollout/residual_norm": Metric(
        "Mean absolute difference of a number between the actor without noise and the greedy action of the frozen "
        "policy, in halves of the range of the env; not during the warm-up.", "1"),
    "rollout/base_action_fraction": Metric("Fraction of actions for which the critics chose an uncorrected chunk (`edit`).", "1"),
    "rollout/success_rate_offline": Metric(
        "Fraction of the demonstrations in `algorithm.offline_dataset` that succeeded.", "1"),
    "rollout/base_policy_queries_offline": Metric(
        "Observations of demonstrations about which the frozen policy was asked; 0 where its answers were on "
        "disk.", "observations"),
    "rollout/transitions": Metric("Transitions in the replay buffer that can be drawn.", "transitions"),
    "train/loss": Metric("Total loss, mean over the minibatches of the iteration.", "1"),
    "train/policy_loss": Metric("Clipped policy-gradient loss.", "1"),
    "train/value_loss": Metric("Value loss before its coefficient.", "reward^2"),
    "train/entropy": Metric(
        "Mean entropy of one action token (or action number); of a trained token of a recipe with "
        "`logging.report_entropy`.", "nat"),
    "train/approx_kl": Metric("KL(old || new) estimated as mean of ratio - 1 - log ratio (Schulman 2020, k3).", "nat"),
    "train/clip_fraction": Metric("Fraction of importance ratios at which the clipped loss is the larger one.", "1"),
    "train/outside_fraction": Metric("Fraction of importance ratios outside the clip range, on either side.", "1"),
    "train/explained_variance": Metric("1 - Var[returns - values] / Var[returns]; 1 is a perfect critic.", "1"),
    "train/grad_norm": Metric("Global gradient norm before clipping, mean over the optimiser steps.", "1"),
    "train/learning_rate": Metric("Learning rate of the policy, mean over the optimiser steps.", "1"),
    "train/kl_to_reference": Metric("Estimated KL(policy || reference policy).", "nat"),
    "train/reward_scale": Metric(
        "Number by which rewards were divided, under `algorithm.scale_rewards`: advantages, returns and value losses are in units of it.",
        "reward"),
    "train/advantage_mean": Metric("Mean advantage before normalisation.", "reward"),
    "train/return_mean": Metric(
        "Mean return of the samples: of the call (PPO, the target of the value head; REINFORCE++) or of the "
        "episode (GRPO, RLOO).", "reward"),
    "train/preference_accuracy": Metric("DPO: fraction of pairs whose chosen answer has the higher implicit reward.", "1"),
    "train/preference_chosen": Metric("DPO: mean implicit reward of the chosen answers (Rafailov et al. 2023).", "nat"),
    "train/preference_rejected": Metric("DPO: mean implicit reward of the rejected answers.", "nat"),
    "train/preference_margin": Metric("DPO: mean difference of the two.", "nat"),
    "train/equal_pair_fraction": Metric("DPO: fraction of the pairs whose two answers are equal.", "1"),
    "train/truncated_row_fraction": Metric("Fraction of the rows cut at `policy.model_max_length`.", "1"),
    "train/critic_loss": Metric("Squared error of the critics, summed over them, mean over the updates.", "reward^2"),
    "train/q_mean": Metric("Mean value that the critics give to drawn transitions.", "reward"),
    "train/q_mean_online": Metric("The same of the transitions that this run has played.", "reward"),
    "train/q_mean_offline": Metric("The same of the transitions of demonstrations.", "reward"),
    "train/target_mean": Metric("Mean target of the critics.", "reward"),
    "train/alpha": Metric("Weight of the entropy (SAC).", "reward/nat"),
    "train/action_saturation": Metric(
        "Fraction of the numbers of an actor at their bound: above about 0.5, algorithm.actor.scale is too small.", "1"),
    "train/residual_norm": Metric("Mean size of the numbers of an actor, in fractions of its scale.", "1"),
    "train/q_initial": Metric(
        "What the critics expect of the first action of the episodes above, at the time.", "reward"),
    "train/return_initial": Metric(
        "Discounted return that these episodes reached; far below train/q_initial, the critics dream. An episode "
        "that a time limit cut counts with what it had reached until then, and the critics also value what would "
        "have followed.", "reward"),
    "train/updates_total": Metric("Updates since RL started (off-policy).", "updates"),
    "sft/loss": Metric("Behaviour-cloning loss (cross-entropy of the demonstrated tokens).", "nat"),
    "sft/learning_rate": Metric("Learning rate of behaviour cloning.", "1"),
    "sft/grad_norm": Metric("Global gradient norm before clipping.", "1"),
    "sft/demonstrator_success_rate": Metric(
        "Fraction of the demonstrations that succeeded, of the scripted expert; in the first line.", "1"),
    "sft/truncated_row_fraction": Metric("As train/truncated_row_fraction, in SFT.", "1"),
    "sft/actions_beyond_statistics": Metric(
        "Largest fraction of a dimension's labels beyond the statistics; in the first line. A warning above 5 %, an error above half.", "1"),
    "sft/states_beyond_statistics": Metric("The same of the states.", "1"),
    "sft/entropy": Metric("Mean entropy of a learned token of a recipe, with `logging.report_entropy`.", "nat"),
    "eval/success_rate": Metric("successes / episodes on the fixed list of held-out episodes.", "1"),
    "eval/true_success_rate": Metric("The same by the simulator, where a classifier or planted errors decide.", "1"),
    "eval/successes": Metric("Successful evaluation episodes.", "episodes"),
    "eval/episodes": Metric("Evaluation episodes.", "episodes"),
    "eval/interval_low": Metric("Lower end of the 95 % Wilson interval of the success rate.", "1"),
    "eval/interval_high": Metric("Upper end of the 95 % Wilson interval of the success rate.", "1"),
    "eval/return_mean": Metric("Mean undiscounted return of the evaluation episodes.", "reward"),
    "eval/return_low": Metric(
        "Lower end of its 95 % interval (Student's t over the episodes); null for one episode.", "reward"),
    "eval/return_high": Metric("Upper end of that interval.", "reward"),
    "eval/loss": Metric("Loss on the validation rows of a recipe: per learned token (SFT), or per pair (DPO).", "nat"),
    "eval/reward_mean": Metric(
        "Mean reward of the most likely answers to the validation prompts; `eval/reward_mean/<part>`: of a part.", "reward"),
    "eval/reward_std": Metric("Standard deviation of these rewards.", "reward"),
    "eval/num_completions": Metric("Number of these completions.", "completions"),
    "eval/completion_length_mean": Metric("Mean length of these answers, with the token that ends it.", "tokens"),
    "eval/completion_length_max": Metric("Length of the longest of these answers.", "tokens"),
    "eval/truncated_fraction": Metric("Fraction of these answers that reached the largest length without an end.", "1"),
    "eval/preference_accuracy": Metric("As train/preference_accuracy, on the validation pairs.", "1"),
    "eval/preference_chosen": Metric("As train/preference_chosen, on the validation pairs.", "nat"),
    "eval/preference_rejected": Metric("As train/preference_rejected, on the validation pairs.", "nat"),
    "eval/preference_margin": Metric("As train/preference_margin, on the validation pairs.", "nat"),
    "time/rollout_s": Metric("Collecting the rollout.", "s"),
    "time/logprob_s": Metric("The trainer's log-probs and values of the rollout.", "s"),
    "time/update_s": Metric("Optimiser steps of the iteration.", "s"),
    "time/data_wait_s": Metric("Waiting for the rows of a step of behaviour cloning, mean of the steps logged.", "s"),
    "time/sync_s": Metric("Bringing new weights to the rollout workers.", "s"),
    "time/eval_s": Metric("Evaluation.", "s"),
    "time/cpu_s": Metric("Processor time of an iteration, of all threads of the process of rank 0.", "s"),
    "time/total_s": Metric("Training time since the run started (demonstrations, cloning, RL), no evaluation.", "s"),
    "throughput/env_steps_per_s": Metric("Env steps / time of rollout, log-probs, update and sync.", "env steps/s"),
    "throughput/samples_per_s": Metric("Policy calls trained on / time/update_s.", "samples/s"),
    "throughput/tokens_per_s": Metric(
        "Tokens of the rows of a recipe's step, without padding / time of the step.", "tokens/s"),
    "throughput/mfu": Metric(
        "Model FLOPs of these tokens / time / peak of the GPUs in bfloat16; only where the GPU's peak is known.", "1"),
    "throughput/data_wait_fraction": Metric(
        "Fraction of behaviour cloning's time that was waiting for rows, since the last line.", "1"),
    "memory/rss_gib": Metric("Resident memory of the process of rank 0.", "GiB"),
    "memory/cuda_gib": Metric("Peak GPU memory allocated by rank 0 since the run started.", "GiB"),
}  # fmt: skip


def register_metric(name: str, meaning: str, unit: str) -> None:
    """Declare another metric ``"<section>/<name>"``, such as one that an external algorithm logs; a pure number has unit "1"."""
    METRICS[name] = Metric(meaning, unit)


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ConfigError for an unknown metric name; ``<known name>/<part>`` (``eval/success_rate/reach``) is accepted."""
    for name in metrics:
        if name not in METRICS and "/".join(name.split("/")[:2]) not in METRICS:
            fix = "Declare a new one with rlinf.tracking.register_metric(name, meaning, unit)."
            raise ConfigError(f"Unknown metric '{name}'.{did_you_mean(name, METRICS)} {fix}")
