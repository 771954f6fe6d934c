"""Direct preference optimisation of language and vision-language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.distributed.process_group import gather_objects, sum_over_ranks
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import DPOLossFn
from rlinf.recipes.datasets import PackedRows
from rlinf.recipes.samples import Sample, collate, cut_and_equal
from rlinf.recipes.token_trainer import TokenTrainer, TokenUpdate, Validation, own_share

Pair = tuple[Sample, Sample]


class DPOTrainer(TokenTrainer):
    """Preferences between two answers (``DPOLossFn``).

    The log-probabilities of the reference are computed once, for all rows, when the trainer is made: before the state of a checkpoint is
    loaded.

    Args:
        policy: Trained; now it is the reference.
        rows: Pairs of the chosen and the rejected sample.
        batch_size: Pairs of one step, over all ranks.
        validation_batch_size: Pairs that a rank scores together; None: ``batch_size``.
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
        self._references = self._score(rows)
        self._validation_references = [] if validation_rows is None else self._score(validation_rows)

    def step(self, step: int) -> TokenUpdate:
        """Train on the next batch."""
        numbers = self.rows.numbers(step, self.batch_size)
        share = own_share(len(numbers))
        own = numbers[share].tolist()
        pairs = [self.rows[number] for number in own]
        batch = self._batch(pairs, self._references, own)
        flags = [cut_and_equal(pair) for pair in pairs]
        counts = [float(batch["attention_mask"].sum()), *(float(sum(flag[kind] for flag in flags)) for kind in (0, 1))]
        num_tokens, num_cut, num_equal = sum_over_ranks(counts)
        metrics: dict[str, Any] = self.policy.train(batch, self._loss)
        named = {f"train/{name}": metrics[name] for name in ("loss", "grad_norm", "entropy") if name in metrics}
        named |= _preference_metrics(metrics, "train")
        named |= {name: value for name, value in metrics.items() if name.startswith("memory/")}
        named["train/cut_row_fraction"] = num_cut / self.batch_size
        named["train/equal_pair_fraction"] = num_equal / self.batch_size
        shown = {"Accuracy": metrics["accuracy"], "Margin": metrics["reward_margin"]}
        shown |= {"Cut rows": num_cut, "Equal pairs": num_equal} if num_cut or num_equal else {}
        return TokenUpdate(metrics["loss"], named, num_tokens, 2 * self.batch_size, shown)

    def validate(self, step: int) -> Validation | None:
        """Return the loss and the fraction of right preferences on the validation pairs."""
        if self.validation_rows is None:
            return None
        rows = self.validation_rows
        share = own_share(len(rows))
        totals = torch.zeros(0)
        with self.policy.parallel.gathered():
            for start in range(share.start, share.stop, self.validation_batch_size):
                numbers = list(range(start, min(start + self.validation_batch_size, share.stop)))
                batch = self._batch([rows[number] for number in numbers], self._validation_references, numbers)
                output = self._loss.from_logprobs(
                    self.policy.get_logprobs(batch)["logprobs"], batch, self._loss.counts(batch)
                )
                values = torch.stack([output.loss, *(output.metrics[name] for name in sorted(output.metrics))])
                weighted = values.double() * self._loss.counts(batch).samples
                totals = weighted if not len(totals) else totals + weighted
        names = ["loss", *sorted(_METRICS)]
        sums = totals.tolist() if len(totals) else [0.0] * len(names)
        means = [total / len(rows) for total in sum_over_ranks(sums)]
        metrics = dict(zip(names, means, strict=True))
        text = f"loss {metrics['loss']:.6g}, accuracy {metrics['accuracy']:.4f}, margin {metrics['reward_margin']:.4f}"
        return Validation(-metrics["loss"], {"eval/loss": metrics["loss"]} | _preference_metrics(metrics, "eval"), text)

    def _batch(self, pairs: list[Pair], references: list[Tensor], numbers: list[int]) -> BatchedDataDict:
        batch = collate([sample for pair in pairs for sample in pair])
        kept = [references[2 * number + i] for number in numbers for i in range(2)]
        batch["reference_logprobs"] = pad_sequence(kept, batch_first=True)
        return batch

    def _score(self, rows: PackedRows[Pair]) -> list[Tensor]:
        """Return the log-probabilities ``[S]`` of all chosen and rejected samples, in turn, on every rank."""
        share, own = own_share(len(rows)), []
        with self.policy.parallel.gathered():
            for start in range(share.start, share.stop, self.batch_size):
                numbers = range(start, min(start + self.batch_size, share.stop))
                samples = [sample for number in numbers for sample in rows[number]]
                scores = self.policy.get_logprobs(collate(samples))["logprobs"].cpu()
                own += [row[: len(each.input_ids)].clone() for row, each in zip(scores, samples, strict=True)]
        return [each for part in gather_objects(own) for each in part]


_METRICS = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin")


def _preference_metrics(metrics: dict[str, Any], section: str) -> dict[str, float]:
    return {f"{section}/preference_{name.removeprefix('reward_')}": metrics[name] for name in _METRICS}
