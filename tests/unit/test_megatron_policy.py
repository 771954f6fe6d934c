"""The Megatron-core policy is the Hugging Face policy on the same checkpoint: alone, and however ranks share the model."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.distributed.launch import launch
from rlinf.engines.vllm_weights import LanguageModelNames
from rlinf.engines.weight_handle import WeightBuffer, WeightsRejectedError
from rlinf.errors import CheckpointError, ConfigError, NonFiniteError
from rlinf.llm.megatron.groups import check_device
from rlinf.llm.megatron.policy import MegatronPolicyConfig
from rlinf.llm.megatron.weights import check_family
from rlinf.models import HuggingFacePolicy, MegatronPolicy

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(
    not HAS_MEGATRON, reason="megatron-core is not installed: pip install -e '.[megatron]'"
)
OPTIONS = {"learning_rate": 1e-2, "max_new_tokens": 5, "temperature": 0.8, "max_grad_norm": 0.5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied, other rotary": ("llama", {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1}),
}


@pytest.fixture
def checkpoint(tiny_lm, tmp_path):
    """Folder of a family in which norms and biases are no longer what they are drawn as, ones and zeros."""

    def build(name: str = "llama") -> str:
        family, fields = FAMILIES[name]
        source, folder = Path(tiny_lm(family, **fields)), tmp_path / name.replace(" ", "_")
        if folder.exists():
            return str(folder)
        folder.mkdir()
        for path in source.iterdir():
            if path.suffix == ".json":
                (folder / path.name).write_bytes(path.read_bytes())
        random = torch.Generator().manual_seed(3)
        weights = {key: tensor + 0.2 * torch.randn(tensor.shape, generator=random) if tensor.ndim == 1 else tensor
                   for key, tensor in load_file(source / "model.safetensors").items()}  # fmt: skip
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return build


def state_of(policy) -> dict[str, torch.Tensor]:
    return policy.public_state_dict() if isinstance(policy, MegatronPolicy) else policy.model.state_dict()


def train(policy, batch, loss_fn) -> dict[str, float]:
    """Metrics of a step, without the memory that it took."""
    return {name: value for name, value in policy.train(batch, loss_fn).items() if not name.startswith("memory/")}


def results(policy, batch) -> dict:
    """What a policy says of a batch before and after a step, and its weights then."""
    generated = policy.generate(batch, greedy=False)
    before = policy.get_logprobs(generated)["logprobs"]
    scores = {"prompts": policy.get_logprobs(batch)["logprobs"], "responses": before, "sampled": generated["logprobs"]}
    metrics = train(policy, batch, GRPOLossFn(kl_coef=0.1, loss_level="sequence"))
    scores |= {
        "after": policy.get_logprobs(batch)["logprobs"],
        "reference": policy.get_reference_logprobs(batch)["logprobs"],
    }
    return {"ids": generated["output_ids"], "scores": scores, "metrics": metrics, "state": state_of(policy)}


def assert_same(found: dict, expected: dict) -> None:
    assert found["ids"].equal(expected["ids"])
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
    for key, logprobs in expected["scores"].items():
        # The step, of more than 0.1, has the sign of gradients that are nearly 0 where rounding decides it.
        assert float((found["scores"][key] - logprobs).abs().max()) < (1e-3 if key == "after" else 1e-4), key
    assert float((found["scores"]["after"] - found["scores"]["prompts"]).abs().max()) > 0.1, "the step shows"
    assert float((found["scores"]["reference"] - found["scores"]["prompts"]).abs().max()) < 1e-5
    assert_close_weights(found["state"], expected["state"])


def assert_close_weights(found: dict, expected: dict) -> None:
    assert found.keys() | {"lm_head.weight"} == expected.keys()
    # Adam's first step is the sign of the gradient: where that is nearly 0, rounding decides it.
    apart = torch.cat([(found[key] - expected[key]).abs().flatten() for key in found])
    assert (apart > 1e-4).float().mean() < 0.01, apart.max()


@pytest.fixture
def batch(prompts):
    prompts["advantages"] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    return prompts


@needs_megatron
@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_is_the_hugging_face_policy(checkpoint, batch, name):
    folder = checkpoint(name)
    assert_same(results(MegatronPolicy(folder, **OPTIONS), batch), results(HuggingFacePolicy(folder, **OPTIONS), batch))


@needs_megatron
@pytest.mark.parametrize("loss_fn", [NLLLossFn(), DPOLossFn(), GRPOLossFn(kl_coef=0.1)])
def test_micro_batches_are_one_batch(checkpoint, batch, loss_fn):
    folder = checkpoint()
    batch["reference_logprobs"] = 0.9 * HuggingFacePolicy(folder).get_logprobs(batch)["logprobs"]
    whole = train(HuggingFacePolicy(folder), batch, loss_fn)
    for cut in ({"micro_batch_size": 2}, {"max_tokens_per_microbatch": 12}):
        assert train(MegatronPolicy(folder, **cut), batch, loss_fn) == pytest.approx(whole, rel=1e-4, abs=1e-5)


@needs_megatron
def test_bfloat16_logprobs_differ_by_its_rounding_only(checkpoint, batch):
    folder = checkpoint()
    exact = HuggingFacePolicy(folder).get_logprobs(batch)["logprobs"]
    rough = MegatronPolicy(folder, torch_dtype="bfloat16").get_logprobs(batch)["logprobs"]
    assert rough.dtype == torch.float32 and 0 < float((rough - exact).abs().max()) < 0.5


@needs_megatron
def test_a_saved_policy_is_a_checkpoint_of_the_weights_it_has_then(checkpoint, batch, tmp_path):
    policy = MegatronPolicy(checkpoint("qwen3"), **OPTIONS)
    policy.train(batch, NLLLossFn())
    policy.save_pretrained(tmp_path / "saved")
    again = HuggingFacePolicy(str(tmp_path / "saved"), temperature=0.8).get_logprobs(batch)["logprobs"]
    assert float((again - policy.get_logprobs(batch)["logprobs"]).abs().max()) < 1e-5


@needs_megatron
@pytest.mark.parametrize("name", ["llama, tied, other rotary", "qwen2"])
def test_an_engine_of_the_checkpoint_takes_the_weights(checkpoint, batch, name):
    policy, buffer = MegatronPolicy(checkpoint(name), **OPTIONS), WeightBuffer()
    policy.train(batch, NLLLossFn())
    weights = policy.public_state_dict()
    names = LanguageModelNames(AutoConfig.from_pretrained(policy.model_name))
    handle = buffer.write(weights, version=1)
    names.check(handle.manifest)
    read = names.read(handle.open())
    assert read.keys() | {"lm_head.weight"} == HuggingFacePolicy(policy.model_name).model.state_dict().keys()
    assert all(read[key].equal(tensor) for key, tensor in weights.items())
    with pytest.raises(WeightsRejectedError, match="missing model.norm.weight"):
        names.check(
            buffer.write({key: weights[key] for key in weights if key != "model.norm.weight"}, version=2).manifest
        )
    buffer.close()


@needs_megatron
def test_what_cannot_be_is_refused_by_name(checkpoint, tiny_lm, batch, monkeypatch):
    folder = checkpoint()
    policy = MegatronPolicy(folder)
    with pytest.raises(ConfigError, match="not a TokenLoss"):
        policy.train(batch, lambda model, data: None)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 .* 8 ranks.*there are 1"):
        MegatronPolicy(folder, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    with pytest.raises(ConfigError, match="use_flash_attention=True.*Pass use_flash_attention=False"):
        MegatronPolicy(folder, use_flash_attention=True)
    for words, options, device in (
        ("torch_dtype=float32.*Pass torch_dtype='bfloat16'", {"use_flash_attention": True}, "cuda"),
        ("=True, but the device is 'cpu'.*Pass sequence_parallel=False", {"sequence_parallel": True}, "cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_device(MegatronPolicyConfig(**options), torch.device(device))
    for words, fields, sizes in (
        ("tensor_model_parallel_size=3 does not divide vocab_size=47", {"vocab_size": 47}, (3, 1)),
        ("pipeline_model_parallel_size=5 does not divide num_hidden_layers=32", {}, (1, 5)),
        ("pipeline_model_parallel_size=2 puts the embedding.*ties them", {"tie_word_embeddings": True}, (1, 2)),
    ):
        with pytest.raises(ConfigError, match=words):
            check_family(AutoConfig.for_model("llama", **fields), *sizes)
    for words, family, fields in (
        ("model_type=gpt2; expected llama or mistral", "gpt2", {}),
        ("sliding_window=3; expected None", "mistral", {"sliding_window": 3}),
        ("hidden_act=gelu; expected silu", "llama", {"hidden_act": "gelu"}),
        ("does not support 2 weights.*o_proj.bias", "llama", {"attention_bias": True}),
    ):
        with pytest.raises(ConfigError, match=words):
            MegatronPolicy(tiny_lm(family, **fields))
    before = policy.public_state_dict()
    batch["advantages"][0] = float("nan")
    with pytest.raises(NonFiniteError, match="loss is nan"):
        policy.train(batch, GRPOLossFn())
    assert all(tensor.equal(before[key]) for key, tensor in policy.public_state_dict().items())


@needs_megatron
@pytest.mark.parametrize("key", ["pixel_values", "image_sizes", "image_grid_thw", "position_ids", "inputs_embeds"])
def test_what_is_not_read_is_refused_by_every_method(checkpoint, batch, key):
    policy = MegatronPolicy(checkpoint(), max_new_tokens=2)
    batch[key] = torch.zeros(4, 6, dtype=torch.long)
    methods = (
        policy.generate,
        policy.get_logprobs,
        policy.get_reference_logprobs,
        lambda data: policy.train(data, NLLLossFn()),
    )
    for method in methods:
        with pytest.raises(ConfigError, match=f"'{key}', but MegatronPolicy accepts only token ids"):
            method(batch)
        method(BatchedDataDict({name: value for name, value in batch.items() if name != key}))


@needs_megatron
def test_a_folder_that_changed_is_no_reference(checkpoint, batch):
    folder = checkpoint()
    policy = MegatronPolicy(folder, **OPTIONS)
    policy.train(batch, NLLLossFn())
    policy.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="no longer has"):
        policy.get_reference_logprobs(batch)


FAMILIES["qwen3, two groups"] = ("qwen3", {"head_dim": 8})
SHARED = {
    "tensor": ("qwen3, two groups", {"tensor_model_parallel_size": 2}),
    "tensor, sequence": ("qwen3, two groups", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensor, tied": ("llama, tied, other rotary", {"tensor_model_parallel_size": 2, "micro_batch_size": 3}),
    "pipeline": ("qwen2", {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "data": ("llama", {}),
}


def run_one_rank(arguments) -> None:
    """All of ``SHARED`` on this rank, one after the other, since most of the time is the start of the processes."""
    from megatron.core import parallel_state

    import rlinf.llm.megatron.policy as module

    folders, batch, output = arguments
    rank = dist.get_rank()
    for sharing, (_, options) in SHARED.items():
        current_device, check_device = torch.cuda.current_device, module.check_device
        if "sequence_parallel" in options:
            # Megatron-core asks CUDA for the device of its buffers; its collectives are the same ones on this device.
            torch.cuda.current_device, module.check_device = lambda: "cpu", lambda *_: None
        policy = MegatronPolicy(folders[sharing], **OPTIONS, **options)
        if sharing == "data":
            rows = batch.slice(0, 3) if rank == 0 else batch.slice(3, 4)
            found = {"metrics": train(policy, rows, NLLLossFn()), "state": policy.public_state_dict()}
        else:
            found = results(policy, batch)
            if rank == 0:
                with pytest.raises(ConfigError, match=r"\(1, 1\), but this process already has groups of"):
                    MegatronPolicy(folders[sharing])
        torch.save(found, f"{output}/{sharing}_{rank}.pt")
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device, module.check_device = current_device, check_device


@needs_megatron
def test_two_ranks_are_one_process_however_they_fraction(checkpoint, batch, tmp_path):
    folders = {sharing: checkpoint(name) for sharing, (name, _) in SHARED.items()}
    launch(run_one_rank, (folders, batch, str(tmp_path)), 2, "cpu")
    for sharing, folder in folders.items():
        policy = HuggingFacePolicy(folder, **OPTIONS)
        expected = results(policy, batch) if sharing != "data" else {"metrics": train(policy, batch, NLLLossFn())}
        for rank in range(2):
            found = torch.load(tmp_path / f"{sharing}_{rank}.pt")
            if sharing == "data":
                assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
                assert_close_weights(found["state"], state_of(policy))
            else:
                assert_same(found, expected)
