"""One step of each method on each family that the recipes name."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlinf.llm.losses import GRPOLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.completions import Completer
from rlinf.recipes.datasets import PackedRows, Rows
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt, Sample
from rlinf.recipes.sft import SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import IMAGE_SIZE, make_tiny_vlm

LANGUAGE = {
    "mistral": {},
    "gemma": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
VISION = {"gemma3": "<start_of_image>", "llava": "<image>"}


class Letters:
    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(0xE000 + token) for token in tokens)


def length(text, prompt, **facts):
    """A reward in which answers differ."""
    score = sum(ord(letter) % 7 for letter in text)
    return float(score), {"length": float(score)}


def take_steps(folder, samples, kinds=("sft", "grpo")):
    """Return the losses of a step of SFT and of GRPO, and how far each has moved the weights."""
    found = []
    for kind in kinds:
        policy = HuggingFacePolicy(str(folder), learning_rate=1e-3, max_new_tokens=4, micro_batch_size=2)
        before = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
        rows = PackedRows(Rows([{"number": number} for number in range(len(samples))]), lambda row: None, seed=0)
        if kind == "sft":
            rows.pack = lambda row: samples[row["number"]]
            trainer = SFTTrainer(policy, rows, num_steps=1, batch_size=len(samples))
        else:
            rows.pack = lambda row: Prompt(samples[row["number"]].input_ids, samples[row["number"]].model_inputs)
            completer = Completer(
                TorchGenerator(policy), Letters(), length, batch_size=8, max_new_tokens=4, end_tokens=[2]
            )
            trainer = GRPOTrainer(
                policy, rows, num_steps=1, batch_size=4 * len(samples), groups=Groups(4, seed=0), loss=GRPOLossFn(), completer=completer
            )  # fmt: skip
        update = trainer.step(0)
        moved = torch.cat([p.detach().flatten() for p in policy.model.parameters()]) - before
        found.append((update, float(moved.abs().max())))
    return found


def check(found):
    (sft, moved_by_sft), *others = found
    assert sft.loss > 0.5 and moved_by_sft > 1e-5
    for grpo, moved_by_grpo in others:
        assert grpo.metrics["rollout/reward_std"] > 0 and moved_by_grpo > 1e-5
        assert grpo.metrics["rollout/logprob_gap_exp_mean"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("family", LANGUAGE)
def test_language_models_take_a_step(tiny_lm, family):
    random = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 48, (5 + i,), generator=random).tolist() for i in range(2)]
    check(take_steps(tiny_lm(family, **LANGUAGE[family]), [Sample(ids, [True] * len(ids)) for ids in tokens]))


@pytest.mark.parametrize("family", VISION)
def test_vision_language_models_take_a_step_on_images(tmp_path, family):
    folder = make_tiny_vlm(family, tmp_path)
    processor = load_vlm_processor(str(folder), AutoConfig.from_pretrained(folder))
    random = np.random.default_rng(5)
    samples = []
    for text in ("reach the red block", "go to the zone"):
        image = random.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        row = dict(processor(text=[VISION[family] + text], images=[image], return_tensors="pt"))
        ids = row.pop("input_ids")[0].tolist()
        row.pop("attention_mask")
        samples.append(Sample(ids, [place >= len(ids) - 3 for place in range(len(ids))], row))
    found = take_steps(folder, samples)
    check(found)
    for each in samples:
        each.model_inputs["pixel_values"] = each.model_inputs["pixel_values"].flip(-1)
    assert take_steps(folder, samples, ("sft",))[0][0].loss != found[0][0].loss, "the images are seen"
