"""The supervised trainer of recipes: the loss of a step, its schedule and its speed."""

import pytest
import torch

from rlinf.models import HuggingFacePolicy
from rlinf.recipes.datasets import PackedRows, Rows
from rlinf.recipes.samples import Sample
from rlinf.recipes.sft import SFTTrainer
from rlinf.recipes.token_trainer import Validation

LENGTHS = (9, 3, 6, 2, 12, 5, 7, 4)


def packed(seed=0):
    """Eight rows of different lengths, of which the second half is learned."""
    random = torch.Generator().manual_seed(3)
    rows = [{"ids": torch.randint(3, 48, (length,), generator=random).tolist()} for length in LENGTHS]

    def pack(row):
        ids = row["ids"]
        return Sample(ids, [place >= len(ids) // 2 for place in range(len(ids))])

    return PackedRows(Rows(rows), pack, seed)


def trainer(folder, rows=None, **options):
    policy = HuggingFacePolicy(folder, **{"learning_rate": 1e-2, "max_grad_norm": 1e9} | options)
    return SFTTrainer(policy, rows or packed(), num_steps=4, batch_size=4)


def weights(one):
    return torch.cat([p.detach().flatten() for p in one.policy.model.parameters()])


def test_the_loss_of_a_step_is_the_mean_over_its_learned_tokens(tiny_lm):
    rows = packed()
    one = trainer(tiny_lm(), rows)
    model = HuggingFacePolicy(tiny_lm()).model
    total = count = 0
    for sample in rows.batch(0, 4):
        logprobs = model(torch.tensor([sample.input_ids])).logits[0].log_softmax(-1)
        for place in range(1, len(sample.input_ids)):
            if sample.token_mask[place]:
                total -= float(logprobs[place - 1, sample.input_ids[place]])
                count += 1
    update = one.step(0)
    assert update.loss == pytest.approx(total / count, rel=1e-5)
    assert update.num_tokens == sum(len(sample.input_ids) for sample in rows.batch(0, 4))
    lengths = [len(sample.input_ids) for sample in rows.batch(0, 4)]
    assert len(set(lengths)) > 1, "a mean of means would differ"


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 1},
        {"max_tokens_per_microbatch": 16, "sequence_packing": True},
        {"gradient_checkpointing": True},
    ],
    ids=["micro-batches", "packed", "checkpointed"],
)
def test_how_a_batch_is_cut_changes_nothing(tiny_lm, options):
    whole, cut = trainer(tiny_lm()), trainer(tiny_lm(), **options)
    for step in range(2):
        assert cut.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-5)
    change = weights(whole) - torch.cat([p.flatten() for p in HuggingFacePolicy(tiny_lm()).model.parameters()])
    assert (weights(cut) - weights(whole)).norm() < 1e-3 * change.norm()
    other = trainer(tiny_lm(), packed(seed=1))
    assert other.step(0).loss != pytest.approx(trainer(tiny_lm()).step(0).loss, rel=1e-3), "other rows, another loss"


def test_threads_that_read_ahead_change_no_row(tiny_lm):
    one, ahead = trainer(tiny_lm()), trainer(tiny_lm())
    ahead.num_workers = 2
    assert [ahead.step(step).loss for step in range(3)] == [one.step(step).loss for step in range(3)]
    ahead.close()


def test_validation_is_the_mean_over_all_learned_tokens(tiny_lm):
    policy = HuggingFacePolicy(tiny_lm())
    rows = packed(seed=None)
    large, small = (SFTTrainer(policy, rows, num_steps=1, batch_size=size, validation_rows=rows) for size in (8, 3))
    result = large.validate(0)
    assert small.validate(0).metrics["eval/loss"] == pytest.approx(result.metrics["eval/loss"], rel=1e-6)
    assert result.metrics["eval/loss"] == pytest.approx(large.step(0).loss, rel=1e-5)
    assert result.score == -result.metrics["eval/loss"]
    assert trainer(tiny_lm()).validate(0) is None


def test_answers_are_evaluated_besides_the_loss_and_give_the_score(tiny_lm):
    found = Validation(0.75, {"eval/reward_mean": 0.75}, "reward 0.75", [{"completion": "x"}])
    both = SFTTrainer(
        HuggingFacePolicy(tiny_lm()),
        packed(),
        num_steps=1,
        batch_size=4,
        validation_rows=packed(),
        completion_validation=lambda step: found,
    )
    result = both.validate(0)
    assert result.score == 0.75 and result.samples == found.samples
    assert result.metrics.keys() == {"eval/loss", "eval/reward_mean"} and result.text.endswith(", reward 0.75")
    both.validation_rows = None
    assert both.validate(0).metrics == found.metrics


def test_a_step_counts_rows_and_gradients(tiny_lm):
    update = trainer(tiny_lm()).step(0)
    assert update.num_rows == 4 and update.metrics["sft/loss"] == update.loss and update.metrics["sft/grad_norm"] > 0


def test_cut_rows_are_in_the_metrics_and_the_line(tiny_lm):
    rows = Rows([{"n": number} for number in range(8)])
    pack = lambda row: Sample([5, 6, 7], [False, True, True], is_truncated=row["n"] == 2)  # noqa: E731
    one = trainer(tiny_lm(), PackedRows(rows, pack, None))
    first, second = one.step(0), one.step(1)
    assert first.metrics["sft/truncated_row_fraction"] == 0.25 and list(first.shown.values()) == [1]
    assert second.metrics["sft/truncated_row_fraction"] == 0 and not second.shown, "control"
