"""The Hugging Face policy: scores by hand, a reference that stays, steps that do not depend on how a batch is cut."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.errors import CheckpointError, ConfigError, NonFiniteError
from rlinf.llm import logprobs as scoring
from rlinf.models import HuggingFacePolicy

LOSSES = {"nll": NLLLossFn(), "dpo": DPOLossFn(), "grpo": GRPOLossFn(loss_level="sequence", kl_coef=0.1)}


@pytest.fixture
def batch(prompts):
    prompts["advantages"] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    return prompts


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def largest_change(before, after) -> float:
    return max(float((before[name].float() - after[name].float()).abs().max()) for name in before)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_a_gather_of_the_log_softmax(tiny_lm, batch, family, temperature):
    policy = HuggingFacePolicy(tiny_lm(family), temperature=temperature, micro_batch_size=3)
    logprobs = policy.get_logprobs(batch)["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(tiny_lm(family))
    assert logprobs.dtype == torch.float32 and logprobs.shape == (4, 6)
    for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
        ids = batch["input_ids"][row, :length]
        with torch.no_grad():
            table = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        assert logprobs[row, 0] == 0 and not logprobs[row, length:].any()
        for i in range(1, length):
            assert float(logprobs[row, i]) == pytest.approx(float(table[i - 1, ids[i]]), abs=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_entropy_is_that_of_the_trained_tokens_and_changes_no_step(tiny_lm, batch, packing, monkeypatch):
    """By hand from the table of the model; two micro-batches, logits in chunks, a row and two tokens that are not trained."""
    batch["token_mask"] = torch.ones(4, 6, dtype=torch.bool)
    batch["token_mask"][0, 1:3], batch["token_mask"][3] = False, False
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    terms = []
    for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
        with torch.no_grad():
            table = (model(batch["input_ids"][row, :length][None]).logits[0].double() / 0.5).softmax(-1)
        entropies = -(table * table.log()).sum(-1)
        terms += [float(entropies[i - 1]) for i in range(1, length) if batch["token_mask"][row, i]]
    assert len(terms) == 3 + 3 + 4
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 4 * 48)
    rows = {"max_tokens_per_microbatch": 12, "sequence_packing": True} if packing else {"micro_batch_size": 2}
    policies = [HuggingFacePolicy(tiny_lm(), temperature=0.5, report_entropy=flag, **rows) for flag in (True, False)]
    found, without = (policy.train(batch, NLLLossFn()) for policy in policies)
    assert found["entropy"] == pytest.approx(sum(terms) / 10, rel=1e-5)
    assert "entropy" not in without and largest_change(*map(weights_of, policies)) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize(("packing", "kernel"), [(False, "sdpa"), (True, "sdpa"), (True, "eager")])
def test_micro_batches_by_tokens_change_nothing(tiny_lm, batch, family, packing, kernel):
    folder = tiny_lm(family, **({"sliding_window": 3} if family == "mistral" else {}))
    plain = HuggingFacePolicy(folder).get_logprobs(batch)["logprobs"]
    options = {"sequence_packing": packing, "attn_implementation": kernel}
    policy = HuggingFacePolicy(folder, max_tokens_per_microbatch=11, **options)
    assert policy.model.config._attn_implementation == ("sdpa_by_sequence" if packing and kernel == "sdpa" else kernel)
    assert (policy.get_logprobs(batch)["logprobs"] - plain).abs().max() < 1e-5


LFM2 = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mamba", {}),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("lfm2", {**LFM2, "initializer_range": 0.02}),
        ("bloom", {"initializer_range": 0.02}),
    ],
)
def test_packing_is_refused_where_sequences_see_each_other(tiny_lm, family, fields, dtype):
    """A state-space model; attention without regard to position ids that start again; leaks smaller than rounding."""
    folder = tiny_lm(family, **fields)
    options = {"max_tokens_per_microbatch": 16, "torch_dtype": dtype}
    HuggingFacePolicy(folder, **options)
    with pytest.raises(ConfigError, match="does not separate packed sequences.*Pass sequence_packing=False"):
        HuggingFacePolicy(folder, **options, sequence_packing=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packing_is_accepted_where_they_do_not(tiny_lm, family, dtype):
    """Of experts, the rounding of a token may depend on its neighbours; it still reads none of them."""
    fields = {"num_local_experts": 4} if family == "mixtral" else {}
    HuggingFacePolicy(tiny_lm(family, **fields), max_tokens_per_microbatch=16, sequence_packing=True, torch_dtype=dtype)


@pytest.mark.parametrize("first_need", ["before training", "after training"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_reference_is_the_policy_before_training(tiny_lm, batch, first_need, lora):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2, lora=lora)
    start = policy.get_logprobs(batch)["logprobs"]
    if first_need == "before training":
        assert policy.get_reference_logprobs(batch)["logprobs"].equal(start)
    for _ in range(3):
        policy.train(batch, NLLLossFn())
    weights = weights_of(policy)
    assert policy.get_reference_logprobs(batch)["logprobs"].equal(start)
    assert largest_change(weights, weights_of(policy)) == 0
    assert (policy.get_logprobs(batch)["logprobs"] - start).abs().max() > 0.1


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_failing_reference_leaves_the_policy_as_it_was(tiny_lm, batch, lora, monkeypatch):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2, lora=lora)
    policy.train(batch, NLLLossFn())
    weights, trained = weights_of(policy), [p.requires_grad for p in policy.model.parameters()]
    before = policy.get_logprobs(batch)["logprobs"]
    with monkeypatch.context() as patch:
        patch.setattr("rlinf.llm.hf_policy.batch_scores", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            policy.get_reference_logprobs(batch)
    assert largest_change(weights, weights_of(policy)) == 0
    assert [p.requires_grad for p in policy.model.parameters()] == trained
    assert policy.get_logprobs(batch)["logprobs"].equal(before), "adapters are on again"


def test_a_folder_that_changed_is_no_reference(tiny_lm, batch, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_lm()).save_pretrained(tmp_path)
    policy = HuggingFacePolicy(str(tmp_path))
    policy.train(batch, NLLLossFn())
    policy.model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no longer has.*before the first train"):
        policy.get_reference_logprobs(batch)


def test_weights_that_were_put_in_before_the_first_step_are_the_reference(tiny_lm, batch):
    start = HuggingFacePolicy(tiny_lm(seed=1)).get_logprobs(batch)["logprobs"]
    early, late = (HuggingFacePolicy(tiny_lm()) for _ in range(2))
    for policy in (early, late):
        policy.model.load_state_dict(AutoModelForCausalLM.from_pretrained(tiny_lm(seed=1)).state_dict())
    assert early.get_reference_logprobs(batch)["logprobs"].equal(start)
    late.train(batch, NLLLossFn())
    with pytest.raises(CheckpointError, match="Call get_reference_logprobs before the first train"):
        late.get_reference_logprobs(batch)


def step_gradients(policy, batch, loss_fn, monkeypatch):
    """Gradients and metrics of a step that is not taken."""
    found = {}
    with monkeypatch.context() as patch:
        patch.setattr(policy._optimizer, "step", lambda: found.update(
            {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}))  # fmt: skip
        metrics = policy.train(batch, loss_fn)
    return found, {key: value for key, value in metrics.items() if not key.startswith("memory/")}


def relative_difference(found, expected):
    """Norm of the difference of two gradients, of that of the second."""
    difference = torch.cat([(found[key] - expected[key]).flatten() for key in expected])
    return float(difference.norm() / torch.cat([gradient.flatten() for gradient in expected.values()]).norm())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["nll", "dpo", "grpo"])
def test_eight_micro_batches_have_the_gradient_of_one(tiny_lm, name, family, monkeypatch):
    random = torch.Generator().manual_seed(11)
    lengths = torch.tensor([12, 6, 4, 5, 2, 9, 12, 7]).repeat_interleave(2)
    mask = (torch.arange(12) < lengths.unsqueeze(1)).long()
    batch = BatchedDataDict({"input_ids": mask * torch.randint(3, 48, mask.shape, generator=random), "attention_mask": mask,
                             "advantages": torch.randn(16, generator=random)})  # fmt: skip
    batch["old_logprobs"] = HuggingFacePolicy(tiny_lm(family)).get_logprobs(batch)["logprobs"]
    batch["reference_logprobs"] = 0.99 * batch["old_logprobs"]
    one, eight = (HuggingFacePolicy(tiny_lm(family), max_grad_norm=1e9, micro_batch_size=size) for size in (16, 2))
    whole, metrics = step_gradients(one, batch, LOSSES[name], monkeypatch)
    parts, part_metrics = step_gradients(eight, batch, LOSSES[name], monkeypatch)
    assert relative_difference(parts, whole) < 3e-6  # float32 rounding reaches 1e-6 on some CPUs
    assert part_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-6, abs=1e-6)
    batch["input_ids"][14, 1] += 1
    changed, _ = step_gradients(eight, batch, LOSSES[name], monkeypatch)
    assert relative_difference(changed, whole) > 1e-3, "control: one other token"


@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_the_dropout_of_a_checkpoint_is_off_in_training(tiny_lm, batch, device_map):
    """gpt2 names 0.1: an unchanged policy would have other log-probabilities than the old one."""
    policy = HuggingFacePolicy(tiny_lm("gpt2"), learning_rate=0.0, device_map=device_map)
    batch["old_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    assert abs(policy.train(batch, GRPOLossFn())["approx_kl"]) < 1e-6
    policy.model.transformer.drop.p = 0.1
    assert policy.train(batch, GRPOLossFn())["approx_kl"] > 1e-3, "control"


def test_dropout_of_adapters_is_for_maximum_likelihood_only(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm(), lora={"dropout": 0.1})
    policy.train(batch, NLLLossFn())
    for loss_fn in (GRPOLossFn(), DPOLossFn()):
        with pytest.raises(ConfigError, match="lora.dropout=0.1 and .*LossFn.*Pass lora={'dropout': 0.0}"):
            policy.train(batch, loss_fn)


CUTS = {
    "rows": {"micro_batch_size": 2},
    "tokens": {"max_tokens_per_microbatch": 12},
    "packing": {"max_tokens_per_microbatch": 12, "sequence_packing": True},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", CUTS)
def test_micro_batches_are_one_batch(tiny_lm, batch, name, cut, monkeypatch):
    batch["reference_logprobs"] = 0.9 * HuggingFacePolicy(tiny_lm(), seed=1).get_logprobs(batch)["logprobs"]
    options = {"max_grad_norm": 1e9}
    whole, metrics = step_gradients(HuggingFacePolicy(tiny_lm(), **options), batch, LOSSES[name], monkeypatch)
    cutting = HuggingFacePolicy(tiny_lm(), **options, **CUTS[cut])
    parts, part_metrics = step_gradients(cutting, batch, LOSSES[name], monkeypatch)
    assert relative_difference(parts, whole) < 3e-6  # other matrix shapes round differently, by 1e-6 on some CPUs
    assert part_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-6)


def test_a_step_is_the_one_of_plain_adamw(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-3, max_grad_norm=1.0)
    metrics = policy.train(batch, NLLLossFn())
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0).step()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["num_tokens"] == 13
    assert largest_change(weights_of(policy), model.state_dict()) < 1e-5
    assert largest_change(weights_of(policy), AutoModelForCausalLM.from_pretrained(tiny_lm()).state_dict()) > 5e-4


def test_dpo_starts_at_log_two_and_brings_its_own_reference(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm())
    assert policy.train(batch, DPOLossFn())["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert "reference_logprobs" not in batch, "the caller's batch stays as it was"


def test_small_steps_are_not_lost_in_bfloat16(tiny_lm, batch):
    """At 1e-5 most bf16 weights cannot move in one step; the float32 copies gather the steps."""
    options = {"learning_rate": 1e-5, "max_grad_norm": 1e9}
    policy = HuggingFacePolicy(tiny_lm(), torch_dtype="bfloat16", device_map="auto", **options)
    exact = HuggingFacePolicy(tiny_lm(), **options)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    start = weights_of(policy)
    for _ in range(40):
        policy.train(batch, NLLLossFn())
        exact.train(batch, NLLLossFn())
    assert policy.get_logprobs(batch)["logprobs"].dtype == torch.float32
    changes = [(tensor - start[name]).float().abs().flatten() for name, tensor in weights_of(policy).items()]
    moved = torch.cat(changes) > 0
    assert moved.float().mean() > 0.1
    masters = torch.cat([master.detach().flatten() for master in policy._optimizer.masters])
    begun = torch.cat([start[name].float().flatten() for name, _ in policy.model.named_parameters()])
    assert (masters - begun).abs().max() == pytest.approx(40e-5, rel=0.2)


@pytest.mark.parametrize(("family", "lora"), [("llama", None), ("llama", {"rank": 2}), ("qwen2", {"rank": 2})])
def test_a_saved_policy_scores_as_it_did(tiny_lm, batch, tmp_path, family, lora):
    folder = tiny_lm(family, tie_word_embeddings=family == "qwen2")
    policy = HuggingFacePolicy(folder, learning_rate=1e-2, lora=lora)
    start = policy.get_logprobs(batch)["logprobs"]
    policy.train(batch, NLLLossFn())
    policy.save_pretrained(tmp_path)
    expected = policy.get_logprobs(batch)["logprobs"]
    assert (HuggingFacePolicy(str(tmp_path)).get_logprobs(batch)["logprobs"] - expected).abs().max() < 1e-5
    assert (start - expected).abs().max() > 0.1, "control: the weights before the step"


def test_a_loss_that_is_not_finite_changes_no_weight(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm())
    before = weights_of(policy)
    batch["advantages"][1] = float("nan")
    with pytest.raises(NonFiniteError, match="loss is nan"):
        policy.train(batch, GRPOLossFn())
    assert largest_change(before, weights_of(policy)) == 0
    assert math.isfinite(policy.train(batch, NLLLossFn())["grad_norm"]), "nothing of it is left for the next step"


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 64),
        (YARN, 256),
        (YARN | {"original_max_position_embeddings": 64}, 256),
        # Llama 3 declares what the scaling gives.
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
    ],
)  # fmt: skip
def test_rows_fill_the_positions_with_their_scaling_and_longer_ones_are_refused(tiny_lm, scaling, positions):
    policy = HuggingFacePolicy(tiny_lm("qwen2", rope_scaling=scaling))
    ids = torch.ones(1, positions + 1, dtype=torch.int64)
    fitting = BatchedDataDict({"input_ids": ids[:, :-1], "attention_mask": ids[:, :-1]})
    assert policy.get_logprobs(fitting)["logprobs"].isfinite().all()
    for call in (policy.get_logprobs, lambda data: policy.train(data, NLLLossFn())):
        with pytest.raises(ConfigError, match=f"A row has {positions + 1} tokens.* {positions} positions"):
            call(BatchedDataDict({"input_ids": ids, "attention_mask": ids}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rat": 1.0}, "learning_rat.*Did you mean 'learning_rate'"),
        ({"torch_dtype": "float16"}, "torch_dtype=float16.*Pass torch_dtype='bfloat16'"),
        ({"top_p": 0.9}, "top_p=0.9.*Pass top_p=1.0"),
        ({"sequence_packing": True}, "Pass e.g. max_tokens_per_microbatch=4096"),
        ({"load_in_8bit": True}, "Pass lora={}"),
    ],
)
def test_bad_options_name_the_value_and_what_to_type(tiny_lm, options, words):
    with pytest.raises(ConfigError, match=words):
        HuggingFacePolicy(tiny_lm(), **options)


def test_batches_that_do_not_fit_the_loss_are_refused(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm(), temperature=0.5, micro_batch_size=3)
    left = BatchedDataDict({key: batch[key].flip(1) for key in ("input_ids", "attention_mask")})
    three = batch | {"advantages": torch.ones(3)}
    rejections = (
        ("micro_batch_size=3 splits a sample. Pass micro_batch_size=2", batch, DPOLossFn()),
        ("'advantages': 3.*the same for all keys", three, GRPOLossFn()),
        ("loss_fn is 'nll'; expected a loss. Pass e.g. .*NLLLossFn", batch, "nll"),
        ("NLLLossFn has temperature=0.7.*temperature=0.5. Pass temperature=0.5", batch, NLLLossFn(temperature=0.7)),
        (r"no rows: its tokens have shape \[0, 6\]", batch.slice(0, 0), NLLLossFn()),
        ("Row 1 is not right-padded: column 0 is padding", left, NLLLossFn()),
    )  # fmt: skip
    for words, data, loss_fn in rejections:
        with pytest.raises(ConfigError, match=words):
            policy.train(data, loss_fn)
    with pytest.raises(ConfigError, match="6 tokens is longer than max_tokens_per_microbatch=5"):
        HuggingFacePolicy(tiny_lm(), max_tokens_per_microbatch=5).train(batch, NLLLossFn())


@pytest.mark.parametrize("call", ["get_logprobs", "generate"])
def test_tokens_that_the_model_does_not_know_are_refused(tiny_lm, batch, call):
    policy = HuggingFacePolicy(tiny_lm(), max_new_tokens=2)
    plain = getattr(policy, call)(batch)
    batch["input_ids"][1, 5] = 99
    again = getattr(HuggingFacePolicy(tiny_lm(), max_new_tokens=2), call)(batch)
    assert again["logprobs"].equal(plain["logprobs"]), "what padding holds does not matter"
    for token in (48, -1):
        batch["input_ids"][1, 2] = token
        with pytest.raises(ConfigError, match=f"Row 1 has the token id {token}; expected 0 to 47.*vocab_size=48"):
            getattr(policy, call)(batch)
    with pytest.raises(ConfigError, match="token ids have dtype torch.float32; expected integers"):
        getattr(policy, call)(batch | {"input_ids": batch["input_ids"].float()})


def test_a_loss_that_runs_the_model_itself_has_a_temperature(tiny_lm, batch):
    policy = HuggingFacePolicy(tiny_lm(), temperature=0.5, learning_rate=0.0)
    loss = policy.train(batch, NLLLossFn())["loss"]
    assert NLLLossFn(temperature=0.5)(policy.model, batch).item() == pytest.approx(loss, rel=1e-5)
    assert policy.train(batch, NLLLossFn(temperature=0.5))["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(NLLLossFn()(policy.model, batch).item() - loss) > 0.1, "control"
    first, second = (HuggingFacePolicy(tiny_lm(), learning_rate=1e-3) for _ in range(2))
    loss_fn = NLLLossFn()
    custom_loss = first.train(batch, lambda model, data: loss_fn(model, data))["loss"]
    assert custom_loss == pytest.approx(second.train(batch, loss_fn)["loss"], rel=1e-5)
    assert largest_change(weights_of(first), weights_of(second)) < 1e-5, "and gives the same step"
