"""The document on models and policies is true: each of its code blocks runs, and its signatures are those of the package.

The document lies next to the project. In it the package has another name; nothing else is changed. The models that it names are
tiny folders of the same names, in the present folder.
"""

import importlib.util
import inspect
import re
import typing
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlinf.models.generation
from rlinf import algorithms, models
from rlinf.distributed import BatchedDataDict, RayVirtualCluster
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.llm import batch_checks, generation_interface, policy_interface
from rlinf.llm import validation as checks
from rlinf.models.embodiment.modules.tokenizer import TINY_TOKENIZER
from rlinf.models.generation import HuggingFaceGeneration

DOCUMENT = next(iter(sorted((Path(__file__).resolve().parents[3] / "shared" / "seeds").glob("004_*.txt"))), None)
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = CODE.findall(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT else []
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_document = pytest.mark.skipif(DOCUMENT is None, reason="the document does not lie next to the project")


def block(*words: str) -> str:
    """The only block that has all of these words, with the package's own name."""
    (found,) = [text for text in BLOCKS if all(word in text for word in words)]
    return re.sub(r"\b[a-z]+_rl\b", "rlinf", found)


class GenerationByTransformers(HuggingFaceGeneration):
    """Stands where vLLM would, with the settings that both have."""

    def __init__(self, cluster, config):
        print("vLLM is not installed: HuggingFaceGeneration in its place")
        engine = {"vllm_cfg", "tensor_parallel_size", "gpu_memory_utilization", "backend"}
        flat = {key: value for key, value in config.items() if key not in engine}
        flat.setdefault("max_model_len", config.get("vllm_cfg", {}).get("max_model_len"))
        super().__init__(**flat)


@pytest.fixture
def names(tiny_lm, tmp_path, monkeypatch, prompts) -> dict:
    """What a reader of the document has at hand before a block."""
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-1.5B"):
        Path(name).parent.mkdir()
        AutoModelForCausalLM.from_pretrained(tiny_lm(max_position_embeddings=4096, head_dim=32)).save_pretrained(name)
    prompts["advantages"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    return {
        "ABC": ABC, "abstractmethod": abstractmethod, "Any": typing.Any, "Dict": dict, "TypedDict": typing.TypedDict,
        "torch": torch, "batch": prompts, "validation_batch": prompts, "dataloader": [prompts, prompts],
        "BatchedDataDict": BatchedDataDict, "LossFunction": policy_interface.LossFunction, "RayVirtualCluster": RayVirtualCluster,
        "PolicyInterface": policy_interface.PolicyInterface, "GenerationInterface": generation_interface.GenerationInterface,
        "GenerationConfig": generation_interface.GenerationConfig, "DPOLossFn": algorithms.DPOLossFn,
        "GRPOLossFn": algorithms.GRPOLossFn, "cluster": RayVirtualCluster([1], use_gpus=False),
        "load_custom_model": lambda path: AutoModelForCausalLM.from_pretrained(path),
    }  # fmt: skip


@pytest.fixture
def vllm(monkeypatch):
    """Four GPUs by name, and an engine where vLLM is not installed."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if not HAS_VLLM:
        monkeypatch.setitem(vars(rlinf.models.generation), "VllmGeneration", GenerationByTransformers)


def run(text: str, names: dict) -> dict:
    exec(compile(text, "<document>", "exec", dont_inherit=True), names)
    return names


@needs_document
def test_every_block_runs(names):
    """All blocks of definitions and settings, which need nothing but names; the others have tests of their own below."""
    assert len(BLOCKS) == 21
    own_tests = ("policy = HuggingFacePolicy", "policy = MegatronPolicy", "generator = VllmGeneration", "is_consistent")
    for text in BLOCKS:
        if not any(words in text for words in own_tests):
            run(re.sub(r"\b[a-z]+_rl\b", "rlinf", text), dict(names))


def parameters(function) -> dict:
    return dict(inspect.signature(function).parameters)


def differences(theirs, ours) -> list[str]:
    """What a class or function of the document has and ours lacks: methods, parameters and their defaults, keys."""
    if inspect.isfunction(theirs):
        wanted, found = parameters(theirs), parameters(ours)
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
        return [
            f"{theirs.__name__}({name})"
            for name, parameter in wanted.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and not (name in found and found[name].default in (parameter.default, False))
            and not (accepts_any and name not in found)
        ]
    found = [key for key in getattr(theirs, "__annotations__", {}) if key not in {*ours.__annotations__, "__extra__"}]
    for name, function in vars(theirs).items():
        if inspect.isfunction(function):
            has = hasattr(ours, name)
            found += differences(function, getattr(ours, name)) if has else [f"{theirs.__name__}.{name}"]
    return found


@needs_document
def test_signatures_are_those_of_the_document(names):
    places = [models, policy_interface, rlinf.models.generation, generation_interface, batch_checks, checks]
    compared = set()
    for text in BLOCKS:
        defined = re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE)
        wanted = [name for name in defined if not name.startswith("Custom")]
        if not wanted:
            continue
        theirs = run(text, dict(names))
        for name in wanted:
            try:
                ours = next(found for place in places if (found := getattr(place, name, None)) is not None)
            except ModuleNotFoundError as error:
                print(f"{name} is not compared: {error}")
                continue
            assert differences(theirs[name], ours) == [], name
            compared.add(name)
    assert len(compared) >= 11


def test_differences_of_signatures_are_found():
    class Document:
        def generate(self, data, greedy): ...

        def other(self): ...

    class Ours:
        def generate(self, data): ...

    assert differences(Document, Ours) == ["generate(greedy)", "Document.other"]


@needs_document
def test_usage_of_the_hugging_face_policy(names):
    done = run(block("policy = HuggingFacePolicy(", "bfloat16"), names)
    assert done["generations"]["output_ids"].shape[0] == 4
    assert done["logprobs"]["logprobs"].shape == (4, 6)
    assert done["loss"]["loss"] == pytest.approx(0.6931, abs=1e-3)


@needs_document
def test_usage_of_megatron_says_what_is_missing(names):
    with pytest.raises((MissingDependencyError, ConfigError), match=r"\[megatron\]|Start 8 ranks with torchrun"):
        run(block("policy = MegatronPolicy("), names)


@needs_document
def test_usage_of_vllm(names, vllm):
    done = run(block("generator = VllmGeneration(", "vllm_cfg"), names)
    assert done["output"]["output_ids"][0, :4].tolist() == [1, 2, 3, 4]
    assert 1 <= int(done["output"]["generation_lengths"][0]) <= 100


@needs_document
def test_the_custom_policy_works_with_our_losses(names):
    done = run(block("class CustomPolicy"), names)
    policy = done["CustomPolicy"]("meta-llama/Llama-2-7b-hf")
    prompts = names["batch"]
    output = policy.generate(BatchedDataDict({"input_ids": prompts["input_ids"][:1], "max_new_tokens": 3}), greedy=True)
    assert output["generation_lengths"].tolist() == [3] and output["unpadded_sequence_lengths"].tolist() == [9]
    assert policy.get_logprobs(prompts)["logprobs"].shape == (4, 6, 48)
    assert policy.train(prompts, algorithms.NLLLossFn())["loss"] > 0
    with pytest.raises(NotImplementedError, match="CustomPolicy has no reference policy"):
        policy.get_reference_logprobs(prompts)


@needs_document
def test_the_custom_engine_can_be_made(names):
    engine = run(block("class CustomGeneration"), names)["CustomGeneration"]("meta-llama/Llama-2-7b-hf")
    assert isinstance(engine, generation_interface.GenerationInterface)


@needs_document
def test_the_settings_of_the_document_are_accepted(names, vllm):
    done = run(block("hf_config = ", "megatron_config = "), names) | run(block("gen_config = "), dict(names))
    policy = models.HuggingFacePolicy(**done["hf_config"])
    assert next(policy.model.parameters()).dtype == torch.bfloat16
    engine = HuggingFaceGeneration("Qwen/Qwen2.5-1.5B", **done["gen_config"])
    assert {key: getattr(engine.config, key) for key in done["gen_config"]} == done["gen_config"]
    generator = rlinf.models.generation.VllmGeneration(names["cluster"], done["vllm_config"])
    assert generator.generate(names["batch"], greedy=True)["output_ids"].shape[0] == 4
    generator.finish_generation()
    with pytest.raises((MissingDependencyError, ConfigError), match=r"\[megatron\]|Start 8 ranks with torchrun"):
        models.MegatronPolicy(**done["megatron_config"])


@needs_document
def test_the_complete_pipeline(names, vllm):
    settings = run(block("hf_config = ", "vllm_config = "), dict(names))["vllm_config"]
    done = run(block("for batch in dataloader"), names | {"vllm_config": settings})
    assert done["loss"]["loss"] < 0.6931
    assert done["logprobs"]["logprobs"].shape == done["ref_logprobs"]["logprobs"].shape


@needs_document
def test_the_validation_example_prints_its_warning_only_where_it_should(names, capsys):
    policy = models.HuggingFacePolicy("meta-llama/Llama-2-7b-hf", learning_rate=3e-3)
    names |= {"policy": policy, "generator": HuggingFaceGeneration("meta-llama/Llama-2-7b-hf", max_new_tokens=8)}
    text = block("is_consistent")
    assert run(text, dict(names))["is_consistent"] is True and "Warning" not in capsys.readouterr().out
    policy.train(names["batch"], algorithms.NLLLossFn())
    assert run(text, dict(names))["is_consistent"] is False and "Warning" in capsys.readouterr().out


def test_the_page_of_the_project_runs(tiny_lm, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    blocks = CODE.findall(page)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    words = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    model = tiny_lm(vocab_size=len(words), eos_token_id=words.eos_token_id)
    done = run("\n".join(blocks), {"model_name": model, "tokenizer_name": TINY_TOKENIZER})
    assert {"loss", "grad_norm", "kl_to_reference", "clip_fraction"} <= done["metrics"].keys()
    first, last = sum(done["mean_rewards"][:3]) / 3, sum(done["mean_rewards"][-3:]) / 3
    assert last > 2 * first, "the loop learns its reward"
    again = models.HuggingFacePolicy("my_policy").get_logprobs(done["prompts"])["logprobs"]
    torch.testing.assert_close(again, done["policy"].get_logprobs(done["prompts"])["logprobs"])


def test_a_pipeline_of_generation_scores_and_preferences(tiny_lm, prompts):
    """What the document's complete example does, where the document is not at hand."""
    policy = models.HuggingFacePolicy(tiny_lm(), learning_rate=1e-3)
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=4)
    assert checks.validate_log_probability_consistency(policy, engine, prompts)
    losses = []
    for _ in range(3):
        sampled = engine.generate(prompts, greedy=False)
        gap = policy.get_logprobs(sampled)["logprobs"] - policy.get_reference_logprobs(sampled)["logprobs"]
        assert bool(gap.any()) == bool(losses), "the reference is the policy until the first step"
        losses.append(policy.train(prompts, algorithms.DPOLossFn())["loss"])
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < losses[0]
