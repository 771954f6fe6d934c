"""Log-probabilities of text models: equal to those of all logits at once, without ever having these."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank
from rlinf.llm import logprobs as module
from rlinf.llm.hf_model import HFModel
from rlinf.llm.logprobs import sequence_scores
from rlinf.models.config import LoraConfig
from rlinf.models.lora import apply_lora
from rlinf.models.sampling import token_logprobs

VOCABULARY = 4000
FAMILIES = {
    "llama": {},
    "llama with a tied head": {"tie_word_embeddings": True},
    "qwen2": {},
    "gpt2": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},  # its head has a bias
}


class Largest(TorchDispatchMode):
    """Records the number of elements that the memory of the largest tensor has, of all that operations make."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else [made]:
            if isinstance(value, torch.Tensor):
                self.size = max(self.size, value.untyped_storage().nbytes() // value.element_size())
        return made


def sequence_logprobs(*arguments, **options):
    return sequence_scores(*arguments, **options).logprobs


def rows():
    ids = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(40) < torch.tensor([40, 25, 31]).unsqueeze(1)
    return ids * mask, mask


def every_logit(model, ids, mask, temperature):
    """The definition, in one piece."""
    logits = model(input_ids=ids, attention_mask=mask.long()).logits.float() / temperature
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0)).masked_fill(~mask, 0.0)


def scored(model, score, *arguments):
    """Log-probabilities, gradients of an uneven sum of them, and the size of the largest tensor."""
    model.zero_grad()
    weights = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    with Largest() as largest:
        values = score(model, *arguments)
        (values * weights).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return values.detach(), gradients, largest.size


@pytest.fixture
def load(tiny_lm):
    def build(name):
        fields = {"vocab_size": VOCABULARY, "initializer_range": 0.1} | FAMILIES[name]
        return AutoModelForCausalLM.from_pretrained(tiny_lm(name.split()[0], **fields)).eval()

    return build


def assert_same(model, found, expected):
    values, gradients, _ = found
    torch.testing.assert_close(values, expected[0], atol=1e-6, rtol=1e-6)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_of_the_vocabulary_give_the_numbers_of_all_logits(load, name, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_LOGITS", 10 * VOCABULARY)  # 10 tokens at a time, of 93
    model, (ids, mask), temperature = load(name), rows(), 0.7
    expected = scored(model, every_logit, ids, mask, temperature)
    found = scored(model, sequence_logprobs, ids, mask, temperature)
    assert_same(model, found, expected)
    assert module.has_separable_head(model)
    weights = max(parameter.numel() for parameter in model.parameters())
    assert found[2] <= max(10 * VOCABULARY, weights) < 93 * VOCABULARY <= expected[2]
    with torch.no_grad(), Largest() as largest:
        torch.testing.assert_close(sequence_logprobs(model, ids, mask, temperature), found[0], atol=1e-6, rtol=1e-6)
    assert largest.size <= max(10 * VOCABULARY, weights)
    if name in ("gemma2", "granite", "cohere"):  # control: what comes after the head counts
        monkeypatch.setattr(module, "_head_logits", lambda config, logits: logits)
        monkeypatch.setattr(module, "_are_equal", lambda ours, logits: True)
        assert (sequence_logprobs(model, ids, mask, temperature) - expected[0]).abs().max() > 0.1


def chunked(model, ids, mask, monkeypatch):
    """Scored without and with chunks of 10 tokens."""
    expected = scored(model, every_logit, ids, mask, 1.0)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 10 * VOCABULARY)
    return scored(model, sequence_logprobs, ids, mask, 1.0), expected


def test_a_bias_of_the_head_counts(load, monkeypatch):
    model, (ids, mask) = load("phi"), rows()
    with torch.no_grad():
        model.lm_head.bias.normal_(std=2.0)
    found, expected = chunked(model, ids, mask, monkeypatch)
    assert_same(model, found, expected)
    assert "lm_head.bias" in found[1] and found[2] < 93 * VOCABULARY <= expected[2]
    with torch.no_grad():
        model.lm_head.bias.zero_()
    assert (sequence_logprobs(model, ids, mask) - found[0]).abs().max() > 0.1, "control"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters_on_the_head_count(load, name, monkeypatch):
    model, (ids, mask) = load(name), rows()
    plain = sequence_logprobs(model, ids, mask).detach()
    apply_lora(HFModel(model), LoraConfig(rank=4, alpha=8, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3)
    found, expected = chunked(model, ids, mask, monkeypatch)
    assert_same(model, found, expected)
    assert {key.split(".")[0] for key in found[1]} == {"lm_head", "model"}, "adapters of head and layers have gradients"
    assert found[2] < 93 * VOCABULARY <= expected[2]
    assert (found[0] - plain).abs().max() > 0.1, "control"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_frozen_head_is_applied_to_each_chunk_once(load, name, monkeypatch):
    model, (ids, mask), calls = load(name), rows(), []
    head = model.get_output_embeddings()
    assert module.has_separable_head(model)
    head.register_forward_hook(lambda *_: calls.append(1))
    trained, _ = chunked(model, ids, mask, monkeypatch)
    num_trained = len(calls)
    head.requires_grad_(False)
    frozen, expected = chunked(model, ids, mask, monkeypatch)
    assert_same(model, frozen, expected)
    weights = {key for key, parameter in model.named_parameters() if parameter is head.weight}
    assert frozen[1].keys() == trained[1].keys() - weights and frozen[2] < 93 * VOCABULARY
    num_chunks = 10  # of 93 tokens; a trained head is applied once more in the backward pass
    assert num_trained - (len(calls) - num_trained) == num_chunks
    scores = module.sequence_scores(model, ids, mask, 0.7, with_entropy=True)
    with torch.no_grad():
        same = module.sequence_scores(model, ids, mask, 0.7, with_entropy=True)
    assert torch.equal(scores.logprobs, same.logprobs) and scores.logprobs.requires_grad
    assert torch.equal(scores.entropy, same.entropy) and not scores.entropy.requires_grad
    model.requires_grad_(False)
    calls.clear()
    assert not sequence_logprobs(model, ids, mask).requires_grad
    assert len(calls) == 2 + num_chunks, "the few tokens of the pass, the row that counts columns, and each chunk"


def test_a_model_without_an_output_layer_gets_all_logits(load, monkeypatch):
    model, (ids, mask) = load("llama"), rows()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    found, expected = chunked(model, ids, mask, monkeypatch)
    assert_same(model, found, expected)
    assert found[2] >= 93 * VOCABULARY, "control of the test above: this one does have all logits"


def score_on_two_ranks(folders):
    """Write each sharded model's values and gradients, and the size of its largest tensor, next to the model."""
    module.CHUNK_LOGITS = 10 * VOCABULARY
    mesh = init_device_mesh("cpu", (2,))
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        values, gradients, size = scored(model, sequence_logprobs, *rows(), 1.0)
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
        torch.save([values, gradients, size], f"{folder}/rank{rank()}.pt")


def test_the_head_of_a_sharded_model_is_whole_in_both_passes(tiny_lm):
    """With and without a tied head."""
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    folders = [tiny_lm("llama", tie_word_embeddings=tied, **sizes) for tied in (False, True)]
    launch(score_on_two_ranks, folders, 2, "cpu")
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        expected = scored(model, every_logit, *rows(), 1.0)
        for number in range(2):
            found = torch.load(f"{folder}/rank{number}.pt")
            assert_same(model, found, expected)
            assert found[2] < 93 * VOCABULARY


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_the_head_is_applied_to_chosen_tokens_alone(load, name, packed):
    model, (ids, mask) = load(name), rows()
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.2
    chosen[:, 0] = False
    everything = scored(model, lambda *a: sequence_logprobs(*a, packed=packed).masked_fill(~chosen, 0.0), ids, mask)
    found = scored(model, lambda *a: sequence_logprobs(*a, packed=packed, chosen=chosen), ids, mask)
    assert_same(model, found, everything)
    assert torch.equal(found[0] != 0, chosen & mask)
    weights = max(parameter.numel() for parameter in model.parameters())
    assert found[2] <= max(int((chosen & mask).sum()) * VOCABULARY, weights) < everything[2]


def test_packed_rows_in_chunks(load, monkeypatch):
    model, (ids, mask) = load("llama"), rows()
    expected = sequence_logprobs(model, ids, mask)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 10 * VOCABULARY)
    torch.testing.assert_close(sequence_logprobs(model, ids, mask, packed=True), expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_not_finite_do_not_condemn_the_head(load):
    model, (ids, mask) = load("llama"), rows()
    assert module.has_separable_head(model)
    for number in (float("nan"), float("inf")):
        model.model.norm.weight.detach().fill_(number)
        assert not sequence_logprobs(model, ids, mask).isfinite().all()
        assert module.has_separable_head(model)


def test_no_token_chosen_is_a_zero_with_a_gradient(load):
    model, (ids, mask) = load("llama"), rows()
    found = scored(model, lambda *a: sequence_logprobs(*a, chosen=torch.zeros_like(mask)), ids, mask)
    assert not found[0].any() and all(not gradient.any() for gradient in found[1].values())


def test_a_head_that_does_more_is_found_and_gets_all_logits(load, monkeypatch):
    """The model runs once more before its first pass, whichever tokens are chosen, because ranks choose different ones."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 10 * VOCABULARY)
    model, (ids, mask) = load("llama"), rows()
    plain = sequence_logprobs(model, ids, mask).detach()
    forward, calls = model.forward, []

    def sharper(input_ids=None, attention_mask=None, logits_to_keep=0, **more):
        calls.append(input_ids.shape)
        output = forward(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep, **more)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(model, "forward", sharper)
    expected = scored(model, every_logit, ids, mask, 1.0)
    module._SEPARABLE.clear()
    for number, share in enumerate((0.3, 1.0)):
        calls.clear()
        chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) <= share
        found = scored(model, lambda *a, chosen=chosen: sequence_logprobs(*a, chosen=chosen), ids, mask, 1.0)
        assert calls == [(1, 16), ids.shape][number:]
    assert_same(model, found, expected)
    assert (found[0] - plain).abs().max() > 0.1, "control: the factor matters"
    module._SEPARABLE.clear()


def test_no_entropy_unless_asked():
    logits, tokens = torch.randn(5, 7), torch.arange(5)
    chosen, nothing = token_logprobs(logits, tokens, 0.5)
    again, entropy = token_logprobs(logits, tokens, 0.5, with_entropy=True)
    distribution = torch.distributions.Categorical(logits=logits / 0.5)
    assert nothing is None and torch.equal(chosen, again)
    torch.testing.assert_close(chosen, distribution.log_prob(tokens))
    torch.testing.assert_close(entropy, distribution.entropy())
