"""Small policies trained in several ways that must agree: number formats, shards, checkpoints, and the same run again."""

from __future__ import annotations

import json
import shutil
from typing import Any

from gpu_check.rows import Rows, Setting
from gpu_check.runs import SMALL, first_difference, largest_gap, rl_metrics, train

TWO_STEPS = ["experiment=quickstart", *SMALL, "algorithm.critic_warmup_steps=0", "trainer.max_steps=2"]
FOUR_STEPS = [*TWO_STEPS, "trainer.max_steps=4", "trainer.save_every=2", "trainer.max_keep=-1"]
FOUR_STEPS += ["trainer.save_mode=async", "trainer.deterministic=true"]
CPU_SUCCESS = 0.915
"""Of the quickstart after PPO (docs/results.md)."""
LARGER = ["model.init_config.text_config.hidden_size=768", "model.init_config.text_config.intermediate_size=2048"]
LARGER += ["model.init_config.text_config.num_hidden_layers=14", "model.init_config.text_config.num_attention_heads=12"]
LARGER += ["model.init_config.text_config.num_key_value_heads=12", "model.hidden_size=768", "sft.learning_rate=3.0e-4"]
LARGER += ["trainer.learning_rate=1.0e-4"]
LOWER_END = "lower end of the interval in fp32"
ADAPTERS = [*TWO_STEPS, "model.precision=bf16", "model.is_lora=true", "model.lora.rank=4"]


def learning_words(setting: Setting, precision: str) -> list[str]:
    """Return the overrides of a run that learns in a number format."""
    size = ["model.init_config.text_config.hidden_size=512", "model.init_config.text_config.intermediate_size=1408"]
    size += ["model.init_config.text_config.num_hidden_layers=16", "model.hidden_size=512"]
    steps = ["sft.max_steps=1000", "trainer.max_steps=30", "evaluation.num_episodes=200"]
    if setting.tiny:
        size, steps = [], [*SMALL, "trainer.max_steps=1"]
    return ["experiment=quickstart", f"model.precision={precision}", *size, *steps]


def g6_float32_learns(rows: Rows, setting: Setting) -> None:
    """Cloning and PPO in float32."""
    success = success_of(rows, setting, "fp32")
    rows.state(LOWER_END, success["interval"][0])


def g6_bf16_learns(rows: Rows, setting: Setting) -> None:
    """PPO in bf16 reaches the success of float32."""
    success, lower = success_of(rows, setting, "bf16"), setting.measured.get(LOWER_END)
    what = "upper end of bf16's interval, against the lower end of float32's"
    if setting.tiny or lower is None:
        rows.not_measured(what, "needs the whole training" if setting.tiny else "float32 has no result")
    else:
        rows.at_least(what, success["interval"][1], float(lower))


def success_of(rows: Rows, setting: Setting, precision: str) -> dict[str, Any]:
    """Train in a number format; return the success with its interval."""
    folder = train(setting, precision, learning_words(setting, precision))
    success = json.loads((folder / "summary.json").read_text())["success_after_rl"]
    rows.state(f"success in {precision}", f"{success['success_rate']:.1%}")
    return success


def g8_quickstart(rows: Rows, setting: Setting) -> None:
    """The quickstart reaches the success that it has on CPUs; a call that was cut is continued."""
    learn(rows, setting, "quickstart", [])


def g8_larger(rows: Rows, setting: Setting) -> None:
    """A policy with 103 million weights reaches it, too."""
    learn(rows, setting, "103 M weights", LARGER)


def learn(rows: Rows, setting: Setting, name: str, words: list[str]) -> None:
    """Train to the end, from the last checkpoint of a cut call at this commit; measure seconds and success."""
    folder = setting.cache / "learning" / f"{rows.check.split()[1]}_{rows.commit}{'_tiny' * setting.tiny}"
    if not any(folder.glob("checkpoints/[!.]*/state.json")):  # a folder without a checkpoint is rejected
        shutil.rmtree(folder, ignore_errors=True)
    words = [*SMALL, "trainer.max_steps=1"] if setting.tiny else [*words, "evaluation.num_episodes=200"]
    words = ["experiment=quickstart", *words, "evaluation.num_fresh_episodes=0", "evaluation.baselines=false"]
    resume = ["resume=auto", "trainer.save_every_minutes=0.5", "trainer.max_keep=1"]
    summary = json.loads((train(setting, folder, [*words, *resume]) / "summary.json").read_text())
    success = summary["success_after_rl"]
    rows.at_most(f"{name}, seconds of training", summary["train_wall_s"], 240)
    rows.state(f"{name}, success after {summary['env_steps']} env steps", f"{success['success_rate']:.1%}")
    what = f"{name}, upper end of its interval against the lowest of six seeds on CPUs"
    if setting.tiny:
        rows.not_measured(what, "needs the whole training")
    else:
        rows.at_least(what, success["interval"][1], CPU_SUCCESS)
    shutil.rmtree(folder)  # so that --only measures again


def g7_same_numbers(rows: Rows, setting: Setting) -> None:
    """A resumed run and a repeated one equal the first."""
    whole = rl_metrics(train(setting, "first", FOUR_STEPS))
    resumed = rl_metrics(
        train(setting, "resumed", [f"resume={setting.folder / 'first' / 'checkpoints' / 'rl_000002'}"])
    )
    again = rl_metrics(train(setting, "again", FOUR_STEPS))
    what = "first metric in which {} differs, with trainer.deterministic"
    rows.holds(what.format("a run resumed from a checkpoint of a thread"), first_difference(whole[2:], resumed), "none")
    rows.holds(what.format("the same run again"), first_difference(whole, again), "none")


def g7_shards(rows: Rows, setting: Setting) -> None:
    """FSDP2 on one rank equals replication in float32."""
    plain = rl_metrics(train(setting, "plain", TWO_STEPS))
    repeated = rl_metrics(train(setting, "repeated", TWO_STEPS))
    rows.state("first metric in which the same run again differs, without it", first_difference(plain, repeated))
    sharded = train(setting, "fsdp2", [*TWO_STEPS, "trainer.sharding=fsdp2"])
    gap = largest_gap(plain, rl_metrics(sharded))
    rows.at_most("difference of the losses of FSDP2 and of replication, float32", gap, 1e-3)
    on = train(setting, "fsdp2_on", [f"resume={sharded}", "trainer.max_steps=3"])
    rows.holds("iterations after a resume of the FSDP2 checkpoint", len(rl_metrics(on)), 1)


def g7_adapters(rows: Rows, setting: Setting) -> None:
    """FSDP2 on one rank equals replication with adapters in bf16."""
    both = [
        rl_metrics(train(setting, f"adapters_{sharding}", [*ADAPTERS, f"trainer.sharding={sharding}"]))
        for sharding in ("replicate", "fsdp2")
    ]
    rows.at_most("difference of the losses of FSDP2 and of replication, adapters in bf16", largest_gap(*both), 0.05)
