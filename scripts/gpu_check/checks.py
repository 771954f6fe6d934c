"""All checks: what each does, how long it takes on an H200, and when it is ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_check import training
from gpu_check.engines import g3_rollouts, g3_tokens, vllm_words
from gpu_check.isolation import RUN, g2_isolation
from gpu_check.openvla import folder_words, g0_draw, random_words
from gpu_check.policies import g1_openvla_lora, g5_policy_call, lora_words
from gpu_check.rows import Rows, Setting
from gpu_check.several import hybrid_words, m1_recipe, m2_hybrid_shards, m3_bandwidth, m4_own_gpus, m5_lost_ranks
from gpu_check.tokens import g4_adapters, g4_in_full


def words_of_runs(setting: Setting) -> dict[str, list[str]]:
    """Return the overrides of the configurations that the checks use, by check."""
    return {
        "G0": random_words(setting),
        "G1": lora_words(setting),
        "G2": RUN,
        "G3": vllm_words(setting),
        "G5": folder_words(setting, 1),
        "G6": training.learning_words(setting, "bf16"),
        "G8": ["experiment=quickstart", *training.LARGER],
        "G7": training.FOUR_STEPS,
        "G7, adapters": training.ADAPTERS,
        "M2": hybrid_words(setting, 1),
    }


@dataclass(frozen=True)
class Check:
    """One check, which runs in a process of its own.

    Attributes:
        run: Measures its rows.
        expected_s: Seconds that it should take on one H200, by estimate.
        limit_s: Seconds after which it is ended.
        needs_model: It reads the model that G0 draws.
        package: An optional package that it needs.
        continues: After it was cut, only the rest remains.
    """

    run: Callable[[Rows, Setting], None]
    expected_s: int
    limit_s: int
    needs_model: bool = False
    package: str | None = None
    continues: bool = False


ONE_GPU = {
    "G4 7B": Check(g4_adapters, 60, 100),
    "G4 3B": Check(g4_in_full, 45, 100),
    "G0": Check(g0_draw, 40, 100),
    "G5": Check(g5_policy_call, 70, 130, needs_model=True),
    "G1": Check(g1_openvla_lora, 240, 390, needs_model=True),
    "G6 float32": Check(training.g6_float32_learns, 110, 130),
    "G6 bf16": Check(training.g6_bf16_learns, 110, 130),
    "G8 quickstart": Check(training.g8_quickstart, 150, 300, continues=True),
    "G8 larger": Check(training.g8_larger, 300, 480, continues=True),
    "G7 resume": Check(training.g7_same_numbers, 50, 90),
    "G7 shards": Check(training.g7_shards, 65, 110),
    "G7 adapters": Check(training.g7_adapters, 35, 60),
    "G2": Check(g2_isolation, 80, 150),
    "G3 tokens": Check(g3_tokens, 110, 130, package="vllm"),
    "G3 rollouts": Check(g3_rollouts, 130, 180, needs_model=True, package="vllm"),
}
"""The most valuable ones first, which is the order in which they run; the limits together are 43 minutes."""

SEVERAL_GPUS = {
    "M1": Check(m1_recipe, 90, 240),
    "M2": Check(m2_hybrid_shards, 50, 120),
    "M3": Check(m3_bandwidth, 25, 90),
    "M4": Check(m4_own_gpus, 50, 150),
    "M5": Check(m5_lost_ranks, 90, 240),
}
"""For 2 to 8 GPUs of one machine; the limits together are 14 minutes."""
