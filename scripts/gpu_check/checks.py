"""All checks: what each does, how long it takes on an H200, and when it is ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_check.engines import g3_vllm, vllm_words
from gpu_check.isolation import RUN, g2_isolation
from gpu_check.openvla import folder_words, g0_draw, random_words
from gpu_check.policies import g1_openvla_lora, g5_policy_call, lora_words
from gpu_check.rows import Row, Setting
from gpu_check.several import hybrid_words, m1_recipe, m2_hybrid_shards, m3_bandwidth, m4_own_gpus, m5_lost_ranks
from gpu_check.tokens import g4_token_policy
from gpu_check.training import ADAPTERS, FOUR_STEPS, g6_bf16_learns, g7_same_numbers, learning_words


def words_of_runs(setting: Setting) -> dict[str, list[str]]:
    """Return the overrides of the configurations that the checks use, by check."""
    return {
        "G0": random_words(setting),
        "G1": lora_words(setting),
        "G2": RUN,
        "G3": vllm_words(setting),
        "G5": folder_words(setting, 1),
        "G6": learning_words(setting, "bf16"),
        "G7": FOUR_STEPS,
        "G7, adapters": ADAPTERS,
        "M2": hybrid_words(setting, 1),
    }


@dataclass(frozen=True)
class Check:
    """One check, which runs in a process of its own.

    Attributes:
        run: Returns its rows.
        expected_s: Seconds that it should take on one H200, by estimate.
        limit_s: Seconds after which it is ended.
        needs_model: It reads the model that G0 draws.
    """

    run: Callable[[Setting], list[Row]]
    expected_s: int
    limit_s: int
    needs_model: bool = False


ONE_GPU = {
    "G0": Check(g0_draw, 40, 100),
    "G1": Check(g1_openvla_lora, 240, 400, needs_model=True),
    "G2": Check(g2_isolation, 80, 150),
    "G3": Check(g3_vllm, 240, 330, needs_model=True),
    "G4": Check(g4_token_policy, 80, 130),
    "G5": Check(g5_policy_call, 70, 130, needs_model=True),
    "G6": Check(g6_bf16_learns, 220, 260),
    "G7": Check(g7_same_numbers, 150, 260),
}
"""The limits together are 30 minutes."""

SEVERAL_GPUS = {
    "M1": Check(m1_recipe, 90, 240),
    "M2": Check(m2_hybrid_shards, 50, 120),
    "M3": Check(m3_bandwidth, 25, 90),
    "M4": Check(m4_own_gpus, 50, 150),
    "M5": Check(m5_lost_ranks, 90, 240),
}
"""For 2 to 8 GPUs of one machine; the limits together are 14 minutes."""
