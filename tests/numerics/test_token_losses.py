"""Losses of token policies by hand, and their independence of how a batch is cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.errors import ConfigError
from rlinf.llm.losses import TokenCounts, trained_tokens

LOG = math.log


def batch_of(lengths, **extra) -> BatchedDataDict:
    widest = max(lengths)
    mask = torch.arange(widest) < torch.tensor(lengths).unsqueeze(1)
    return BatchedDataDict({"input_ids": mask.long(), "attention_mask": mask.long(), **extra})


def value(loss_fn, logprobs, data) -> float:
    return loss_fn.from_logprobs(torch.tensor(logprobs), data, loss_fn.counts(data)).loss.item()


def test_all_tokens_but_the_first_are_trained_on_by_default():
    assert trained_tokens(batch_of([3, 2])).tolist() == [[False, True, True], [False, True, False]]


def test_masks_take_tokens_and_rows_away():
    data = batch_of([3, 3], token_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]), sample_mask=torch.tensor([1, 0]))
    assert trained_tokens(data).tolist() == [[False, False, True], [False] * 3]


def test_of_a_generation_the_response_is_trained_on():
    data = BatchedDataDict({"output_ids": torch.ones(2, 4, dtype=torch.long), "generation_lengths": torch.tensor([1, 2]),
                            "unpadded_sequence_lengths": torch.tensor([4, 3])})  # fmt: skip
    assert trained_tokens(data).tolist() == [[False, False, False, True], [False, True, True, False]]


def test_of_a_generation_that_was_cut_short_only_the_response_is_trained_on():
    data = BatchedDataDict({"output_ids": torch.ones(2, 6, dtype=torch.long), "generation_lengths": torch.tensor([3, 1]),
                            "unpadded_sequence_lengths": torch.tensor([6, 5])})  # fmt: skip
    data.truncate_tensors(1, 4)
    assert trained_tokens(data).tolist() == [[False, False, False, True], [False] * 4]


def test_a_batch_that_trains_on_nothing_is_refused():
    data = batch_of([2], sample_mask=torch.tensor([0]))
    with pytest.raises(ConfigError, match="sample_mask"):
        value(NLLLossFn(), [[0.0, -1.0]], data)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    with pytest.raises(ConfigError, match="Row 0 has no tokens"):
        NLLLossFn()(None, {"input_ids": nothing, "attention_mask": nothing})
    assert NLLLossFn().counts({"input_ids": nothing, "attention_mask": nothing}).tokens == 0


def test_a_mask_of_booleans_is_left_as_it_is():
    data = BatchedDataDict({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 3).bool()})
    assert trained_tokens(data).tolist() == [[False, True, True]]
    assert data["attention_mask"].all()


def test_a_loss_that_runs_the_model_divides_its_logits_by_the_temperature(tiny_lm):
    """Without a temperature by 1, so that the loss is the cross-entropy of the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    data = batch_of([4, 3])
    data["input_ids"] *= torch.tensor([[5, 7, 9, 11], [6, 8, 10, 0]])
    with torch.no_grad():
        logits = model(**data).logits[:, :-1]
        for loss_fn, temperature in ((NLLLossFn(), 1.0), (NLLLossFn(temperature=2.0), 2.0)):
            chosen = (logits / temperature).log_softmax(-1).gather(2, data["input_ids"][:, 1:, None]).squeeze(-1)
            expected = -(chosen[0].sum() + chosen[1, :2].sum()) / 5
            assert loss_fn(model, data).item() == pytest.approx(expected.item(), rel=1e-4)


def preference_batch(reference):
    return batch_of([3, 2], reference_logprobs=torch.tensor(reference))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_dpo_by_hand(label_smoothing):
    data = preference_batch([[0.0, -2.0, -2.0], [0.0, -1.0, 0.0]])
    loss_fn = DPOLossFn(beta=0.5, label_smoothing=label_smoothing)
    output = loss_fn.from_logprobs(torch.tensor([[0.0, -1.0, -1.0], [0.0, -2.0, 0.0]]), data, loss_fn.counts(data))
    # Rewards: 0.5 * 2 for the chosen row, 0.5 * -1 for the rejected one.
    expected = (1 - label_smoothing) * LOG(1 + math.exp(-1.5)) + label_smoothing * LOG(1 + math.exp(1.5))
    assert output.loss.item() == pytest.approx(expected)
    metrics = {name: number.item() for name, number in output.metrics.items()}
    assert metrics == pytest.approx({"accuracy": 1, "reward_chosen": 1, "reward_rejected": -0.5, "reward_margin": 1.5})


def test_dpo_averages_over_pairs_and_a_tie_is_not_accurate():
    """Margins 0.5, 0 and -2: one of three is right. Rewards are a tenth of the log-ratios by default."""
    rows = [[0.0, -5.0], [0.0, -10.0], [0.0, -3.0], [0.0, -3.0], [0.0, -20.0], [0.0, 0.0]]
    data = batch_of([2] * 6, reference_logprobs=torch.zeros(6, 2))
    output = DPOLossFn().from_logprobs(torch.tensor(rows), data, DPOLossFn().counts(data))
    expected = sum(LOG(1 + math.exp(-margin)) for margin in (0.5, 0.0, -2.0)) / 3
    assert output.loss.item() == pytest.approx(expected)
    assert {name: number.item() for name, number in output.metrics.items()} == pytest.approx(
        {"accuracy": 1 / 3, "reward_chosen": -2.8 / 3, "reward_rejected": -1.3 / 3, "reward_margin": -0.5}
    )


def test_dpo_leaves_out_a_pair_of_which_one_row_does_not_count():
    logprobs = torch.tensor([[0.0, -1.0], [0.0, -2.0], [0.0, -9.0], [0.0, -1.0]])
    data = batch_of([2] * 4, reference_logprobs=torch.zeros(4, 2), sample_mask=torch.tensor([1, 1, 1, 0]))
    loss_fn = DPOLossFn(beta=1.0)
    assert loss_fn.counts(data).samples == 1
    assert value(loss_fn, logprobs.tolist(), data) == pytest.approx(LOG(1 + math.exp(-1)))


def test_dpo_refuses_odd_rows_and_says_where_the_reference_comes_from():
    with pytest.raises(ConfigError, match="3 rows.*chosen"):
        DPOLossFn().counts(batch_of([2, 2, 2]))
    with pytest.raises(ConfigError, match="reference_logprobs.*get_reference_logprobs"):
        value(DPOLossFn(), [[0.0, -1.0]] * 2, batch_of([2, 2]))


def grpo(ratios, advantages, lengths, **options):
    """Loss where the old log-probs are 0 and the new ones the logs of the ratios."""
    logprobs = [[0.0] + [LOG(ratio) for ratio in row] for row in ratios]
    extra = {
        key: torch.tensor(options.pop(key)) for key in ("reference_logprobs", "generation_logprobs") if key in options
    }
    data = batch_of(
        lengths, advantages=torch.tensor(advantages), old_logprobs=torch.zeros(len(lengths), max(lengths)), **extra
    )
    return value(GRPOLossFn(**options), logprobs, data)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss"),
    [
        (1.1, 2.0, {}, -2.2),
        (1.5, 2.0, {}, -2.4),
        (1.5, 2.0, {"clip_range_high": 0.4}, -2.8),
        (0.5, -2.0, {}, 1.6),
        (0.5, -2.0, {"clip_range_low": 0.4}, 1.2),
        (10.0, -1.0, {}, 10.0),
        (10.0, -1.0, {"dual_clip": 3.0}, 3.0),
    ],
)
def test_clipped_loss_of_one_token_by_hand(ratio, advantage, options, loss):
    assert grpo([[ratio]], [advantage], [2], **options) == pytest.approx(loss, rel=1e-5)


def test_metrics_of_the_clipped_loss_by_hand():
    """Ratios 2 and 1 of the first row, 0.5 of the second; of 3 tokens one is clipped. By row the ratios are sqrt(2) and 0.5."""
    logprobs = torch.tensor([[0.0, LOG(2), 0.0], [0.0, -LOG(2), 0.0]])
    data = batch_of(
        [3, 2],
        advantages=torch.tensor([1.0, 1.0]),
        old_logprobs=torch.zeros(2, 3),
        reference_logprobs=torch.tensor([[0.0, -0.5, 0.0], [0.0, -LOG(2), 0.0]]),
    )
    kl, root = {2: 1 - LOG(2), 0.5: LOG(2) - 0.5}, math.sqrt(2)
    for level, approx_kl, clipped, outside, policy_loss in (
        ("token", (kl[2] + kl[0.5]) / 3, 1 / 3, 2 / 3, -(1.2 + 1 + 0.5) / 3),
        ("sequence", (root - 1 - LOG(2) / 2 + kl[0.5]) / 2, 1 / 2, 1, -(2 * 1.2 + 0.5) / 3),
    ):
        loss_fn = GRPOLossFn(ratio_level=level, kl_coef=0.5, kl_estimator="k1")
        output = loss_fn.from_logprobs(logprobs, data, loss_fn.counts(data))
        found = {name: number.item() for name, number in output.metrics.items()}
        reference = (LOG(2) + 0.5) / 3
        assert found == pytest.approx(
            {
                "approx_kl": approx_kl,
                "clip_fraction": clipped,
                "outside_fraction": outside,
                "policy_loss": policy_loss,
                "kl_to_reference": reference,
            },
            rel=1e-5,
        )
        assert output.loss.item() == pytest.approx(policy_loss + 0.5 * reference, rel=1e-5)


def test_loss_levels_by_hand():
    # Rows of 3 and 1 trained tokens, ratio 1 everywhere, advantages 1 and -2.
    ratios = [[1.0] * 3, [1.0] * 3]
    assert grpo(ratios, [1.0, -2.0], [4, 2], loss_level="token") == pytest.approx((-3 + 2) / 4)
    assert grpo(ratios, [1.0, -2.0], [4, 2], loss_level="sequence") == pytest.approx((-1 + 2) / 2)
    assert grpo(ratios, [1.0, -2.0], [4, 2], loss_level="sequence_sum") == pytest.approx((-3 + 2) / 2)


def test_gaps_to_the_generator_by_hand():
    data = batch_of([3, 2], advantages=torch.tensor([1.0, 1.0]), old_logprobs=torch.zeros(2, 3))
    data["generation_logprobs"] = torch.tensor([[9.0, LOG(2), 0.0], [0.0, -LOG(4), 9.0]])
    loss_fn = GRPOLossFn()
    metrics = loss_fn.from_logprobs(torch.zeros(2, 3), data, loss_fn.counts(data)).metrics
    assert metrics["logprob_gap_mean"].item() == pytest.approx((LOG(2) + LOG(4)) / 3)
    assert metrics["logprob_gap_exp_mean"].item() == pytest.approx((2 + 1 + 4) / 3)


def test_sequence_ratio_is_the_geometric_mean_by_hand():
    ratios = [[1.2, 1.2**3]]
    assert grpo(ratios, [1.0], [3], ratio_level="sequence", clip_range_high=1.0) == pytest.approx(-(1.2**2), rel=1e-5)
    assert grpo(ratios, [1.0], [3], ratio_level="sequence") == pytest.approx(-1.2, rel=1e-5)
    low = [[0.5, 0.5]]
    assert grpo(low, [-2.0], [3], ratio_level="sequence") == pytest.approx(1.6, rel=1e-5)
    assert grpo(low, [-2.0], [3], ratio_level="sequence", clip_range_low=0.4) == pytest.approx(1.2, rel=1e-5)
    high = [[2.0, 50.0]]
    assert grpo(high, [-1.0], [3], ratio_level="sequence") == pytest.approx(10.0, rel=1e-5)
    assert grpo(high, [-1.0], [3], ratio_level="sequence", dual_clip=3.0) == pytest.approx(3.0, rel=1e-5)
    mean_of_tokens = -(1.2 + 1.2**3) / 2
    assert grpo(ratios, [1.0], [3], clip_range_high=1.0) == pytest.approx(mean_of_tokens, rel=1e-5)
    # Rows of 2 and 1 tokens: by token the first counts twice.
    both = [[1.0, 1.0], [1.0, 1.0]]
    assert grpo(both, [1.0, 4.0], [3, 2], ratio_level="sequence", loss_level="token") == pytest.approx(-(2 + 4) / 3)
    assert grpo(both, [1.0, 4.0], [3, 2], ratio_level="sequence", loss_level="sequence") == pytest.approx(-(1 + 4) / 2)


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
@pytest.mark.parametrize(("loss_level", "share"), [("token", 1 / 4), ("sequence", 1 / 6)])
def test_kl_penalty_by_hand(estimator, kl, loss_level, share):
    # Rows of 3 and 1 trained tokens; one token of the first is 0.5 above the reference.
    reference = [[0.0, -0.5, 0.0, 0.0], [0.0] * 4]
    options = {"kl_coef": 2.0, "kl_estimator": estimator, "loss_level": loss_level, "reference_logprobs": reference}
    assert grpo([[1.0] * 3] * 2, [0.0, 0.0], [4, 2], **options) == pytest.approx(2 * kl * share, rel=1e-5)


def test_importance_weights_are_truncated_by_hand():
    generation = [[0.0, -LOG(1.5), -LOG(8.0)]]
    loss = grpo([[1.0, 1.0]], [1.0], [3], importance_cap=2.0, generation_logprobs=generation)
    assert loss == pytest.approx(-(1.5 + 2.0) / 2, rel=1e-5)
    loss = grpo([[1.0, 1.0]], [1.0], [3], importance_cap=2.0, ratio_level="sequence", generation_logprobs=generation)
    assert loss == pytest.approx(-(1.5 + 2.0) / 2, rel=1e-5)


def test_without_old_logprobs_the_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    data = batch_of([3], advantages=torch.tensor([3.0]))
    output = GRPOLossFn().from_logprobs(logprobs, data, GRPOLossFn().counts(data))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-3.0) and logprobs.grad.tolist() == [[0.0, -1.5, -1.5]]


def test_advantages_may_differ_between_tokens():
    assert grpo([[1.0, 1.0]], [[9.0, 1.0, 3.0]], [3]) == pytest.approx(-2.0)
    with pytest.raises(ConfigError, match=r"\[1, 3\].*ratio_level='sequence'.*\[1\]"):
        grpo([[1.0, 1.0]], [[9.0, 1.0, 3.0]], [3], ratio_level="sequence")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ratio_level": "word"}, "ratio_level is 'word'; expected one of token, sequence"), ({"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
     ({"clip_range_low": -1}, "clip_range_low is -1.*at least 0"), ({"dual_clip": 0.5}, "dual_clip is 0.5.*at least 1")],
)  # fmt: skip
def test_bad_options_name_the_value_and_what_to_type(options, words):
    with pytest.raises(ConfigError, match=words):
        GRPOLossFn(**options)
    with pytest.raises(ConfigError, match="beta is 0"):
        DPOLossFn(beta=0)
    with pytest.raises(ConfigError, match="label_smoothing is 0.5.*below 0.5"):
        DPOLossFn(label_smoothing=0.5)
    for loss in (NLLLossFn, DPOLossFn, GRPOLossFn):
        with pytest.raises(ConfigError, match="temperature is 0.0; expected at least 1e-06"):
            loss(temperature=0)


def test_missing_or_misshapen_keys_are_named():
    with pytest.raises(ConfigError, match=r"advantages.*\['attention_mask', 'input_ids'\]"):
        value(GRPOLossFn(), [[0.0, -1.0]], batch_of([2]))
    data = batch_of([2], advantages=torch.ones(1), old_logprobs=torch.zeros(1, 1))
    with pytest.raises(ConfigError, match=r"old_logprobs.*\[1, 1\].*\[1, 2\]"):
        value(GRPOLossFn(), [[0.0, -1.0]], data)
    for key in ("token_mask", "sample_mask"):
        with pytest.raises(ConfigError, match=rf"data\['{key}'\] is a list"):
            trained_tokens(batch_of([2], **{key: [1]}))
    with pytest.raises(ConfigError, match=r"token_mask is \[1, 3\]"):
        trained_tokens(batch_of([2], token_mask=torch.ones(1, 3)))
    with pytest.raises(ConfigError, match=r"sample_mask is \[1, 1\]; expected \[1\]"):
        trained_tokens(batch_of([2], sample_mask=torch.ones(1, 1)))


def test_labels_are_refused_where_a_token_mask_would_be_read():
    labels = torch.tensor([[-100, -100, 5]])
    with pytest.raises(ConfigError, match=r"Pass token_mask=\(labels != -100\)"):
        trained_tokens(batch_of([3], labels=labels))
    data = batch_of([3], labels=labels, token_mask=labels != -100)
    assert trained_tokens(data).tolist() == [[False, False, True]]
    assert trained_tokens(batch_of([3], labels=["cat"])).sum() == 2, "labels of another kind are the user's own"


LOSSES = {
    "nll": NLLLossFn(),
    "dpo": DPOLossFn(),
    "grpo": GRPOLossFn(kl_coef=0.1),
    "grpo by sequence": GRPOLossFn(loss_level="sequence", kl_coef=0.1, kl_estimator="k2", importance_cap=1.5),
    "gspo": GRPOLossFn(ratio_level="sequence", loss_level="sequence", clip_range_low=0.01, dual_clip=2.0),
}


def random_batch(lengths: list[int], seed: int) -> BatchedDataDict:
    random = torch.Generator().manual_seed(seed)
    rows, widest = len(lengths), max(lengths)
    names = ("old_logprobs", "reference_logprobs", "generation_logprobs", "logprobs")
    extra = {name: -torch.rand(rows, widest, generator=random) for name in names}
    extra["token_mask"] = torch.rand(rows, widest, generator=random) < 0.8
    extra["sample_mask"] = torch.rand(rows, generator=random) < 0.8
    extra["sample_mask"][:2] = extra["token_mask"][:2, 1] = True
    return batch_of(lengths, advantages=torch.randn(rows, generator=random), **extra)


def loss_and_gradient(loss_fn, data, cuts, own_counts=False):
    logprobs = data["logprobs"].clone().requires_grad_()
    total, metrics = 0.0, {}
    for start, end in cuts:
        part = data.slice(start, end)
        counts = loss_fn.counts(part if own_counts else data)
        if counts.samples == 0:
            continue
        output = loss_fn.from_logprobs(logprobs[start:end], part, counts)
        output.loss.backward()
        total += output.loss.item()
        metrics = {name: metrics.get(name, 0.0) + number.item() for name, number in output.metrics.items()}
    return total, metrics, logprobs.grad


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_the_batch(name, data):
    loss_fn = LOSSES[name]
    pairs = data.draw(st.integers(2, 5))
    lengths = data.draw(st.lists(st.integers(2, 7), min_size=2 * pairs, max_size=2 * pairs))
    cut = 2 * data.draw(st.integers(1, pairs - 1))
    batch = random_batch(lengths, data.draw(st.integers(0, 99)))
    whole = loss_and_gradient(loss_fn, batch, [(0, 2 * pairs)])
    parts = loss_and_gradient(loss_fn, batch, [(0, cut), (cut, 2 * pairs)])
    assert parts[0] == pytest.approx(whole[0], abs=1e-6)
    assert parts[1] == pytest.approx(whole[1], abs=1e-5)
    assert torch.allclose(parts[2], whole[2], atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_counts_of_the_parts_themselves_would_change_the_loss(name):
    batch = random_batch([7, 7, 2, 3, 5, 2], 1)
    batch["sample_mask"][:] = True
    whole = loss_and_gradient(LOSSES[name], batch, [(0, 6)])
    parts = loss_and_gradient(LOSSES[name], batch, [(0, 2), (2, 6)], own_counts=True)
    assert (parts[2] - whole[2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_have_no_gradient_and_a_batch_that_trains_on_nothing_is_refused(name):
    batch, loss_fn = random_batch([3, 3], 1), LOSSES[name]
    logprobs = batch["logprobs"].requires_grad_()
    output = loss_fn.from_logprobs(logprobs, batch, loss_fn.counts(batch))
    assert output.loss.requires_grad and not any(number.requires_grad for number in output.metrics.values())
    with pytest.raises(ConfigError, match="has no trained tokens"):
        loss_fn.from_logprobs(logprobs, batch, TokenCounts(0.0, 0.0))


def test_what_a_loss_asks_of_its_caller():
    """Rows that stay together, log-probabilities of the same tokens without dropout, and those of a reference."""
    asked = {
        name: (loss.rows_per_sample, loss.compares, loss.needs_reference)
        for name, loss in {"nll": NLLLossFn(), "dpo": DPOLossFn(0.5), "grpo": GRPOLossFn(0.1, 0.3)}.items()
    }
    assert asked == {"nll": (1, False, False), "dpo": (2, True, True), "grpo": (1, True, False)}
    assert DPOLossFn(0.5).beta == 0.5, "a temperature is given by name only"
    assert GRPOLossFn(kl_coef=0.5).needs_reference and GRPOLossFn(importance_cap=0.5).importance_cap == 0.5


def test_losses_are_float32_and_never_read_padding():
    data = batch_of([3, 2], advantages=torch.ones(2))
    for padding in (0.0, float("nan")):
        logprobs = torch.tensor([[padding, -1.0, -2.0], [padding, -3.0, padding]])
        output = GRPOLossFn().from_logprobs(logprobs, data, TokenCounts(3, 2))
        assert output.loss.dtype == torch.float32 and output.loss.item() == pytest.approx(-1.0)
