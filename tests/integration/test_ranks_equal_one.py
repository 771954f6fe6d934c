"""Two ranks train what one does: every trainer. Sharded models are in test_recipe_ranks.py and test_parallel.py."""

import pytest
import torch
from every_trainer import RECIPES, VLA, lines, start, tensors
from recipe_sums import add_tokenizer

REPLACED = [
    "rollout=groups", "rollout.num_envs=16", "env.reward_mode=sparse", "model.val_micro_batch_size=4", "sft.max_steps=120",
    "sft.num_demonstrations=40", "sft.batch_size=32", "algorithm.max_resamples=2", "trainer.save_every=0",
]  # fmt: skip
"""After some cloning, episodes end at different times, so the ranks score different numbers of rows, and groups are replaced."""
CASES = {
    "cloning, then ppo": ("ppo", 2, ["sft.max_steps=2", "sft.num_demonstrations=8", "sft.batch_size=15"]),
    "normalised ppo": ("normalised ppo", 2, ["algorithm.normalize_over=minibatch"]),
    "pi0": (
        "ppo",
        2,
        ["model=pi0_tiny", "env.state=proprio", *VLA[1:], "sft.max_steps=0", "algorithm.critic_warmup_steps=0"],
    ),
    "a vla": ("ppo", 1, [*VLA, "sft.max_steps=1", "algorithm.critic_warmup_steps=0"]),
    "grpo with replaced groups": ("grpo", 1, REPLACED),
    "rloo": ("rloo", 2, []),
    "reinforce_pp": ("reinforce_pp", 2, []),
} | {name: (name, 2, []) for name in RECIPES}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case, tmp_path, tiny_lm):
    name, steps, more = CASES[case]
    model = add_tokenizer(tiny_lm())
    for folder, ranks in (("one", 1), ("two", 2)):
        start(name, tmp_path / folder, steps, model, *more, ranks=ranks)
    one, two = (tensors(name, tmp_path / folder, steps) for folder in ("one", "two"))
    trained = [key for key in one if key.startswith("model.")]
    for key in trained:
        torch.testing.assert_close(two[key], one[key], atol=1e-5, rtol=1e-5, msg=key)
    found = [lines(tmp_path / folder) for folder in ("one", "two")]
    for line, other in zip(*found, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            assert other[key] == (pytest.approx(value, abs=1e-5, rel=1e-4) if isinstance(value, float) else value), key
    if more == REPLACED:
        line = found[0][-1]
        assert line["rollout/num_episodes"] > 16 and line["train/return_mean"] != line["rollout/return_mean"]
        assert line["rollout/env_steps_total"] < 8 * line["rollout/num_episodes"], "else all ranks score as many rows"
    assert any(line.get(f"{section}/grad_norm", 0) > 1e-3 for line in found[0] for section in ("train", "sft"))
