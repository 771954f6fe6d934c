"""The GRPO trainer of recipes: advantages, rollouts, replaced groups, and the step it takes."""

from contextlib import contextmanager

import datasets
import pytest
import torch

from rlinf.llm.losses import GRPOLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.recipes.completions import Completer, CompletionValidation
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows
from rlinf.recipes.grpo import ADVANTAGES, Groups, GRPOTrainer
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt

END = 2


class Letters:
    """A tokenizer whose tokens are letters of the private use area."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(0xE000 + token) for token in tokens if token != END or not skip_special_tokens)


def even_fraction(text, prompt, **facts):
    """Reward the fraction of even tokens, and tell the length as a part without weight."""
    values = [ord(letter) for letter in text]
    share = sum(value % 2 == 0 for value in values) / max(1, len(values))
    return share, {"even": share, "length": float(len(values))}


def packed(num_rows=6):
    random = torch.Generator().manual_seed(3)
    rows = [{"ids": torch.randint(3, 48, (2 + i % 3,), generator=random).tolist()} for i in range(num_rows)]
    return PackedRows(Rows(rows), lambda row: Prompt(row["ids"], reference="even", row=row), seed=0)


def trainer(folder, rewards=even_fraction, loss=None, policy_options=None, generator=None, batch_size=12, **options):
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "max_new_tokens": 5, "temperature": 0.9}
    policy = HuggingFacePolicy(folder, **settings | (policy_options or {}))
    completer = Completer(
        generator or TorchGenerator(policy), Letters(), rewards, batch_size=6, max_new_tokens=5, end_tokens=[END]
    )
    return GRPOTrainer(
        policy, packed(), num_steps=4, batch_size=batch_size, groups=Groups(**{"size": 4, "seed": 0} | options), completer=completer,
        loss=loss or GRPOLossFn(dual_clip=3.0),
    )  # fmt: skip


def weights(one):
    return torch.cat([p.detach().flatten() for p in one.policy.model.parameters()])


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    deviation = (6 / 5) ** 0.5
    assert ADVANTAGES["scaled"](rewards).tolist() == pytest.approx([x / deviation for x in (0, -1, -1, 0, 2)], abs=1e-5)
    assert ADVANTAGES["unscaled"](rewards).tolist() == pytest.approx([0, -1, -1, 0, 2])
    assert ADVANTAGES["leave_one_out"](rewards).tolist() == pytest.approx([1 - 4 / 4, -5 / 4, -5 / 4, 0, 3 - 2 / 4])
    one_of_many = torch.zeros(100)
    one_of_many[0] = 1.0
    assert float(ADVANTAGES["scaled"](one_of_many)[0]) == 5.0, "sqrt(99) is clipped"
    of_large_units = torch.tensor([40.0, 0.0])
    assert ADVANTAGES["unscaled"](of_large_units).tolist() == [20.0, -20.0]
    assert ADVANTAGES["leave_one_out"](of_large_units).tolist() == [40.0, -40.0]
    for name in ADVANTAGES:
        assert ADVANTAGES[name](torch.ones(4)).tolist() == [0.0] * 4


def test_a_step_is_the_one_of_a_slow_computation(tiny_lm):
    one = trainer(tiny_lm())
    seen = {}
    take = one.policy.train

    def record(batch, loss_fn):
        seen.update(batch)
        return take(batch, loss_fn)

    one.policy.train = record
    before = HuggingFacePolicy(tiny_lm(), temperature=0.9)
    update = one.step(0)
    rows, lengths = seen["input_ids"], seen["attention_mask"].sum(-1)
    rewards, total, count = [], 0.0, 0
    parameters = [p.requires_grad_() for p in before.model.parameters()]
    for row in range(12):
        answer = rows[row, : lengths[row]][seen["token_mask"][row, : lengths[row]]].tolist()
        rewards.append(even_fraction(Letters().decode(answer, True), None)[0])
    for row in range(12):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        mean = sum(group) / 4
        deviation = (sum((x - mean) ** 2 for x in group) / 4) ** 0.5
        advantage = (rewards[row] - mean) / (deviation + 1e-6)
        assert float(seen["advantages"][row]) == pytest.approx(advantage, rel=1e-4, abs=1e-5)
        ids = rows[row, : lengths[row]]
        logprobs = (before.model(ids[None]).logits[0] / 0.9).log_softmax(-1)
        for place in range(1, len(ids)):
            if seen["token_mask"][row, place]:
                logprob = logprobs[place - 1, ids[place]]
                assert float(seen["generation_logprobs"][row, place]) == pytest.approx(logprob.item(), abs=1e-4)
                total, count = total - advantage * logprob, count + 1
    gradients = torch.autograd.grad(total / count, parameters, allow_unused=True)
    norm = torch.cat([g.flatten() for g in gradients if g is not None]).norm()
    assert update.metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert len(set(rewards)) > 3, "the rewards differ, so the advantages do"
    assert update.metrics["rollout/reward_mean"] == pytest.approx(sum(rewards) / 12)
    assert update.metrics["rollout/reward_mean/even"] == pytest.approx(sum(rewards) / 12)
    assert update.metrics["rollout/reward_mean/length"] > 1
    assert update.metrics["rollout/logprob_gap_mean"] < 1e-5
    assert update.metrics["rollout/logprob_gap_exp_mean"] == pytest.approx(1.0, abs=1e-5)
    assert update.num_tokens == float(lengths.sum())


def test_a_stale_generator_shows_in_the_gap(tiny_lm):
    stale = TorchGenerator(HuggingFacePolicy(tiny_lm(seed=1), max_new_tokens=5, temperature=0.9))
    assert trainer(tiny_lm(), generator=stale).step(0).metrics["rollout/logprob_gap_exp_mean"] > 1.05


def test_answers_depend_on_the_step_and_not_on_what_was_generated_before(tiny_lm):
    one, two = trainer(tiny_lm()), trainer(tiny_lm())
    tokens = [[each.tokens for group in a._collect(step)[0] for each in group] for a, step in ((one, 0), (one, 1))]
    two._collect(1)
    assert [each.tokens for group in two._collect(1)[0] for each in group] == tokens[1] != tokens[0]
    assert len({tuple(each) for each in tokens[0][:4]}) > 1, "answers of a group differ"


@pytest.mark.parametrize("variant", [{"kl_coef": 0.5}, {"ratio_level": "sequence"}, {"loss_level": "sequence_sum"}])
@pytest.mark.parametrize("num_updates", [1, 2])
def test_variants_train(tiny_lm, variant, num_updates):
    one = trainer(tiny_lm(), loss=GRPOLossFn(dual_clip=3.0, **variant), num_updates=num_updates)
    before = weights(one)
    first, second = one.step(0), one.step(1)
    assert not weights(one).equal(before)
    assert second.metrics["rollout/logprob_gap_mean"] < 1e-5, "the old log-probabilities are those before the updates"
    if "kl_coef" in variant:
        assert (abs(first.metrics["train/kl_to_reference"]) < 1e-6) == (num_updates == 1)
        assert second.metrics["train/kl_to_reference"] > 0
    assert (first.metrics["train/approx_kl"] > 1e-9) == (num_updates > 1)


def test_the_reward_rises(tiny_lm):
    one = trainer(tiny_lm(), policy_options={"learning_rate": 1e-2, "max_grad_norm": 1.0}, batch_size=24)
    rewards = [one.step(step).metrics["rollout/reward_mean"] for step in range(15)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6


def test_groups_with_equal_rewards_are_replaced_by_other_prompts(tiny_lm):
    def first_prompt_only(text, prompt, **facts):
        return (even_fraction(text, prompt)[0] if prompt.input_ids == chosen else 0.0), {}

    rows = packed()
    chosen = rows[0].input_ids
    replaced = []
    for most in (0, 30):
        one = trainer(tiny_lm(), first_prompt_only, max_resamples=most)
        groups, number = one._collect(0)
        replaced.append(number)
        flat = [len({each.reward for each in group}) == 1 for group in groups]
        assert len(groups) == 3 and any(flat) == (most == 0)
        assert all(len({tuple(each.prompt.input_ids) for each in group}) == 1 for group in groups)
    assert replaced[0] == 0 < replaced[1]


def test_attempts_to_replace_end(tiny_lm):
    one = trainer(tiny_lm(), lambda text, prompt, **facts: (1.0, {}), max_resamples=2)
    update = one.step(0)
    assert update.metrics["rollout/replaced_groups"] == 6
    assert update.metrics["rollout/zero_variance_group_fraction"] == 1
    assert update.metrics["train/grad_norm"] == 0


def test_answers_of_a_validation_are_greedy_and_kept(tiny_lm):
    one = trainer(tiny_lm())
    prompts = [packed()[number] for number in range(5)]
    result = CompletionValidation(one.completer, prompts)(0)
    assert result.score == result.metrics["eval/reward_mean"]
    assert [each["prompt"] for each in result.samples] == [Letters().decode(each.input_ids) for each in prompts]
    assert {each["reference"] for each in result.samples} == {"even"}
    mean = sum(each["reward"] for each in result.samples) / 5
    assert result.score == pytest.approx(mean)
    assert CompletionValidation(one.completer, prompts)(1).samples == result.samples


def test_the_generator_is_ready_while_answers_are_made(tiny_lm):
    calls = []

    class Watched(TorchGenerator):
        @contextmanager
        def ready(self):
            calls.append("ready")
            with super().ready():
                yield
            calls.append("done")

    policy = HuggingFacePolicy(tiny_lm(), max_new_tokens=5, temperature=0.9)
    one = trainer(tiny_lm(), generator=Watched(policy))
    generate = policy.generate
    policy.generate = lambda *args, **kwargs: (calls.append("generate"), generate(*args, **kwargs))[1]
    one.step(0)
    assert calls == ["ready", "generate", "generate", "done"]


def test_metrics_of_several_updates_are_their_means_and_the_gap_is_that_of_the_first(tiny_lm):
    one, made = trainer(tiny_lm(), num_updates=2), []
    take = one.policy.train

    def record(batch, loss_fn):
        made.append(take(batch, loss_fn))
        return made[-1]

    one.policy.train = record
    update = one.step(0)
    assert len(made) == 2 and made[0]["grad_norm"] != made[1]["grad_norm"]
    for name in ("loss", "grad_norm", "policy_loss", "approx_kl", "clip_fraction"):
        assert update.metrics[f"train/{name}"] == pytest.approx((made[0][name] + made[1][name]) / 2), name
    assert update.loss == update.metrics["train/loss"] and update.num_rows == 12
    for name in ("logprob_gap_mean", "logprob_gap_exp_mean"):
        assert update.metrics[f"rollout/{name}"] == made[0][name]


def test_the_share_of_equal_groups_counts_groups(tiny_lm):
    prompts = packed().batch(0, 3)

    def first_differs(text, prompt, **facts):
        return (even_fraction(text, prompt)[0] if prompt.input_ids == prompts[0].input_ids else 0.5), {}

    metrics = trainer(tiny_lm(), first_differs).step(0).metrics
    assert (
        metrics["rollout/zero_variance_group_fraction"] == pytest.approx(2 / 3)
        and metrics["rollout/replaced_groups"] == 0
    )


def test_equal_groups_of_a_stream_answer_their_prompt_again(tiny_lm):
    """Another row would have to be read ahead of its turn."""
    rows, found = [{"ids": [3 + number, 7]} for number in range(6)], []
    for most in (0, 1):
        one = trainer(tiny_lm(), lambda text, prompt, **facts: (1.0, {}), max_resamples=most)
        stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
        one.rows = StreamedRows(stream, lambda row: Prompt(row["ids"], reference="even", row=row), seed=None)
        groups, num_replaced = one._collect(0)
        assert num_replaced == 3 * most and [group[0].prompt.input_ids for group in groups] == [
            row["ids"] for row in rows[:3]
        ]
        found.append([each.tokens for group in groups for each in group])
    assert found[0] != found[1], "the answers are others"
