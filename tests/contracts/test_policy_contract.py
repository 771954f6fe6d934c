"""One contract for every token policy and every engine, and the names under which they are imported."""

import subprocess
import sys

import pytest
import torch

from rlinf.distributed import BatchedDataDict, RayVirtualCluster
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.llm.generation_interface import GenerationInterface
from rlinf.llm.policy_interface import PolicyInterface
from rlinf.llm.validation import check_generation, check_policy
from rlinf.models import HuggingFacePolicy, MegatronPolicy
from rlinf.models.generation import HuggingFaceGeneration, VllmGeneration

POLICIES = {
    "hugging face": lambda folder: HuggingFacePolicy(folder, max_new_tokens=4, learning_rate=1e-2),
    "hugging face, adapters": lambda folder: HuggingFacePolicy(folder, max_new_tokens=4, learning_rate=1e-2, lora={}),
    "megatron": lambda folder: MegatronPolicy(folder, max_new_tokens=4, learning_rate=1e-2),
}
ENGINES = {
    "hugging face": lambda folder: HuggingFaceGeneration(folder, max_new_tokens=4),
    "vllm": lambda folder: VllmGeneration(
        None,
        {"model_name": folder, "max_new_tokens": 4, "dtype": "float32",
         "vllm_cfg": {"max_model_len": 32, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8}},
    ),
}  # fmt: skip


def build(make, folder):
    try:
        return make(folder)
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_generates_scores_and_learns(name, tiny_lm, prompts):
    policy = build(POLICIES[name], tiny_lm())
    assert isinstance(policy, PolicyInterface)
    assert check_policy(policy, prompts) == []


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_generates(name, tiny_lm, prompts):
    engine = build(ENGINES[name], tiny_lm(head_dim=32))  # the least of vLLM on CPUs
    assert isinstance(engine, GenerationInterface)
    engine.prepare_for_generation()
    try:
        assert check_generation(engine, prompts) == []
    finally:
        engine.finish_generation()


def wrong(**methods):
    """A policy with other methods."""
    return type("Wrong", (HuggingFacePolicy,), methods)


def changed(key, change):
    """A policy whose ``generate`` returns something else under one key."""

    def generate(self, data, greedy=False):
        output = HuggingFacePolicy.generate(self, data, greedy)
        output[key] = change(output[key])
        return output

    return wrong(generate=generate)


def generating(greedy):
    """A policy that ignores the argument ``greedy``."""
    return wrong(generate=lambda self, data, **_: HuggingFacePolicy.generate(self, data, greedy))


def scored(change, method="get_logprobs"):
    """A policy whose scores, or whose scores by the reference, are changed scores of the policy."""

    def score(self, data):
        return BatchedDataDict({"logprobs": change(HuggingFacePolicy.get_logprobs(self, data)["logprobs"])})

    return wrong(**{method: score})


def only_first(logprobs):
    """Keep the log-probability of the first generated token of each row."""
    return torch.where((logprobs != 0).cumsum(-1) == 1, logprobs, 0.0)


UNTRAINED = wrong(train=lambda self, data, loss_fn: {"nll": 0.0})
REFERENCE = "get_reference_logprobs"


@pytest.mark.parametrize(
    ("policy_class", "sentence"),
    [
        (changed("generation_lengths", lambda lengths: lengths + 1), "unpadded_sequence_lengths are"),
        (changed("output_ids", lambda ids: ids[:, :-1]), "too narrow"),
        (changed("output_ids", lambda ids: ids.roll(1, 1)), "the prompt, then the response"),
        (changed("logprobs", lambda logprobs: logprobs[:, 1:]), "expected float32"),
        (changed("logprobs", lambda logprobs: logprobs - 1), "not 0 outside the response"),
        (changed("logprobs", lambda logprobs: 0.5 * logprobs), "generate and get_logprobs disagree"),
        (changed("logprobs", only_first), "generate and get_logprobs disagree"),
        (changed("logprobs", torch.zeros_like), "0 everywhere"),
        (generating(greedy=True), "greedy=False returned the greedy tokens of all 32 rows"),
        (scored(lambda logprobs: logprobs.double()), "get_logprobs returned torch.float64"),
        (scored(lambda logprobs: logprobs - 1), "0 for the first token"),
        (UNTRAINED, "without 'loss'"),
        (UNTRAINED, "did not change any log-probability"),
        (scored(lambda logprobs: logprobs, REFERENCE), "changed the reference"),
        (scored(lambda logprobs: logprobs - 1, REFERENCE), "Before training"),
        (generating(greedy=False), "the second time"),
    ],
)
def test_each_violation_of_the_contract_is_named(policy_class, sentence, tiny_lm, prompts):
    report = check_policy(policy_class(tiny_lm(), max_new_tokens=4, learning_rate=1e-2), prompts)
    assert any(sentence in line for line in report), report


@pytest.mark.parametrize("interface", [PolicyInterface, GenerationInterface])
def test_interfaces_are_abstract_until_every_method_is_there(interface):
    with pytest.raises(TypeError, match="generate"):
        interface()
    methods = {name: lambda self, *args, **kwargs: None for name in interface.__abstractmethods__}
    assert isinstance(type("Whole", (interface,), methods)(), interface)
    for missing in methods:
        with pytest.raises(TypeError, match=missing):
            type("Partial", (interface,), {name: f for name, f in methods.items() if name != missing})()


def test_a_policy_without_a_reference_says_so():
    names = {"generate", "get_logprobs", "train"}
    assert PolicyInterface.__abstractmethods__ == names
    policy = type("Plain", (PolicyInterface,), {name: lambda self: None for name in names})()
    with pytest.raises(NotImplementedError, match="Plain has no reference policy"):
        policy.get_reference_logprobs(BatchedDataDict())


def test_every_name_is_importable_without_torch_until_it_is_used():
    code = (
        "import sys, rlinf.models, rlinf.distributed, rlinf.algorithms, rlinf.models.generation\n"
        "assert not {'torch', 'transformers', 'vllm', 'ray', 'megatron'} & set(sys.modules), sys.modules.keys()\n"
        "from rlinf.models import HuggingFacePolicy, MegatronPolicy\n"
        "from rlinf.models.interfaces import (PolicyInterface, LogprobsSpec, TrainingDatumSpec, LossFunction,\n"
        "    GenerationDatumSpec, GenerationOutputSpec, BatchedDataDict)\n"
        "from rlinf.models.generation import HuggingFaceGeneration, VllmConfig, GenerationConfig\n"
        "from rlinf.models.generation.interfaces import GenerationInterface, GenerationDatumSpec, GenerationOutputSpec\n"
        "from rlinf.models.interfaces import verify_right_padding\n"
        "from rlinf.models.validation import validate_log_probability_consistency\n"
        "from rlinf.llm.validation import test_max_model_len_respected, test_generation_consistency\n"
        "from rlinf.distributed import BatchedDataDict, RayVirtualCluster\n"
        "from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn\n"
        "import rlinf.llm.vllm_generation, rlinf.rollout.vllm_policy\n"
        "import rlinf.llm.vllm_generation, rlinf.rollout.vllm_policy\n"
        "assert not {'vllm', 'ray', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


@pytest.mark.parametrize("module", ["rlinf.models", "rlinf.distributed", "rlinf.algorithms", "rlinf.models.generation"])
def test_unknown_names_are_attribute_errors(module):
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        __import__(module, fromlist=["x"]).NoSuchName


def test_vllm_config_is_a_dictionary_of_its_keys():
    from rlinf.models.generation import VllmConfig

    config = VllmConfig(model_name="m", top_k=None, backend="vllm", vllm_cfg={"max_model_len": 2048})
    assert config == {"model_name": "m", "top_k": None, "backend": "vllm", "vllm_cfg": {"max_model_len": 2048}}


def test_megatron_checks_its_arguments_and_names_what_is_missing():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "sequence_parallel": True}
    missing = "\\[megatron\\].*use HuggingFacePolicy|need 8 ranks per model.*Start 8 ranks with torchrun"
    with pytest.raises((MissingDependencyError, ConfigError), match=missing):
        MegatronPolicy("llama3.1-8b", **sizes, use_flash_attention=True)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=1; expected at least 2"):
        MegatronPolicy("llama3.1-8b", sequence_parallel=True)
    for setting, value in (("torch_dtype", "float16"), ("top_k", 5)):
        with pytest.raises(ConfigError, match=f"{setting}={value}"):
            MegatronPolicy("llama3.1-8b", **{setting: value})
    with pytest.raises(ConfigError, match="Did you mean 'pipeline_model_parallel_size'"):
        MegatronPolicy("llama3.1-8b", pipeline_parallel_size=2)


def test_a_cluster_of_one_machine_counts_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cluster = RayVirtualCluster([2])
    assert cluster.world_size() == 2
    with pytest.raises(ConfigError, match=r"\[4\]\) needs 4 GPUs, but torch sees 2.*RayVirtualCluster\(\[2\]\)"):
        RayVirtualCluster([4])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="sees none.*use_gpus=False"):
        RayVirtualCluster([4])
    assert RayVirtualCluster([4], use_gpus=False).world_size() == 4
    for counts in ([4, 4], [0], 4):
        with pytest.raises(ConfigError, match="single number of processes.*RayVirtualCluster"):
            RayVirtualCluster(counts)
