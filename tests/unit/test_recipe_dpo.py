"""The DPO trainer of recipes: references that are computed once, and the step it takes."""

import math

import pytest
import torch

from rlinf.llm.losses import DPOLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.recipes.datasets import PackedRows, Rows
from rlinf.recipes.dpo import DPOTrainer
from rlinf.recipes.samples import Sample


def packed(num_rows=5, seed=0):
    """Pairs of answers of different lengths to prompts of three tokens."""
    random = torch.Generator().manual_seed(3)
    rows = [{"ids": torch.randint(3, 48, (12,), generator=random).tolist(), "cut": 5 + i} for i in range(num_rows)]

    def pack(row):
        answers = row["ids"][3 : row["cut"]], row["ids"][row["cut"] :]
        return tuple(Sample(row["ids"][:3] + each, [False] * 3 + [True] * len(each)) for each in answers)

    return PackedRows(Rows(rows), pack, seed)


def trainer(folder, **options):
    policy = HuggingFacePolicy(folder, **{"learning_rate": 3e-3, "max_grad_norm": 1e9} | options)
    return DPOTrainer(
        policy, packed(), num_steps=4, batch_size=2, loss=DPOLossFn(beta=0.5), validation_rows=packed(seed=None)
    )


def answer_logprob(model, sample):
    logprobs = model(torch.tensor([sample.input_ids])).logits[0].log_softmax(-1)
    return sum(
        float(logprobs[place - 1, token].detach())
        for place, token in enumerate(sample.input_ids)
        if sample.token_mask[place]
    )


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_losses_are_those_of_a_slow_computation(tiny_lm, lora):
    one = trainer(tiny_lm(), lora=lora)
    reference = HuggingFacePolicy(tiny_lm()).model
    assert one.step(0).loss == pytest.approx(math.log(2), rel=1e-5)
    first = one.validate(1)
    losses, right = [], 0
    for number in range(5):
        margins = [
            answer_logprob(one.policy.model, sample) - answer_logprob(reference, sample) for sample in packed()[number]
        ]
        margin = 0.5 * (margins[0] - margins[1])
        losses.append(math.log1p(math.exp(-margin)))
        right += margin > 0
    assert first.metrics["eval/loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert first.metrics["eval/preference_accuracy"] == pytest.approx(right / 5)
    assert first.score == -first.metrics["eval/loss"]


def test_the_model_scores_the_reference_only_once(tiny_lm):
    one = trainer(tiny_lm())

    def reject(data):
        raise AssertionError("the reference was computed before")

    one.policy.get_reference_logprobs = reject
    losses = [one.step(step).loss for step in range(5)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert one.validate(5).metrics["eval/loss"] < math.log(2) - 0.05, "the second epoch knows the first one's pairs"
    assert one.validate(5).metrics["eval/preference_margin"] > 0


def test_metrics_have_the_names_of_the_tracker(tiny_lm):
    from rlinf.tracking.metrics import check_names

    one = trainer(tiny_lm())
    update = one.step(0)
    check_names(update.metrics)
    assert update.metrics["train/truncated_row_fraction"] == update.metrics["train/equal_pair_fraction"] == 0
    assert (
        "Truncated rows" not in update.shown and update.shown["Accuracy"] == update.metrics["train/preference_accuracy"]
    )
    check_names(one.validate(0).metrics)


def test_a_step_counts_the_tokens_of_both_answers_and_its_margin_is_by_hand(tiny_lm):
    one = trainer(tiny_lm())
    one.step(0)
    before, reference = HuggingFacePolicy(tiny_lm()).model, HuggingFacePolicy(tiny_lm()).model
    before.load_state_dict(one.policy.model.state_dict())
    pairs = [packed()[number] for number in one.rows.numbers(1, 2)]
    rewards = [
        [0.5 * (answer_logprob(before, each) - answer_logprob(reference, each)) for each in pair] for pair in pairs
    ]
    update = one.step(1)
    for name, values in (
        ("chosen", [chosen for chosen, _ in rewards]),
        ("rejected", [rejected for _, rejected in rewards]),
        ("margin", [chosen - rejected for chosen, rejected in rewards]),
        ("accuracy", [float(chosen > rejected) for chosen, rejected in rewards]),
    ):
        assert update.metrics[f"train/preference_{name}"] == pytest.approx(sum(values) / 2, rel=1e-3, abs=1e-5), name
    assert update.num_tokens == sum(len(each.input_ids) for pair in pairs for each in pair) and update.num_rows == 4
    assert update.loss == update.metrics["train/loss"]


def test_a_validation_may_score_fewer_pairs_at_a_time(tiny_lm):
    one = trainer(tiny_lm())
    one.step(0)
    whole = one.validate(1)
    one.validation_batch_size = 2
    parts = one.validate(1)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5) and whole.metrics["eval/loss"] != pytest.approx(
        math.log(2)
    )
    one.validation_rows = None
    assert one.validate(1) is None


def test_cut_rows_and_equal_pairs_are_in_the_metrics_and_the_line(tiny_lm):
    sample = lambda last, is_truncated: Sample([3, 4, 5, last], [False, False, True, True], is_truncated=is_truncated)  # noqa: E731
    pairs = [
        (sample(6, False), sample(7, False)),
        (sample(6, False), sample(7, True)),
        (sample(6, True), sample(6, True)),
        (sample(8, False),) * 2,
    ]
    rows = PackedRows(Rows([{"n": number} for number in range(4)]), lambda row: pairs[row["n"]], None)
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=3e-3)
    update = DPOTrainer(policy, rows, num_steps=1, batch_size=4, loss=DPOLossFn(beta=0.5)).step(0)
    assert update.metrics["train/truncated_row_fraction"] == update.metrics["train/equal_pair_fraction"] == 0.5
    assert update.shown["Truncated rows"] == update.shown["Equal pairs"] == 2
