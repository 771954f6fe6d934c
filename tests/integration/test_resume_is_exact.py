"""Two steps, and two more of a resumed run, are four bit for bit: of every trainer."""

import pytest
import torch
from every_trainer import ACTIONS, RECIPES, VLA, checkpoint, lines, start, tensors
from recipe_sums import add_tokenizer
from run_results import differing_weights

IMAGES = [
    "model=cnn", "model.init_config.image_size=36", "model.init_config.feature_dim=16", "env.cameras=[front]", "env.image_size=36",
    "algorithm.actor.name=scratch",
]  # fmt: skip
CASES = {name: (name, []) for name in (*ACTIONS, *RECIPES)} | {
    "adapters in bf16": ("cloning", [*VLA, "model.is_lora=true", "model.lora.rank=4", "model.precision=bf16"]),
    "sac of images from scratch": ("sac", [*IMAGES, "algorithm.entropy_in_target=true"]),
    "td3 of images from scratch": ("td3", [*IMAGES, "algorithm.target_policy=true"]),
}


@pytest.mark.parametrize("case", CASES)
def test_two_and_two_steps_are_four(case, tmp_path, tiny_lm):
    name, more = CASES[case]
    model = add_tokenizer(tiny_lm())
    start(name, tmp_path / "whole", 4, model, *more)
    start(name, tmp_path / "halves", 2, model, *more)
    start(name, tmp_path / "halves", 4, model, *more, resumes=True)
    whole, halves = (tensors(name, tmp_path / folder, 4) for folder in ("whole", "halves"))
    assert not differing_weights(whole, halves) and any(key.startswith(("optimizer.", "learner.")) for key in whole)
    if "is_lora" in str(more):
        assert {tensor.dtype for key, tensor in whole.items() if "lora_" in key} == {torch.float32}, "masters"
    if name in ("sac", "td3"):
        assert {
            "replay.features",
            "replay.generator",
            "learner.generator",
            "learner.critics.first.weight",
        } <= whole.keys()
    found = lines(tmp_path / "halves")
    if name == "cloning":  # the last step of a phase has a line, so the first half has one more
        found = [line for line in found if line["step"] != 1]
    assert lines(tmp_path / "whole") == found and [line["step"] for line in found][-1] == 3
    if name in RECIPES:
        start(name, tmp_path / "other", 4, model, seed=1)
        other = tensors(name, tmp_path / "other", 4)
    else:  # what continues from the weights alone, without optimiser, buffer and counters, ends elsewhere
        source = checkpoint(name, tmp_path / "whole", 2)
        start(name, tmp_path / "other", 2, model, *more, f"init_from={source}")
        other = tensors(name, tmp_path / "other", 2)
    weights = [key for key in whole if key.startswith("model.")]
    assert not all(torch.equal(whole[key], other[key]) for key in weights), "control"
