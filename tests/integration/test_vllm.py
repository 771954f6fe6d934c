"""vLLM as the generator: the trainer's log-probabilities, complete weight syncs, and no process that stays behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import engines_of, is_running, wait_until
from run_results import QUIET
from transformers import Qwen3MoeConfig
from vllm_models import (
    NUM_ROWS,
    TEMPERATURE,
    act,
    check_rows,
    crossed,
    gap,
    make_language_model,
    make_model,
    observe,
    perturb,
    trainer_logprobs,
    weights_of,
)

from rlinf.cli import main
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.engines import vllm_engine
from rlinf.engines.vllm_engine import EngineError, GenerateRequest, VllmEngine
from rlinf.engines.weight_handle import WeightBuckets, WeightBuffer, WeightsRejectedError
from rlinf.errors import ConfigError
from rlinf.llm import validation as generation_contract
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_model import HFModel
from rlinf.llm.vllm_generation import VllmGeneration, VllmGenerationWorker
from rlinf.models.config import LoraConfig
from rlinf.models.embodiment.openvla.vllm import OpenVLAVllmAdapter
from rlinf.models.lora import apply_lora
from rlinf.rollout.config import VllmOptions
from rlinf.rollout.vllm_policy import VllmPolicy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/setup.sh --vllm"
)


@pytest.fixture(scope="module")
def policy():
    policy = VllmPolicy(make_model(), VllmOptions(), num_envs=64)
    policy.update_weights(1)
    yield policy
    policy.close()


# -- log-probabilities -------------------------------------------------------------------------------------------


def test_float32_logprobs_are_the_trainers_before_and_after_two_syncs(policy):
    model = policy.model
    inputs = model.preprocess(observe())
    others = dict(inputs, pixel_values=inputs["pixel_values"].roll(1, 0))
    for version in (1, 2, 3):
        policy.update_weights(version)
        prediction = act(policy, inputs)
        assert gap(policy, prediction, trainer_logprobs(model, inputs, prediction)).max() <= 1e-4
        assert gap(policy, prediction, trainer_logprobs(model, others, prediction)).max() > 0.1, "control: wrong image"
        perturb(model, version)
        stale = gap(policy, prediction, trainer_logprobs(model, inputs, prediction)).max()
        assert stale > 0.1, "control: stale weights"
    policy.update_weights(4)
    assert policy.engine.num_starts == 1


def test_bfloat16_logprobs_are_the_trainers_up_to_rounding():
    model = make_model(dtype=torch.bfloat16)
    with contextlib.closing(VllmPolicy(model, VllmOptions(), num_envs=64)) as policy:
        policy.update_weights(1)
        inputs = model.preprocess(observe(num_rows=64))
        prediction = act(policy, inputs)
        others = dict(inputs, pixel_values=inputs["pixel_values"].roll(1, 0))
        assert gap(policy, prediction, trainer_logprobs(model, inputs, prediction)).exp().mean() <= 1.05
        assert gap(policy, prediction, trainer_logprobs(model, others, prediction)).exp().mean() > 1.05, "control"


ROUNDED = """
from rlinf.models.embodiment.openvla.vllm_model import OpenVLAForVllm, OpenVLADummyInputs, OpenVLAMultiModalProcessor, OpenVLAProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

@MULTIMODAL_REGISTRY.register_processor(OpenVLAMultiModalProcessor, info=OpenVLAProcessingInfo, dummy_inputs=OpenVLADummyInputs)
class RoundedHead(OpenVLAForVllm):
    head_dtype = "model"
"""


def test_logits_of_a_bfloat16_model_are_not_rounded(tmp_path, monkeypatch):
    (tmp_path / "rounded_model.py").write_text(ROUNDED)
    monkeypatch.syspath_prepend(str(tmp_path))
    model, gaps = make_model(dtype=torch.bfloat16), []
    with torch.no_grad():
        for layer in model.language_model.model.layers:  # states of both are then embeddings, and differ by no rounding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.language_model.lm_head.weight.mul_(8.0)
    for model_class in (OpenVLAVllmAdapter.model_class, "rounded_model:RoundedHead"):
        monkeypatch.setattr(OpenVLAVllmAdapter, "model_class", model_class)
        with contextlib.closing(VllmPolicy(model, VllmOptions(), num_envs=64)) as policy:
            policy.update_weights(1)
            inputs = model.preprocess(observe(num_rows=64))
            prediction = act(policy, inputs)
            gaps.append(float(gap(policy, prediction, trainer_logprobs(model, inputs, prediction)).exp().mean()))
    assert gaps[0] <= 1.0005, gaps
    assert gaps[1] > 1.001, f"control: {gaps}"


def test_only_action_tokens_are_sampled_and_they_become_actions(policy):
    inputs = policy.preprocess(observe())
    prediction = act(policy, inputs)
    tokens = prediction.sequences[:, -policy.num_sampled :]
    tokenizer = policy.model.action_tokenizer
    assert ((tokens >= tokenizer.first_token) & (tokens < tokenizer.vocab_size)).all()
    assert torch.equal(prediction.actions, policy.model.decode_actions(prediction.sequences))
    greedy = policy.predict_action_batch(do_sample=False, temperature=TEMPERATURE, **inputs)
    expected = policy.model.predict_action_batch(do_sample=False, temperature=TEMPERATURE, **inputs)
    assert torch.equal(greedy.sequences, expected.sequences)
    assert gap(policy, greedy, trainer_logprobs(policy.model, inputs, greedy)).max() <= 1e-4
    torch.testing.assert_close(policy.predict_values(**inputs), expected.values, atol=1e-5, rtol=0)


def test_an_action_depends_on_its_own_row_and_numbers_only(policy):
    inputs = policy.preprocess(observe())
    together = act(policy, inputs)
    uniforms = torch.rand(NUM_ROWS, 2, generator=torch.Generator().manual_seed(5))
    for row in (0, 7):
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        single = policy.predict_action_batch(temperature=TEMPERATURE, uniforms=uniforms[row : row + 1], **alone)
        assert torch.equal(single.sequences, together.sequences[row : row + 1])
    assert not torch.equal(act(policy, inputs, seed=6).sequences, together.sequences), "control: other numbers"


def test_frequencies_of_the_first_token_are_the_trainers_probabilities(policy):
    num_draws = 1024
    one = observe(num_rows=1).select([0] * num_draws)
    inputs = policy.preprocess(one)
    first = act(policy, inputs).sequences[:, -policy.num_sampled]
    counts = torch.bincount(first, minlength=policy.allowed_token_ids[-1] + 1)
    with torch.no_grad():
        alone = {name: tensor[:1] for name, tensor in inputs.items()}
        logits = policy.model.predict_action_batch(do_sample=False, **alone).logits[0, 0]
    expected = num_draws * torch.softmax(logits / TEMPERATURE, -1)
    spread = (expected * (1 - expected / num_draws)).sqrt().clamp_min(0.5)
    deviations = (counts[policy.allowed_token_ids] - expected) / spread
    assert deviations.abs().max() < 5
    assert expected.max() > 3 * expected.mean(), "control: a uniform draw would be seen"


# -- weight sync -------------------------------------------------------------------------------------------------


def test_weights_that_are_not_all_there_are_refused_by_name_and_change_nothing(policy):
    inputs = policy.preprocess(observe())
    before = act(policy, inputs)
    weights, buffer = weights_of(policy), WeightBuffer()
    names = ["language_model.model.layers.1.self_attn.k_proj.weight", "projector.fc1.bias"]
    partial = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if name not in names}
    with pytest.raises(WeightsRejectedError) as error:
        policy.engine.update_weights(buffer.write(partial, 90))
    assert all(name in str(error.value) for name in names) and "missing" in str(error.value)
    with pytest.raises(WeightsRejectedError, match="unknown value_head"):
        policy.engine.update_weights(buffer.write(weights | {"value_head.weight": torch.zeros(3)}, 91))
    reshaped = weights | {"projector.fc1.bias": torch.zeros(3)}
    with pytest.raises(WeightsRejectedError, match=r"projector.fc1.bias is \[3\]"):
        policy.engine.update_weights(buffer.write(reshaped, 92))
    spoilt = weights | {"projector.fc1.bias": torch.full_like(weights["projector.fc1.bias"], float("nan"))}
    with pytest.raises(WeightsRejectedError, match="'projector.fc1.bias' contains nan .1 of"):
        policy.engine.update_weights(buffer.write(spoilt, 93))
    assert torch.equal(act(policy, inputs).logits, before.logits)
    buffer.close()


def test_after_the_first_push_only_blocks_with_trained_weights_cross(monkeypatch):
    """Only the queries are adapted, and vLLM fuses them with keys and values: the whole block crosses, in buckets that divide it."""
    lora = LoraConfig(rank=4, alpha=8, target_modules=["q_proj"])
    model = apply_lora(make_model(seed=1), lora)
    adapted = VllmPolicy(model, VllmOptions(), num_envs=64)
    adapted.buckets = WeightBuckets(100_000)
    inputs = model.preprocess(observe())
    try:
        adapted.update_weights(94)
        sizes = {name: tensor.nbytes for name, tensor in weights_of(adapted).items()}
        adapted_blocks = ("language_model.model.layers.", "vision_backbone.featurizer.blocks.0.")
        blocks = [name for name in sizes if name.startswith(adapted_blocks)]
        for version in (95, 96):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name) + version))
            before = act(adapted, inputs)
            assert gap(adapted, before, trainer_logprobs(model, inputs, before)).max() > 0.02, "control: stale weights"
            counts = crossed(adapted, monkeypatch)
            adapted.update_weights(version)
            assert counts["tensors"] == sum(sizes[name] for name in blocks) < sum(sizes.values())
            assert counts["messages"] < 50_000
            prediction = act(adapted, inputs)
            assert gap(adapted, prediction, trainer_logprobs(model, inputs, prediction)).max() <= 1e-4
        os.kill(adapted.engine.pid, signal.SIGKILL)
        again = act(adapted, inputs)
        assert torch.equal(again.logits, prediction.logits) and adapted.engine.num_starts == 2
    finally:
        adapted.close()


def test_the_engine_keeps_nothing_of_the_shared_memory(policy):
    inputs = policy.preprocess(observe())
    before = act(policy, inputs)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights_of(policy).items()}
    assert len([*policy.buckets.pack(zeros.items(), 93), *policy.buckets.pack(zeros.items(), 93)]) == 2
    assert torch.equal(act(policy, inputs).logits, before.logits)


def test_a_prompt_longer_than_the_model_allows_is_a_user_error(policy):
    sampling = {"max_tokens": 9, "min_tokens": 9, "ignore_eos": True}
    rejections = {
        "vLLM rejects a prompt of 300 tokens.*set rollout.vllm.max_model_len=<more than 300>": (
            (300,),
            {"max_tokens": 1},
        ),
        "=256 leaves 6 tokens after a prompt.*expected 9. Set rollout.vllm.max_model_len=259": ((250, 5), sampling),
    }
    for words, (lengths, arguments) in rejections.items():
        with pytest.raises(ConfigError, match=words):
            policy.engine.generate(GenerateRequest([{"prompt_token_ids": [1] * n} for n in lengths], arguments))


FAULTY = """
import os, time
from rlinf.models.embodiment.openvla.vllm import OpenVLAVllmAdapter
from rlinf.models.embodiment.openvla.vllm_model import OpenVLAForVllm, OpenVLADummyInputs, OpenVLAMultiModalProcessor, OpenVLAProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

FOLDER = os.path.dirname(__file__)

@MULTIMODAL_REGISTRY.register_processor(OpenVLAMultiModalProcessor, info=OpenVLAProcessingInfo, dummy_inputs=OpenVLADummyInputs)
class FaultyOpenVLA(OpenVLAForVllm):
    def load_weights(self, weights):
        if os.path.exists(FOLDER + "/fail"):
            os.remove(FOLDER + "/fail")
            next(iter(weights))
            raise RuntimeError("injected fault")
        return super().load_weights(weights)

    def embed_multimodal(self, **kwargs):
        if os.path.exists(FOLDER + "/hang"):
            os.rename(FOLDER + "/hang", FOLDER + "/hanging")
            time.sleep(600)
        return super().embed_multimodal(**kwargs)
"""


def test_a_failed_sync_rebuilds_the_engine_and_a_hang_ends_with_stacks(tmp_path, monkeypatch):
    """A kill does, too: the test above."""
    (tmp_path / "faulty_model.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = make_model()
    policy = VllmPolicy(model, VllmOptions(), num_envs=NUM_ROWS)
    spec = policy.engine.spec
    policy.engine = VllmEngine(replace(spec, model_class="faulty_model:FaultyOpenVLA"))
    engine = policy.engine
    try:
        inputs = model.preprocess(observe())
        with pytest.raises(EngineError, match="no complete weights"):
            act(policy, inputs)
        (tmp_path / "fail").touch()
        first = engine.pid
        policy.update_weights(7)
        assert (engine.num_starts, engine.version) == (2, 7) and engine.pid != first and not is_running(first)
        prediction = act(policy, inputs)
        assert gap(policy, prediction, trainer_logprobs(model, inputs, prediction)).max() <= 1e-4
        (tmp_path / "hang").touch()
        # By its parent's clock 300 s pass when it hangs, however long it takes to come that far. It may hang before the first
        # reading, from which the deadline is counted.
        first_reading = iter([0.0])
        clock = SimpleNamespace(monotonic=lambda: next(first_reading, 300.0 * (tmp_path / "hanging").exists()))
        engine.timeout_s, second = 200.0, engine.pid
        with monkeypatch.context() as patch, pytest.raises(EngineError) as error:
            patch.setattr(vllm_engine, "time", clock)
            act(policy, model.preprocess(observe(seed=1)))  # vLLM would not encode the same images again
        assert "did not reply to 'generate' within 200 s" in str(error.value) and "embed_multimodal" in str(error.value)
        assert "rollout.vllm.timeout_s=400" in str(error.value) and not is_running(second)
    finally:
        policy.close()


# -- language models ---------------------------------------------------------------------------------------------


def check_allowed(worker, model):
    """Only allowed tokens are drawn, at their log-probabilities among each other."""
    prompts = torch.tensor([[5, 9, 3], [1, 2, 3]])
    output = worker.generate(prompts, allowed_token_ids=list(range(70, 90)), temperature=TEMPERATURE)
    drawn = output["output_ids"][:, 3:]
    assert ((drawn >= 70) & (drawn < 90)).all()
    with torch.no_grad():
        logits = model(output["output_ids"]).logits[:, 2:-1, 70:90] / TEMPERATURE
    expected = logits.log_softmax(-1).gather(-1, drawn.unsqueeze(-1) - 70).squeeze(-1)
    torch.testing.assert_close(output["logprobs"][:, 3:], expected, atol=1e-4, rtol=0)


def check_penalty(worker, model):
    """The penalty changes logits and log-probabilities, as Keskar et al. 2019 have it."""
    prompt, penalty, largest = [5, 9, 3], 3.0, 0.0
    output = worker.generate(torch.tensor([prompt]), greedy=True, temperature=1.0, repetition_penalty=penalty)
    tokens = output["output_ids"][0].tolist()
    for end in range(len(prompt), len(tokens)):
        with torch.no_grad():
            plain = model(torch.tensor([tokens[:end]])).logits[0, -1]
        logits, seen = plain.clone(), torch.tensor(sorted(set(tokens[:end])))
        logits[seen] = torch.where(plain[seen] > 0, plain[seen] / penalty, plain[seen] * penalty)
        expected = logits.log_softmax(-1)
        assert tokens[end] == int(expected.argmax())
        assert float(output["logprobs"][0, end]) == pytest.approx(float(expected.max()), abs=1e-4)
        largest = max(largest, float(expected.max() - plain.log_softmax(-1)[tokens[end]]))
    assert largest > 0.1, "control: the log-probabilities are not those without it"


def test_language_model_generates_as_transformers_does_takes_new_weights_and_ends(tmp_path):
    model, other = make_language_model(0), make_language_model(1)
    model.save_pretrained(tmp_path)
    generation = VllmGeneration(None, {
        "model_name": str(tmp_path), "backend": "vllm", "max_new_tokens": 5, "temperature": 0.7, "top_p": 1, "top_k": None,
        "eos_token_id": [], "max_model_len": 24,
        "vllm_cfg": {"kv_cache_memory_bytes": 16 << 20, "gpu_memory_utilization": 0.5},
    })  # fmt: skip
    prompts = [[5, 9, 3], [1, 2, 3, 4, 5, 6]]
    data = BatchedDataDict({
        "input_ids": torch.tensor([[*prompts[0], 0, 0, 0], prompts[1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6]), "label": ["a", "b"],
    })  # fmt: skip
    for _ in range(2):
        generation.prepare_for_generation()
    try:
        pid = generation.worker.engine.pid
        output = generation.generate(data, greedy=True)
        check_rows(output, model, prompts, 5)
        assert output["generation_lengths"].tolist() == [5, 5] and output["label"] == ["a", "b"]

        # The end-of-sequence token ends a row and is part of it; the length limit ends it too.
        eos = int(output["output_ids"][0, len(prompts[0]) + 1])
        stopped = generation.worker.generate(data["input_ids"][:1, :3], greedy=True, eos_token_id=eos)
        assert int(stopped["generation_lengths"][0]) <= 2 and int(stopped["output_ids"][0, -1]) == eos
        longest = generation.worker.generate(data["input_ids"], data["attention_mask"], max_new_tokens=1000)
        assert longest["unpadded_sequence_lengths"].tolist() == [24, 24]
        check_allowed(generation.worker, model)
        top = generation.worker.generate(data["input_ids"], data["attention_mask"], top_k=1)
        assert torch.equal(top["output_ids"], output["output_ids"]) and not top["logprobs"].any(), "of one token"
        check_penalty(generation.worker, model)

        buffer = WeightBuffer()
        weights = dict(other.state_dict())
        assert "model.layers.0.self_attn.qkv_proj.weight" in weights
        with pytest.raises(WeightsRejectedError, match=r"missing model.norm.weight \(1 in all\)"):
            generation.update_weights(buffer.write({k: v for k, v in weights.items() if k != "model.norm.weight"}, 3))
        check_rows(generation.generate(data, greedy=True), model, prompts, 5)
        assert generation.update_weights(buffer.write(weights, 4)) == 4
        check_rows(generation.generate(data, greedy=True), other, prompts, 5)
        buffer.close()
        with pytest.raises(ConfigError, match="temprature"):
            generation.worker.generate(data["input_ids"], temprature=1)
        rejections = {
            r"token ids \[96, 200\]; expected 0 to 95, the vocab_size=96.*the model's own tokenizer": [[5, 96, 200]],
            "a prompt of 24 tokens.*max_model_len=24.*set vllm_cfg.max_model_len=<more than 24>": [[1] * 24],
        }
        for words, rows in rejections.items():
            with pytest.raises(ConfigError, match=words):
                generation.worker.generate(torch.tensor(rows))
    finally:
        generation.finish_generation()
    generation.finish_generation()
    assert not is_running(pid)
    with pytest.raises(EngineError, match="has lost weights version 4"):
        generation.generate(data, greedy=True)
    assert generation.worker.engine.pid is None


def test_tied_weights_and_experts_arrive_under_any_of_their_names(tmp_path):
    """vLLM keeps a head of its own for tied weights on CPUs, and takes experts under the names of a checkpoint only."""
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=95,
    )  # fmt: skip
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(HFModel.from_config(config).eval())
    models[0].save_pretrained(tmp_path)
    generation = VllmGeneration(None, {
        "model_name": str(tmp_path), "max_new_tokens": 4, "eos_token_id": [], "max_model_len": 24, "kv_cache_memory_bytes": 16 << 20,
    })  # fmt: skip
    prompts = [[5, 9, 3], [1, 2, 4]]
    data = BatchedDataDict({"input_ids": torch.tensor(prompts), "attention_mask": torch.ones(2, 3, dtype=torch.long)})

    def named(model, left_out):
        return {name: tensor for name, tensor in model.model.state_dict().items() if name != left_out}

    buffer = WeightBuffer()
    try:
        sampled = [generation.generate(data, greedy=False)["output_ids"] for _ in range(2)]
        assert not torch.equal(*sampled), "other draws at every call"
        check_rows(generation.generate(data, greedy=True), models[0], prompts, 4, temperature=1.0)
        with pytest.raises(AssertionError):
            check_rows(generation.generate(data, greedy=True), models[1], prompts, 4, temperature=1.0)
        pushes = (
            (models[1], named(models[1], "lm_head.weight")),
            (models[0], named(models[0], "model.embed_tokens.weight")),
            (models[1], models[1].public_state_dict()),
        )
        for version, (model, tensors) in enumerate(pushes):
            generation.update_weights(buffer.write(tensors, version))
            check_rows(generation.generate(data, greedy=True), model, prompts, 4, temperature=1.0)
        assert generation.worker.engine.num_starts == 1
    finally:
        generation.finish_generation()
        buffer.close()


def test_diagnose_checks_torch_and_vllm(tmp_path, capsys, monkeypatch):
    make_language_model(0).save_pretrained(tmp_path)
    workers = []

    def one_worker(*arguments, **settings):
        workers.append(VllmGenerationWorker(*arguments, **settings))
        return workers[0]

    monkeypatch.setattr(generation_contract, "VllmGenerationWorker", one_worker)
    with monkeypatch.context() as patch:
        patch.setattr(VllmGenerationWorker, "stop", lambda self: None)  # the second run plays in the same engine
        assert main(["diagnose", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    for engine in ("torch", "vllm"):
        rows = [line for line in lines if line.startswith(f"{engine}: ")]
        assert len(rows) == 9 + 8 and all(" pass " in row for row in rows)
    generate = workers[0].generate
    monkeypatch.setattr(workers[0], "generate", lambda *args, **more: generate(*args, temperature=2.0, **more))
    assert main(["diagnose", str(tmp_path)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if " FAIL " in line]
    assert len(failed) == 8 and all(line.startswith("vllm: decode against prefill") for line in failed), "control"
    assert workers[0].engine.pid is None, "it was stopped"


def test_settings_that_vllm_refuses_are_a_user_error(tmp_path):
    make_language_model(0).save_pretrained(tmp_path)
    generation = VllmGeneration(None, {"model_name": str(tmp_path), "vllm_cfg": {"no_such_argument": 1}})
    with pytest.raises(ConfigError, match="no_such_argument.*Set vllm_cfg.<setting>="):
        generation.prepare_for_generation()
    assert generation.worker.engine.pid is None


# -- processes ---------------------------------------------------------------------------------------------------

PARENT = """
import sys, time
from rlinf.engines.vllm_engine import EngineSpec, VllmEngine
arguments = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 24}
with VllmEngine(EngineSpec(model=sys.argv[1], engine_args=arguments)):
    time.sleep(600)
"""


def test_an_engine_that_starts_does_not_outlive_its_parent(tmp_path):
    make_language_model(0).save_pretrained(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command, environment = (
        [sys.executable, "-c", PARENT, str(tmp_path)],
        {"PYTHONPATH": paths, "TMPDIR": str(temporary)},
    )
    parent = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        engines = wait_until(lambda: engines_of(parent.pid), 280)
        assert len(engines) == 1 and is_running(engines[0]) and any(temporary.iterdir())
        parent.send_signal(signal.SIGINT)
        parent.wait(280)
        assert wait_until(lambda: not is_running(engines[0]), 60) and not any(temporary.iterdir())
    finally:
        parent.kill()
        parent.wait()


# -- training ----------------------------------------------------------------------------------------------------

TRAINING = [
    "experiment=quickstart_vllm", *QUIET, "sft.max_steps=0", "trainer.max_steps=2", "trainer.minibatch_size=64", "trainer.eval_every=0",
    "rollout.num_envs=8", "evaluation.num_episodes=4", "algorithm.critic_warmup_steps=0", "algorithm.tis_cap=2.0",
]  # fmt: skip


def test_training_with_rollouts_in_vllm_keeps_the_gate_closed_and_leaves_no_process(tmp_path, monkeypatch):
    start, pids = VllmEngine.start, set()

    def noted(engine):
        start(engine)
        pids.add(engine.pid)

    monkeypatch.setattr(VllmEngine, "start", noted)
    folder = train(build_config(compose_config([*TRAINING, f"output_dir={tmp_path / 'run'}"])))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/logprob_gap_max" in line]
    assert len(steps) == 2
    assert all(0 < line["rollout/logprob_gap_max"] <= 1e-4 for line in steps), "0 would mean that torch played"
    assert all(1 <= line["rollout/logprob_gap_exp_mean"] <= 1 + 1e-4 for line in steps)
    assert len(pids) == 1 and not any(map(is_running, pids))
