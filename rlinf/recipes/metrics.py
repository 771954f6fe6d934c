"""Metrics of recipes; importing this module declares them."""

from rlinf.tracking.metrics import METRICS, Metric

METRICS |= {
    "rollout/reward_mean": Metric(
        "Mean reward of a recipe's completions, the weighted sum of its parts; `rollout/reward_mean/<part>` is the mean of "
        "one part, unweighted.", "reward"),
    "rollout/reward_std": Metric("Std of these rewards over all completions.", "reward"),
    "rollout/completion_length_mean": Metric("Mean length of a completion, including the end token.", "tokens"),
    "rollout/completion_length_max": Metric("Length of the longest completion.", "tokens"),
    "rollout/truncated_fraction": Metric("Fraction of completions truncated at the maximum length.", "1"),
    "rollout/replaced_groups": Metric("Number of groups replaced because all completions had equal rewards.", "groups"),
    "train/preference_accuracy": Metric("DPO: fraction of pairs whose chosen completion has the higher implicit reward.", "1"),
    "train/preference_chosen": Metric("DPO: mean implicit reward of the chosen completions (Rafailov et al. 2023).", "nat"),
    "train/preference_rejected": Metric("DPO: mean implicit reward of the rejected completions.", "nat"),
    "train/preference_margin": Metric("DPO: mean difference between the two.", "nat"),
    "train/equal_pair_fraction": Metric("DPO: fraction of pairs with identical completions.", "1"),
    "train/truncated_row_fraction": Metric("Fraction of rows truncated at `policy.model_max_length`.", "1"),
    "sft/truncated_row_fraction": Metric("As train/truncated_row_fraction, during SFT.", "1"),
    "sft/entropy": Metric("Mean entropy per learned token in recipes with `logging.report_entropy`.", "nat"),
    "eval/loss": Metric("Loss on the validation rows of a recipe: per learned token (SFT), or per pair (DPO).", "nat"),
    "eval/reward_mean": Metric(
        "Mean reward of greedy completions of the validation prompts; `eval/reward_mean/<part>` is the mean of one part.", "reward"),
    "eval/reward_std": Metric("Std of these rewards.", "reward"),
    "eval/num_completions": Metric("Number of these completions.", "completions"),
    "eval/completion_length_mean": Metric("Mean length of these completions, including the end token.", "tokens"),
    "eval/completion_length_max": Metric("Length of the longest of these completions.", "tokens"),
    "eval/truncated_fraction": Metric("Fraction of these completions truncated at the maximum length.", "1"),
    "eval/preference_accuracy": Metric("As train/preference_accuracy, on the validation pairs.", "1"),
    "eval/preference_chosen": Metric("As train/preference_chosen, on the validation pairs.", "nat"),
    "eval/preference_rejected": Metric("As train/preference_rejected, on the validation pairs.", "nat"),
    "eval/preference_margin": Metric("As train/preference_margin, on the validation pairs.", "nat"),
    "throughput/tokens_per_s": Metric(
        "Tokens in the rows of a recipe step, without padding / time of the step.", "tokens/s"),
    "throughput/mfu": Metric(
        "Model FLOPs for these tokens / time / peak bfloat16 FLOPS of the GPUs; only if the GPU's peak is known.", "1"),
}  # fmt: skip
