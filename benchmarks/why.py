"""How often `rlinf why` names a fault, and how often it accuses a healthy run.

Each fault is injected into a short run on a CPU; the rule of that fault must be among what is said of the run. Healthy runs are those of
several algorithms and seeds: whatever is said of them is a wrong accusation. Thresholds were chosen on the runs marked with *; the
seeds of the others were not looked at before. What else is said of a run with a fault is counted too (besides). The peer is a reader who compares success before and after, and finds a fault in every run
whose last success rate is not certainly above its first.

    python benchmarks/why.py [--only NAME ...] [--folder outputs/why] [--read]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rlinf.cli
from rlinf.errors import RLinfError
from rlinf.evaluation.finding_rules import explain
from rlinf.evaluation.findings import Record, read_record
from rlinf.evaluation.intervals import difference_interval

SMALL = (
    "evaluation.num_episodes=50", "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false",
    "tracking.progress=false", "cluster.num_threads=1", "cluster.device=cpu", "trainer.save_every_minutes=0",
)  # fmt: skip
PPO = ("experiment=tabletop_ppo_mlp", "trainer.max_steps=16")
MLP = (
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "trainer.learning_rate=2e-3", "trainer.minibatch_size=256",
)  # fmt: skip
GROUPS = (
    *MLP, "algorithm=grpo", "rollout.group_size=8", "rollout.num_envs=64", "rollout.num_chunks=16",
    "trainer.max_steps=16", "algorithm.update_epochs=2",
)  # fmt: skip
CLONE = ("sft.max_steps=200", "sft.num_demonstrations=150", "sft.learning_rate=1e-3", "sft.expert.jitter=0.3")
SFT = ("experiment=tabletop_ppo_mlp", "trainer.max_steps=0", *CLONE)
CLONED_PPO = (*PPO, *CLONE, "trainer.learning_rate=5e-4")
HEAD = (
    *MLP, "algorithm=sac", "env.reward_mode=sparse", "rollout.num_envs=16", "rollout.num_chunks=16", "algorithm.warmup_env_steps=256", *CLONE,
    "sft.expert.aim_offset_m=[0.07,0.0]", "trainer.max_steps=9", "trainer.eval_every=4",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: Of the run.
        words: Its overrides.
        rule: That must be named; None: the run is healthy.
        chose: Thresholds were chosen on it.
    """

    name: str
    words: Sequence[str]
    rule: str | None = None
    chose: bool = False


def fault(rule: str, words: Sequence[str], *more: str) -> tuple[Case, Case]:
    """Return a run with a fault twice: with the seed on which thresholds were chosen, and with another one."""
    return Case(rule, (*words, *more), rule, chose=True), Case(f"{rule} seed 7", (*words, *more, "seed=7"), rule)


FAULTS = (
    *fault("critic_blind", PPO, "trainer.value_learning_rate=1e-7", "env.tolerance_m=0.01"),
    *fault("critic_diverges", PPO, "trainer.value_learning_rate=1.0"),
    *fault("ratios_clipped", PPO, "trainer.learning_rate=0.05"),
    *fault("policy_stands_still", PPO, "trainer.learning_rate=1e-7"),
    *fault("rate_rounds_away", PPO, "trainer.learning_rate=1e-10"),
    *fault("entropy_explodes", PPO, "algorithm.entropy_coef=30", "trainer.learning_rate=0.01"),
    *fault("entropy_gone", PPO, "model.init_config.initial_log_std=-5"),
    *fault("gradient_clipped", PPO, "trainer.max_grad_norm=1e-4"),
    *fault("equal_groups", GROUPS, "env.reward_mode=sparse", "env.tolerance_m=0.002"),
    *fault("never_a_success", PPO, "env.max_episode_steps=1", "env.tolerance_m=0.02"),
    *fault("reward_misses_success", CLONED_PPO, "env.success_bonus=-5"),
    *fault("collapsed", CLONED_PPO, "trainer.learning_rate=0.05", "trainer.eval_every=4"),
    *fault("cloning_diverges", SFT, "sft.learning_rate=1.0"),
    *fault("cloning_stands_still", SFT, "sft.learning_rate=1e-8"),
    *fault("clone_is_bound", SFT, "sft.expert.aim_offset_m=[0.07,0.0]"),
    *fault("critic_dreams", HEAD, "algorithm=td3", "algorithm.learning_rate=0.3", "algorithm.gamma=1.0",
          "algorithm.num_critics=1", "algorithm.num_target_critics=1", "algorithm.tau=1.0"),
    *fault("head_saturated", HEAD, "algorithm=td3", "algorithm.head.scale=0.05"),
    *fault("stale_rollouts", PPO, "cluster.max_staleness=4", "rollout.worker_processes=1", "algorithm.tis_cap=1.0",
          "trainer.learning_rate=5e-3"),
)  # fmt: skip

HEALTHY = (
    *(Case(f"ppo seed {seed}", (*PPO, f"seed={seed}"), chose=seed == 0) for seed in range(5)),
    *(Case(f"grpo seed {seed}", (*GROUPS, f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"clone seed {seed}", (*SFT, f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"clone, ppo seed {seed}", (*CLONED_PPO, "sft.max_steps=50", f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"head seed {seed}", (*HEAD, f"seed={seed}"), chose=seed == 0) for seed in range(3)),
)  # fmt: skip


def run(case: Case, folder: Path) -> float:
    """Run a case into ``folder``; returns its seconds. A run that the framework refuses is left as it is: what it wrote is read."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    status = rlinf.cli.main(["train", *case.words, *SMALL, f"output_dir={folder}"])
    if status:
        print(f"{case.name}: the run ended with status {status}")
    return time.monotonic() - start


def reader_sees_a_fault(record: Record) -> bool:
    """Return whether success did not certainly rise: from the first evaluation to the last, or from 0."""
    lines = [line for line in record.lines if "eval/successes" in line]
    counts = [(int(line["eval/successes"]), int(line["eval/episodes"])) for line in lines]
    if len(counts) < 2:
        counts = [(0, 50), *counts]
    (first, last) = counts[0], counts[-1]
    low, _ = difference_interval((last[0], first[0]), (last[1], first[1]))
    return low <= 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="names of cases")
    parser.add_argument("--folder", type=Path, default=Path("outputs/why"))
    parser.add_argument("--read", action="store_true", help="read the runs of an earlier call again")
    args = parser.parse_args()
    rows, named, besides, accused, seen, misled, all_s = [], 0, 0, 0, 0, 0, 0.0
    cases = [case for case in (*FAULTS, *HEALTHY) if args.only is None or case.name in args.only]
    for case in cases:
        folder = args.folder / case.name.replace(" ", "_").replace(",", "")
        seconds = 0.0 if args.read else run(case, folder)
        try:
            diagnosis = explain(folder)
        except RLinfError as error:
            print(f"{case.name}: {error}")
            continue
        said = [finding.rule for finding in diagnosis.findings]
        named += case.rule in said
        besides += case.rule is not None and bool(set(said) - {case.rule})
        accused += case.rule is None and bool(said)
        sees = reader_sees_a_fault(read_record(folder))
        seen += case.rule is not None and sees
        misled += case.rule is None and sees
        all_s += seconds
        mark = "*" if case.chose else " "
        verdict = (
            "accused"
            if case.rule is None and said
            else "quiet"
            if case.rule is None
            else "named"
            if case.rule in said
            else "missed"
        )
        rows.append(f"{case.name + mark:30} {verdict:8} {', '.join(said) or '-'}  ({seconds:.0f} s)")
        print(rows[-1], flush=True)
    faults = [case for case in cases if case.rule]
    print("\n".join(["", *rows]))
    print(json.dumps({
        "name": "why", "ours": named, "peer": seen, "ratio": named / max(1, seen), "faults": len(faults),
        "healthy": len(cases) - len(faults), "accused": accused, "besides": besides, "peer_accused": misled, "seconds": round(all_s),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
