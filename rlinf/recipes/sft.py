"""Supervised fine-tuning of language and vision-language models."""

from __future__ import annotations

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
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation, own_share


class SFTTrainer(TokenTrainer):
    """Maximum likelihood of the learned tokens.

    The loss of a step is the mean over the learned tokens of its whole batch, so neither micro-batches, nor packing, nor ranks
    change it.

    Args:
        batch_size: Rows of one step, over all ranks.
        validation_batch_size: Rows that a rank scores together; None: ``batch_size``.
        num_workers: Threads that prepare batches ahead; a streamed dataset is read without.
        answers: Evaluates completions, beside the loss of the validation rows; None: nothing does.
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
        answers: Callable[[int], Validation] | None = None,
    ) -> None:
        super().__init__(policy, rows, num_steps)
        self.batch_size, self.validation_rows, self.answers = batch_size, validation_rows, answers
        self.validation_batch_size = validation_batch_size or batch_size
        self.num_workers = num_workers if isinstance(rows, PackedRows) else 0
        self._loss = NLLLossFn()
        self._batches: Prefetcher[tuple[BatchedDataDict, float]] | None = None

    def step(self, step: int) -> TokenUpdate:
        """Train on the next batch."""
        if self._batches is None:
            self._batches = Prefetcher(self._read, step, self.num_workers)
        batch, num_cut = self._batches.next()
        num_tokens, num_cut = sum_over_ranks([float(batch["attention_mask"].sum()), num_cut])
        metrics: dict[str, Any] = self.policy.train(batch, self._loss)
        named = {f"sft/{name}": metrics[name] for name in ("loss", "grad_norm", "entropy") if name in metrics}
        named |= {name: value for name, value in metrics.items() if name.startswith("memory/")}
        named["sft/cut_row_fraction"] = num_cut / self.batch_size
        shown = {"Cut rows": num_cut} if num_cut else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, self.batch_size, shown)

    def validate(self, step: int) -> Validation | None:
        """Return the loss on the validation rows, and what ``answers`` finds."""
        parts = [] if self.validation_rows is None else [self._validation_loss(self.validation_rows)]
        if self.answers is not None:
            parts.append(self.answers(step))
        if not parts:
            return None
        metrics = {name: value for part in parts for name, value in part.metrics.items()}
        return Validation(parts[-1].score, metrics, ", ".join(part.text for part in parts), parts[-1].samples)

    def close(self) -> None:
        """Stop the threads that read ahead."""
        if self._batches is not None:
            self._batches.__exit__()

    def _read(self, step: int) -> tuple[BatchedDataDict, float]:
        """Return the batch of this rank, and how many of its rows are cut."""
        samples = self.rows.batch(step, self.batch_size, rank(), world_size())
        return collate(samples), float(sum(sample.is_cut for sample in samples))

    def _validation_loss(self, rows: PackedRows[Sample]) -> Validation:
        share = own_share(len(rows))
        total = count = 0.0
        with self.policy.parallel.whole():
            for start in range(share.start, share.stop, self.validation_batch_size):
                stop = min(start + self.validation_batch_size, share.stop)
                batch = collate([rows[row] for row in range(start, stop)])
                mask = trained_tokens(batch)
                total -= float(self.policy.get_logprobs(batch)["logprobs"][mask].double().sum())
                count += float(mask.sum())
        total, count = sum_over_ranks([total, count])
        loss = total / count if count else math.nan
        return Validation(-loss, {"eval/loss": loss}, f"loss {loss:.6g}")
