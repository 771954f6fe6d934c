"""Images reach a vLLM engine as the trainer's processor made them: its log-probabilities are those of the trained model."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rlinf.engines import vllm_engine
from rlinf.engines.weight_handle import WeightBuckets
from rlinf.errors import ConfigError
from rlinf.llm.vllm_generation import IMAGE_FAMILIES, VllmGeneration
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.models.lora import MergedWeights
from rlinf.recipes.samples import Prompt, collate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, make_tiny_vlm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/setup.sh --vllm"
)
NUM_TOKENS, TEMPERATURE = 5, 1.3
# The smallest head that vLLM's attention on CPUs knows.
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
STAND_IN = """
from enum import Enum
from types import SimpleNamespace

class InterpolationMode(Enum):
    NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS, NEAREST_EXACT = range(7)

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def missing(*_, **__):
        raise NotImplementedError(f"a stand-in for torchvision was asked for {name}")
    return missing
"""


def make_torchvision(folder):
    """Write a package that vLLM's processors of these families can import, and that computes nothing."""
    for path in ("", "transforms", "transforms/v2"):
        (folder / "torchvision" / path).mkdir(parents=True)
        (folder / "torchvision" / path / "__init__.py").write_text(STAND_IN + '__version__ = "0.99.0"\n')
    functions = "from torchvision.transforms import InterpolationMode\n" + STAND_IN[STAND_IN.index("def __getattr__") :]
    for path in ("io", "transforms/functional", "transforms/v2/functional"):
        (folder / "torchvision" / f"{path}.py").write_text(functions)
    (folder / "torchvision-0.99.0.dist-info").mkdir()
    (folder / "torchvision-0.99.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.99.0\n")
    return folder


@pytest.fixture
def torchvision(tmp_path, monkeypatch):
    """Let the engine's process find a torchvision. It needs one only to import; the one for GPUs does not load beside torch for CPUs."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    folder, environment = make_torchvision(tmp_path / "packages"), vllm_engine.engine_environment

    def with_stand_in(*arguments):
        found = environment(*arguments)
        return found | {"PYTHONPATH": found["PYTHONPATH"] + os.pathsep + str(folder)}

    monkeypatch.setattr(vllm_engine, "engine_environment", with_stand_in)


def image(seed, height=32, width=32):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_prompt(processor, text, images):
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    words = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    made = processor(text=[words], images=[images] if images else None, return_tensors="pt")
    ids = made.pop("input_ids")[0].tolist()
    made.pop("attention_mask")
    return Prompt(ids, dict(made) if images else {})


@torch.no_grad()
def score(model, prompt, answer, banned):
    """The slow way: a row alone, without padding or cache."""
    ids = torch.tensor([prompt.input_ids + answer])
    inputs = dict(prompt.model_inputs)
    if inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(answer)))
    logits = model(ids, torch.ones_like(ids), **inputs).logits[0, len(prompt.input_ids) - 1 : -1] / TEMPERATURE
    logits[:, banned] = -torch.inf
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_the_engine_sees_what_the_trainer_sees(family, tmp_path, monkeypatch, torchvision):
    rope = ROPE | ({"mrope_interleaved": True} if family == "qwen3_vl" else {})
    text = FAMILIES[family]["config"]["text_config"] | HEADS | {"rope_parameters": rope}
    tower = FAMILIES[family]["config"]["vision_config"] | {"out_hidden_size": HEADS["hidden_size"]}
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {"config": {"text_config": text, "vision_config": tower}})
    folder = make_tiny_vlm(family, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = load_vlm_processor(folder, model.config)
    two = [image(1), image(2, 16, 64)]
    prompts = [make_prompt(processor, *each) for each in (("what is it", two[:1]), ("hello", []), ("and these", two))]
    swapped = (("what is it", two[1:]), ("hello", []), ("and these", two[::-1]))
    others = [make_prompt(processor, *each) for each in swapped]
    banned = [model.config.image_token_id, model.config.video_token_id, model.config.vision_start_token_id,
              model.config.vision_end_token_id]  # fmt: skip
    generation = VllmGeneration(None, {
        "model_name": str(folder), "max_new_tokens": NUM_TOKENS, "temperature": TEMPERATURE, "eos_token_id": [],
        "max_model_len": 128, "kv_cache_memory_bytes": 16 << 20, "vllm_cfg": {"skip_mm_profiling": True},
    })  # fmt: skip

    def gaps(given):
        """Largest difference of each row, if the trainer had ``given`` as prompts."""
        output = generation.generate(collate(prompts), greedy=False)
        found = []
        for row, (prompt, seen) in enumerate(zip(prompts, given, strict=True)):
            part = slice(len(prompt.input_ids), len(prompt.input_ids) + NUM_TOKENS)
            answer = output["output_ids"][row, part].tolist()
            assert not set(answer) & set(banned)
            found.append(float((score(model, seen, answer, banned) - output["logprobs"][row, part]).abs().max()))
        return found

    buckets = WeightBuckets(100_000)
    try:
        generation.prepare_for_generation()
        assert max(gaps(prompts)) <= 1e-4
        wrong = gaps(others)
        assert min(wrong[0], wrong[2]) > 1e-2 and wrong[1] <= 1e-4, "control: other images, or another order"
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "visual" in name:
                    random = torch.Generator().manual_seed(len(name))
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
        stale = gaps(prompts)
        assert min(stale[0], stale[2]) > 1e-2, "control: stale weights of the tower"
        for version in (1, 2):
            assert generation.update_weights(MergedWeights(model, version, buckets)) == version
            assert max(gaps(prompts)) <= 1e-4
        batch = collate([Prompt(prompts[2].input_ids, prompts[0].model_inputs)])
        with pytest.raises(ConfigError, match="has 8 image tokens .* its 1 images need 4"):
            generation.generate(batch, greedy=False)
    finally:
        generation.shutdown()
        buckets.close()
