"""Direct preference optimisation for language and vision-language models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.distributed.process_group import gather_objects, sum_over_ranks
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import DPOLossFn
from rlinf.recipes.datasets import PackedRows
from rlinf.recipes.samples import Sample, collate, truncated_and_equal
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation, rank_batches, rank_slice

Pair = tuple[Sample, Sample]


class DPOTrainer(TokenTrainer):
    """Trainer on preferences between two completions (``DPOLossFn``).

    The initial weights are the reference policy; ``batch_size`` is the number of pairs per step across all ranks.
    """

    phase = "rl"

    def __init__(
        self,
        policy: HuggingFacePolicy,
        rows: PackedRows[Pair],
        *,
        num_steps: int,
        batch_size: int,
        loss: DPOLossFn,
        validation_rows: PackedRows[Pair] | None = None,
        validation_batch_size: int | None = None,
    ) -> None:
        super().__init__(policy, rows, num_steps)
        self.batch_size, self.validation_rows = batch_size, validation_rows
        self.validation_batch_size = validation_batch_size or batch_size
        self._loss = loss
        # Score now with the initial weights, which are the reference, because loading a checkpoint later replaces them.
        self._references = self._score(rows)
        self._validation_references = [] if validation_rows is None else self._score(validation_rows)

    def step(self, step: int) -> TokenUpdate:
        """Train on the next batch."""
        numbers = self.rows.numbers(step, self.batch_size)
        rank_numbers = numbers[rank_slice(len(numbers))].tolist()
        pairs = [self.rows[number] for number in rank_numbers]
        batch = self._batch(pairs, self._references, rank_numbers)
        flags = [truncated_and_equal(pair) for pair in pairs]
        counts = [float(batch["attention_mask"].sum()), *(float(sum(flag[kind] for flag in flags)) for kind in (0, 1))]
        num_tokens, num_truncated, num_equal = sum_over_ranks(counts)
        metrics: dict[str, Any] = self.policy.train(batch, self._loss)
        named = self.named(metrics, "loss", "grad_norm", "entropy") | _preference_metrics(metrics, "train")
        named["train/truncated_row_fraction"] = num_truncated / self.batch_size
        named["train/equal_pair_fraction"] = num_equal / self.batch_size
        shown = {"Accuracy": metrics["accuracy"], "Margin": metrics["reward_margin"]}
        shown |= {"Truncated rows": num_truncated, "Equal pairs": num_equal} if num_truncated or num_equal else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, 2 * self.batch_size, shown)

    def validate(self, step: int) -> Validation | None:
        """Return the loss and preference accuracy on the validation pairs."""
        if self.validation_rows is None:
            return None
        rows = self.validation_rows
        totals = torch.zeros(0)
        with self.policy.parallel.gathered():
            for numbers in rank_batches(len(rows), self.validation_batch_size):
                batch = self._batch([rows[number] for number in numbers], self._validation_references, numbers)
                output = self._loss.from_logprobs(
                    self.policy.get_logprobs(batch)["logprobs"], batch, self._loss.counts(batch)
                )
                values = torch.stack([output.loss, *(output.metrics[name] for name in sorted(output.metrics))])
                weighted = values.double() * self._loss.counts(batch).samples
                totals = weighted if not len(totals) else totals + weighted
        names = ["loss", *sorted(_METRICS)]
        # The sum is collective, so a rank without rows must still take part.
        sums = totals.tolist() if len(totals) else [0.0] * len(names)
        means = [total / len(rows) for total in sum_over_ranks(sums)]
        metrics = dict(zip(names, means, strict=True))
        text = f"loss {metrics['loss']:.6g}, accuracy {metrics['accuracy']:.4f}, margin {metrics['reward_margin']:.4f}"
        return Validation(-metrics["loss"], {"eval/loss": metrics["loss"]} | _preference_metrics(metrics, "eval"), text)

    def _batch(self, pairs: list[Pair], references: list[Tensor], numbers: Sequence[int]) -> BatchedDataDict:
        batch = collate([sample for pair in pairs for sample in pair])
        logprobs = [references[2 * number + i] for number in numbers for i in range(2)]
        batch["reference_logprobs"] = pad_sequence(logprobs, batch_first=True)
        return batch

    def _score(self, rows: PackedRows[Pair]) -> list[Tensor]:
        """Return the log-probabilities ``[S]`` of all samples, alternating chosen and rejected, on every rank."""
        local: list[Tensor] = []
        with self.policy.parallel.gathered():
            for numbers in rank_batches(len(rows), self.batch_size):
                samples = [sample for number in numbers for sample in rows[number]]
                scores = self.policy.get_logprobs(collate(samples))["logprobs"].cpu()
                # Clone, because a view would hold the padded batch in memory.
                local += [row[: len(sample.input_ids)].clone() for row, sample in zip(scores, samples, strict=True)]
        return [logprobs for part in gather_objects(local) for logprobs in part]


_METRICS = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin")


def _preference_metrics(metrics: dict[str, Any], section: str) -> dict[str, float]:
    return {f"{section}/preference_{name.removeprefix('reward_')}": metrics[name] for name in _METRICS}
