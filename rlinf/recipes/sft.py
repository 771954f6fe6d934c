"""Supervised fine-tuning for language and vision-language models."""

import math
from collections.abc import Callable
from typing import Any

from rlinf.data.rows import Prefetcher
from rlinf.distributed.process_group import rank, sum_over_ranks, world_size
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import NLLLossFn, trained_tokens
from rlinf.recipes.datasets import PackedRows, StreamedRows
from rlinf.recipes.samples import Sample, collate
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation, rank_batches


class SFTTrainer(TokenTrainer):
    """Trainer that maximises the likelihood of the learned tokens.

    The loss is the mean over all learned tokens in the complete batch, so it does not depend on micro-batches, packing or ranks.
    ``num_workers`` threads prefetch batches, except for streams.
    """

    phase = "sft"

    def __init__(
        self,
        policy: HuggingFacePolicy,
        rows: PackedRows[Sample] | StreamedRows[Sample],
        *,
        num_steps: int,
        batch_size: int,
        validation_rows: PackedRows[Sample] | None = None,
        validation_batch_size: int | None = None,
        num_workers: int = 0,
        completion_validation: Callable[[int], Validation] | None = None,
    ) -> None:
        super().__init__(policy, rows, num_steps)
        self.batch_size, self.validation_rows = batch_size, validation_rows
        self.completion_validation = completion_validation
        self.validation_batch_size = validation_batch_size or batch_size
        # A stream must be read in order, which threads would not preserve.
        self.num_workers = num_workers if isinstance(rows, PackedRows) else 0
        self._loss = NLLLossFn()
        self._batches: Prefetcher[tuple[BatchedDataDict, float]] | None = None

    def step(self, step: int) -> TokenUpdate:
        """Train on the next batch."""
        if self._batches is None:
            self._batches = Prefetcher(self._read, step, self.num_workers)
        batch, num_truncated = self._batches.next()
        num_tokens, num_truncated = sum_over_ranks([float(batch["attention_mask"].sum()), num_truncated])
        metrics: dict[str, Any] = self.policy.train(batch, self._loss)
        named = self.named(metrics, "loss", "grad_norm", "entropy")
        named["sft/truncated_row_fraction"] = num_truncated / self.batch_size
        shown = {"Truncated rows": num_truncated} if num_truncated else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, self.batch_size, shown)

    def validate(self, step: int) -> Validation | None:
        """Return the validation loss and, if enabled, the result of ``completion_validation``, which then defines the score."""
        parts = [] if self.validation_rows is None else [self._validation_loss(self.validation_rows)]
        if self.completion_validation is not None:
            parts.append(self.completion_validation(step))
        if not parts:
            return None
        metrics = {name: value for part in parts for name, value in part.metrics.items()}
        return Validation(parts[-1].score, metrics, ", ".join(part.text for part in parts), parts[-1].samples)

    def close(self) -> None:
        """Stop the prefetching threads."""
        if self._batches is not None:
            self._batches.__exit__()

    def _read(self, step: int) -> tuple[BatchedDataDict, float]:
        """Return this rank's batch, and the number of truncated rows in it."""
        samples = self.rows.batch(step, self.batch_size, rank(), world_size())
        return collate(samples), float(sum(sample.is_truncated for sample in samples))

    def _validation_loss(self, rows: PackedRows[Sample]) -> Validation:
        total = count = 0.0
        with self.policy.parallel.gathered():
            for numbers in rank_batches(len(rows), self.validation_batch_size):
                batch = collate([rows[number] for number in numbers])
                mask = trained_tokens(batch)
                total -= float(self.policy.get_logprobs(batch)["logprobs"][mask].double().sum())
                count += float(mask.sum())
        total, count = sum_over_ranks([total, count])
        loss = total / count if count else math.nan
        return Validation(-loss, {"eval/loss": loss}, f"loss {loss:.6g}")
