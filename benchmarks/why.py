"""Measures how often `rlinf why` reports a run's outcome and its cause, an incorrect key, or a fault in a healthy run.

Two sets are evaluated separately. For the first, this script injects each fault into a short CPU run, and adds healthy runs of several
algorithms and seeds. Thresholds were initially chosen on the runs marked with *, and later on all runs. The second is a held-out set of
runs of three tasks, recorded in `tests/fixtures/why_heldout.jsonl` by an author who had not read the rules.

A cause is correct if a reported rule or key belongs to the fault; a key is incorrect if it does not. The peer is a reader who
compares success rates, and reports a fault in every run whose last success rate is not significantly above its first.

    python benchmarks/why.py [--only NAME ...] [--folder outputs/why] [--read] [--held-out]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import rlinf.cli
from rlinf.errors import RLinfError
from rlinf.evaluation.intervals import difference_interval
from rlinf.recipes.why import RecipeRecord
from rlinf.report.why.findings import Diagnosis, Record, read_record
from rlinf.report.why.rules import diagnose

HELD_OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "why_heldout.jsonl"

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
    *MLP, "algorithm=sac", "env.reward_mode=sparse", "rollout.num_envs=16", "rollout.num_chunks=16", "algorithm.learning_starts=256", *CLONE,
    "sft.expert.aim_offset_m=[0.07,0.0]", "trainer.max_steps=9", "trainer.eval_every=4",
)  # fmt: skip


WORDS = {
    "return_without_success": ("reward", "success"), "constant_return": ("reward", "actions"),
}  # fmt: skip
"""Causes that the sentence of a rule names without a key."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: Of the run.
        words: Its overrides.
        causes: Rules and keys of which one must be said; None: the run is healthy.
        chose: Thresholds were chosen on it.
    """

    name: str
    words: Sequence[str]
    causes: tuple[str, ...] | None = None
    chose: bool = False


def fault(name: str, causes: tuple[str, ...], words: Sequence[str], *more: str) -> tuple[Case, Case]:
    """Return a run with a fault twice: with the seed on which thresholds were chosen, and with another one."""
    return Case(name, (*words, *more), causes, chose=True), Case(f"{name} seed 7", (*words, *more, "seed=7"), causes)


RATE, CRITIC = ("trainer.learning_rate",), ("trainer.value_learning_rate",)
CLIP = ("algorithm.clip_range_low", "algorithm.clip_range_high")
FAULTS = (
    *fault("critic learns nothing", CRITIC, PPO, "trainer.value_learning_rate=1e-7", "env.tolerance_m=0.01"),
    *fault("critic diverges", CRITIC, PPO, "trainer.value_learning_rate=1.0"),
    *fault("rate too large", RATE, PPO, "trainer.learning_rate=0.05"),
    *fault("rate too small", RATE, PPO, "trainer.learning_rate=1e-7"),
    *fault("rate rounds away", RATE, PPO, "trainer.learning_rate=1e-10"),
    *fault("narrow actions", ("steps_too_large", "model.init_config.initial_log_std"), PPO, "model.init_config.initial_log_std=-5"),
    *fault("KL penalty", ("algorithm.kl_coef",), PPO, "algorithm.kl_coef=1000"),
    *fault("clip range of 0", CLIP, PPO, "algorithm.clip_range_low=0", "algorithm.clip_range_high=0"),
    *fault("weight decay", ("trainer.weight_decay",), PPO, "trainer.weight_decay=1000"),
    *fault("AdamW's epsilon", ("trainer.adam_eps",), PPO, "trainer.adam_eps=10"),
    *fault("critic's warm-up", ("algorithm.critic_warmup_steps",), PPO, "algorithm.critic_warmup_steps=100"),
    *fault("sparse and strict", ("constant_return", "env.tolerance_m", "env.reward_mode"), GROUPS, "env.reward_mode=sparse", "env.tolerance_m=0.002"),
    *fault("strict", ("return_without_success", "env.tolerance_m"), PPO, "env.tolerance_m=0.001"),
    *fault("success is fined", ("env.success_bonus",), CLONED_PPO, "env.success_bonus=-5"),
    *fault("collapse", RATE, CLONED_PPO, "trainer.learning_rate=0.05", "trainer.eval_every=4"),
    *fault("cloning diverges", ("sft.learning_rate",), SFT, "sft.learning_rate=1.0"),
    *fault("cloning stands still", ("sft.learning_rate",), SFT, "sft.learning_rate=1e-8"),
    *fault("wrong aim", ("imitation_ceiling", "trainer.max_steps"), SFT, "sft.expert.aim_offset_m=[0.07,0.0]"),
    *fault("actor", ("algorithm.learning_rate",), HEAD, "algorithm=td3", "algorithm.learning_rate=0.3", "algorithm.gamma=1.0",
          "algorithm.num_critics=1", "algorithm.num_target_critics=1", "algorithm.tau=1.0"),
    *fault("small actor", ("algorithm.actor.scale",), HEAD, "algorithm=td3", "algorithm.actor.scale=0.05"),
)  # fmt: skip

HEALTHY = (
    *(Case(f"ppo seed {seed}", (*PPO, f"seed={seed}"), chose=seed == 0) for seed in range(5)),
    *(Case(f"grpo seed {seed}", (*GROUPS, f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"clone seed {seed}", (*SFT, f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"clone, ppo seed {seed}", (*CLONED_PPO, "sft.max_steps=50", f"seed={seed}"), chose=seed == 0) for seed in range(4)),
    *(Case(f"actor seed {seed}", (*HEAD, f"seed={seed}"), chose=seed == 0) for seed in range(3)),
)  # fmt: skip


def run(case: Case, folder: Path) -> float:
    """Run a case into ``folder``; returns its seconds. A run that the framework rejects is left as it is: what it wrote is read."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    status = rlinf.cli.main(["train", *case.words, *SMALL, f"output_dir={folder}"])
    if status:
        print(f"{case.name}: the run ended with status {status}")
    return time.monotonic() - start


def reader_sees_a_fault(record: Record) -> bool:
    """Return whether success did not rise significantly from the first evaluation (or 0) to the last."""
    lines = [line for line in record.lines if "eval/successes" in line]
    counts = [(int(line["eval/successes"]), int(line["eval/episodes"])) for line in lines]
    if len(counts) < 2:
        counts = [(0, 50), *counts]
    (first, last) = counts[0], counts[-1]
    low, _ = difference_interval((last[0], first[0]), (last[1], first[1]))
    return low <= 0


@dataclass
class Tally:
    """Counts of outcomes over a set of runs."""

    faults: int = 0
    healthy: int = 0
    named: int = 0
    wrong_keys: int = 0
    silent: int = 0
    accused: int = 0
    outcomes: int = 0
    right_outcomes: int = 0
    peer_named: int = 0
    peer_accused: int = 0

    def add(
        self, record: Record, found: Diagnosis, causes: Sequence[str] | None, outcomes: Sequence[str] | None
    ) -> str:
        """Count a run; returns its verdict in words. ``outcomes``: the right ones, of a loss those of the loss or of the run; None: not known."""
        said = {finding.rule for finding in found.findings}
        words = {word for rule in said for word in WORDS.get(rule, ())}
        keys = {word.partition("=")[0] for finding in found.findings for word in finding.set.split() if "=" in word}
        if outcomes is not None:
            better = "rose" if found.outcome.is_good and found.outcome.measure == "loss" else found.outcome.verdict
            self.outcomes += 1
            self.right_outcomes += not {found.outcome.verdict, better}.isdisjoint(outcomes)
        sees = reader_sees_a_fault(record)
        if causes is None:
            self.healthy += 1
            self.accused += bool(said)
            self.peer_accused += sees
            return "accused" if said else "quiet"
        self.faults += 1
        self.peer_named += sees
        is_wrong = not keys <= set(causes)
        self.wrong_keys += is_wrong
        self.silent += not said
        is_named = bool((said | keys | words) & set(causes)) and not is_wrong
        self.named += is_named
        return "named" if is_named else "wrong key" if is_wrong else "other cause" if said else "silent"


def held_out() -> Tally:
    """Print a line for each recorded run, and return the counts."""
    tally = Tally()
    for row in map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines()):
        record = (RecipeRecord if "train" in row["config"] else Record)(row["metrics"], row["config"])
        found = diagnose(record)
        verdict = tally.add(record, found, row["fault_key"] if row["kind"] == "fault" else None, row["outcome"])
        said = ", ".join(f"{finding.rule} {finding.set}".strip() for finding in found.findings)
        print(
            f"held out: {row['name']:40} {verdict:11} {found.outcome.verdict} (made: {row['outcome']}); {said or '-'}"
        )
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="run only these cases")
    parser.add_argument("--folder", type=Path, default=Path("outputs/why"))
    parser.add_argument("--read", action="store_true", help="evaluate the runs of an earlier call")
    parser.add_argument("--held-out", action="store_true", help="evaluate only the recorded runs")
    args = parser.parse_args()
    chosen, all_s = Tally(), 0.0
    cases = [
        case for case in (*FAULTS, *HEALTHY) if not args.held_out and (args.only is None or case.name in args.only)
    ]
    for case in cases:
        folder = args.folder / re.sub(r"\W+", "_", case.name)
        seconds = 0.0 if args.read else run(case, folder)
        try:
            record = read_record(folder)
        except RLinfError as error:
            print(f"{case.name}: {error}")
            continue
        found = diagnose(record)
        verdict = chosen.add(record, found, case.causes, None)
        said = ", ".join(f"{finding.rule} {finding.set}".strip() for finding in found.findings)
        all_s += seconds
        print(
            f"{case.name + '*' * case.chose:30} {verdict:11} {found.outcome.verdict}; {said or '-'}  ({seconds:.0f} s)",
            flush=True,
        )
    unseen = held_out() if HELD_OUT.exists() else Tally()
    counted = chosen if not args.held_out else unseen
    print(json.dumps({
        "name": "why", "ours": counted.named, "peer": counted.peer_named, "ratio": counted.named / max(1, counted.peer_named),
        "sizes": {"chosen": asdict(chosen), "held_out": asdict(unseen)}, "seconds": round(all_s),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
