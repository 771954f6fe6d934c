"""A Hugging Face VLM folder that never acted, through the whole loop: clone, PPO, evaluate, resume."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_results import QUIET

from rlinf.commands.evaluate import evaluate
from rlinf.commands.open_checkpoint import load_policy, read_config
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_vlm import make_tiny_vlm

SMALL = [
    *QUIET, "env=tabletop", "env.tasks=[reach]", "env.state=none", "env.image_size=32", "env.max_episode_steps=4", "algorithm=ppo",
    "model.action_token_len=2", "rollout.num_envs=4", "rollout.num_chunks=4", "trainer.minibatch_size=8", "trainer.max_steps=1",
    "algorithm.critic_warmup_steps=0", "sft.max_steps=2", "sft.batch_size=4", "sft.num_demonstrations=4", "evaluation.num_episodes=4",
    "evaluation.num_envs=4",
]  # fmt: skip


@pytest.mark.parametrize("adapters", [False, True])
def test_a_vlm_folder_is_cloned_trained_evaluated_and_resumed(tmp_path, adapters):
    folder = make_tiny_vlm("llava", tmp_path / "vlm")
    source = ["model=hf_vla", f"model.model_path={folder}", "model.unnorm_key=tabletop", "model.precision=fp32",
              "model.micro_batch_size=8", "+model.override_config.n_action_bins=21"]  # fmt: skip
    lora = ["model.is_lora=true", "model.lora.rank=2", "model.lora.alpha=2"] if adapters else []
    config = build_config(compose_config([*SMALL, *source, *lora]))
    config.output_dir = str(tmp_path / "run")
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rl = next(line for line in lines if "rollout/logprob_gap_max" in line)
    assert rl["rollout/logprob_gap_max"] < 1e-5 and abs(rl["train/approx_kl"]) < 0.1 and math.isfinite(rl["train/loss"])
    checkpoint = tmp_path / "run" / "checkpoints" / "rl_000001"
    assert (checkpoint / ("adapter" if adapters else "model")).is_dir()
    saved = read_config(checkpoint)
    result = evaluate(replace(saved, checkpoint=str(checkpoint), output_dir=str(tmp_path / "evaluated")))
    assert result.episodes == 4
    policy = load_policy(checkpoint, saved)
    assert set(policy.config.norm_stats) == {"tabletop"} and policy.config.n_action_bins == 21
    config = build_config(compose_config([*SMALL, *source, *lora, "trainer.max_steps=2"]))
    config.output_dir, config.resume = str(tmp_path / "run"), str(tmp_path / "run")
    train(config)
    assert (tmp_path / "run" / "checkpoints" / "rl_000002").is_dir()
