"""Small models of the vLLM tests, and what they compute in torch."""

import pickle

import numpy as np
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.models import build_policy
from rlinf.models.lora import MergedWeights
from rlinf.types import Observation

NUM_ROWS, TEMPERATURE = 12, 1.3
INSTRUCTIONS = ("reach the red block", "push the blue block into the zone")


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = build_policy(build_config(compose_config(["experiment=quickstart_vllm"])))
    with torch.no_grad():
        model.language_model.lm_head.weight.mul_(5.0)  # tokens that are far from equally likely
    return model.to(dtype).eval()


def observe(seed=0, num_rows=NUM_ROWS):
    generator = np.random.default_rng(seed)
    return Observation(
        images={"front": generator.integers(0, 256, (num_rows, 64, 64, 3), dtype=np.uint8)},
        state=None,
        instruction=[INSTRUCTIONS[row % 2] for row in range(num_rows)],
    )


def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.2 * parameter.std(correction=0) * noise)


@torch.no_grad()
def trainer_logprobs(model, inputs, prediction):
    return model.evaluate_actions(inputs, prediction.sequences, TEMPERATURE).logprobs


def act(policy, inputs, seed=5):
    uniforms = torch.rand(len(inputs["input_ids"]), policy.num_uniforms, generator=torch.Generator().manual_seed(seed))
    return policy.predict_action_batch(temperature=TEMPERATURE, uniforms=uniforms, **inputs)


def gap(policy, prediction, logprobs):
    return (policy.rollout_logprobs(prediction, TEMPERATURE) - logprobs).abs()


def weights_of(policy):
    """All tensors that its engine gets."""
    weights = MergedWeights(policy.model, 0, policy.buckets, excluded=policy.adapter.excluded)
    return dict(weights.tensors(set(weights.manifest)))


def make_language_model(seed, hidden_size=64, **fields):
    """A Phi-3: its queries, keys and values are one tensor, gate and up projections another."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 64,
        "original_max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 95,
    }  # fmt: skip
    heads = {"num_attention_heads": hidden_size // 32, "num_key_value_heads": hidden_size // 64}
    return Phi3ForCausalLM(Phi3Config(hidden_size=hidden_size, **heads, **{**sizes, **fields})).eval()


@torch.no_grad()
def continue_greedily(model, prompt, num_tokens, temperature):
    """The slow way: the whole sequence again for each token."""
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        scores = (model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return ids, logprobs


def check_rows(output, model, prompts, num_tokens, temperature=0.7):
    for row, prompt in enumerate(prompts):
        ids, logprobs = continue_greedily(model, prompt, num_tokens, temperature)
        length = int(output["unpadded_sequence_lengths"][row])
        assert output["output_ids"][row, :length].tolist() == ids
        assert not output["output_ids"][row, length:].any()
        torch.testing.assert_close(
            output["logprobs"][row, len(prompt) : length], torch.tensor(logprobs), atol=1e-4, rtol=0
        )
        assert not output["logprobs"][row, : len(prompt)].any() and not output["logprobs"][row, length:].any()


def crossed(policy, monkeypatch):
    """Bytes of the tensors, and of the messages, that go to the engine of a policy from now on."""
    counts, send = {"tensors": 0, "messages": 0}, policy.engine.send

    def counted(command, payload):
        counts["messages"] += len(pickle.dumps((command, payload)))
        entries = payload.manifest.values() if command == "load" else ()
        counts["tensors"] += sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)
        send(command, payload)

    monkeypatch.setattr(policy.engine, "send", counted)
    return counts
