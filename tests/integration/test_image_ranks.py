"""Ranks that share shards of a vision-language model train what one does, whichever of them has images in which micro-batch."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlinf.algorithms import NLLLossFn
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor
from rlinf.distributed.process_group import rank
from rlinf.models import HuggingFacePolicy
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor
from rlinf.recipes.samples import Sample, collate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import FAMILIES, IMAGE_SIZE, make_tiny_vlm

TEXT = "reach the red block"
PLACES = {
    "one rank has images": [1, 2, 0, 0],
    "first micro-batches have images": [1, 0, 2, 0],
    "one row has an image": [0, 0, 0, 1],
    "no row has images": [0, 0, 0, 0],
}
"""Images of four rows. Each of two ranks takes two of them, one in each micro-batch."""
FAMILIES_USED = ("llava", "gemma3", "qwen2_5_vl")
CASES = [("llava", place) for place in PLACES] + [(family, "one rank has images") for family in FAMILIES_USED[1:]]


def samples(family: str, folder: str, num_images: list[int]) -> list[Sample]:
    processor = load_vlm_processor(folder, AutoConfig.from_pretrained(folder))
    random = np.random.default_rng(5)
    rows = []
    for number, count in enumerate(num_images):
        images = [random.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8) for _ in range(count)]
        prompt = FAMILIES[family].get("image_text", "<image>") * count + TEXT + " again" * number
        inputs = dict(processor(text=[prompt], images=images or None, return_tensors="pt"))
        ids = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        rows.append(Sample(ids, [place >= len(ids) - 4 - number for place in range(len(ids))], inputs))
    return rows


def step(folder: str, rows: list[Sample], sharding: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Loss and gradients of a step, and the scores of the rows after it."""
    policy = HuggingFacePolicy(folder, learning_rate=1e-3, micro_batch_size=1, sharding=sharding, device_map=None)
    gradients, take = {}, policy.optimizer.step
    names = {id(p): name for name, p in policy.model.named_parameters()}

    def record() -> None:
        for p in policy.optimizer.parameters:
            gradients[names[id(p)]] = full_tensor(torch.zeros_like(p) if p.grad is None else p.grad).clone()
        take()

    policy.optimizer.step = record
    loss = policy.train(collate(rows), NLLLossFn())["loss"]
    return loss, gradients, policy.get_logprobs(collate(rows))["logprobs"]


def step_of_rank(arguments) -> None:
    folders, output = arguments
    for family, place in CASES:
        rows = samples(family, folders[family], PLACES[place])
        own = rows[:2] if rank() == 0 else rows[2:]
        with deadline("update"):
            found = step(folders[family], own, "fsdp2")
        torch.save(found, Path(output) / f"{family} {place} {rank()}.pt")


def difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference by the norm of what is expected."""
    parts = torch.cat([(gradients[name] - expected[name]).flatten() for name in expected])
    return float(parts.norm() / torch.cat([gradient.flatten() for gradient in expected.values()]).norm())


def test_two_ranks_with_shards_are_one_wherever_the_images_are(tmp_path):
    folders = {family: str(make_tiny_vlm(family, tmp_path / family)) for family in FAMILIES_USED}
    launch(step_of_rank, (folders, str(tmp_path)), 2, "cpu", deadlines=asdict(DeadlinesConfig(update=60)))
    of_llava = []
    for family, place in CASES:
        rows = samples(family, folders[family], PLACES[place])
        loss, expected, scores = step(folders[family], rows, "auto")
        towers = [name for name in expected if "vision" in name or "visual" in name]
        assert towers and any(expected[name].any() for name in towers) == any(PLACES[place]), (family, place)
        for number in range(2):
            own_loss, gradients, own_scores = torch.load(tmp_path / f"{family} {place} {number}.pt")
            assert own_loss == pytest.approx(loss, rel=1e-5), (family, place)
            assert difference(gradients, expected) < 1e-4, (family, place)
            own = scores[2 * number : 2 * number + 2, : own_scores.shape[1]]
            assert torch.allclose(own_scores, own, atol=1e-4), (family, place)
        of_llava += [expected] * (family == "llava")
    assert difference(of_llava[0], of_llava[1]) > 1e-2, "control: the same texts with the images in other rows"
