"""Forty runs that nobody tuned `rlinf why` on: 20 with a fault, 20 healthy, on three tasks.

    python benchmarks/why_heldout.py <folder> [name ...]     # runs them, then writes tests/fixtures/why_heldout.jsonl
    python benchmarks/why_heldout.py <folder> --write-only   # writes it from the runs that are in the folder

The cases were chosen, run and labelled by one person who had read neither the rules of `rlinf why`, their page and their tests nor
the runs from which they were made, and who ran `rlinf why` on none of them. The faults were chosen before any of them ran, as an
RL engineer meets them; one that did no harm (a huge bonus for entropy, with which the tabletop still reached 100 %) was replaced
by a tiny learning rate. ``OUTCOMES`` were written down from the runs' own statistics alone, see ``judge``: of the tabletop,
successes of the 100 evaluation episodes before and after RL; of gymnasium, returns of the 50 evaluation episodes, which
are in no row of metrics.jsonl, and those of rollouts; of arithmetic, right answers to the 400 questions of the validation. Ends differ if
the 95 % interval of their difference leaves out 0. Several outcomes are acceptable where honest readers of the logged numbers may differ.

The fixture leaves out clocks and memory, and of long runs rows in the middle. A run takes 10 to 80 s of processor time on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests/fixtures/why_heldout.jsonl"
WORLDS = ROOT / "tests/fixtures/why_heldout_worlds.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
QUIET = "evaluation.num_videos_per_task=0 tracking.tensorboard=false tracking.progress=false cluster.num_threads=1"
TABLE = f"train model=mlp env=tabletop {QUIET} evaluation.num_episodes=100 trainer.eval_every=10"
GRPO = f"{TABLE} algorithm=grpo env.tasks=[reach] rollout.num_envs=128 trainer.minibatch_size=256 trainer.learning_rate=2e-3"
PPO = (
    f"train experiment=tabletop_ppo_mlp {QUIET} evaluation.num_episodes=100 trainer.eval_every=10 trainer.max_steps=30"
)
CLONE = f"{PPO} sft.max_steps=600"
HEAD = (
    f"{TABLE} algorithm=sac env.tasks=[reach] env.reward_mode=sparse rollout.num_envs=32 trainer.max_steps=24 sft.max_steps=600 "
    "sft.expert.aim_offset_m=[0.07,0.0]"
)
SWING = (
    f"train experiment=gymnasium_pendulum_ppo_mlp {QUIET} env.success_return=null env.num_processes=0 evaluation.num_episodes=50 "
    "trainer.eval_every=6 trainer.max_steps=12"
)
POLE = (
    f"train model=mlp env=gymnasium env.id=CartPole-v1 env.max_episode_steps=200 env.reward_scale=0.1 env.num_processes=0 {QUIET} "
    "model.action_token_len=1 model.init_config.state_dim=4 evaluation.num_episodes=50 trainer.eval_every=8 trainer.max_steps=16 "
    "trainer.learning_rate=1e-3"
)
POLE_PPO = f"{POLE} rollout.num_envs=16 rollout.num_chunks=200 trainer.minibatch_size=400 algorithm.update_epochs=4"
RECIPE = "cluster.num_threads=1 train.ckpt.enable_checkpoint=false validation.val_before_train=true"
SFT = f"launch --config {ROOT}/examples/reasoning/configs/arithmetic_sft.toml {RECIPE} train.epoch=5 validation.freq=60"
ANSWERS = (
    f"launch --config {ROOT}/examples/reasoning/configs/arithmetic_grpo.toml {RECIPE} train.max_num_steps=12 validation.freq=6 "
    "policy.model_name_or_path=../sft_half/run/safetensors/final"
)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: Of its folder.
        task: tabletop, gymnasium or arithmetic.
        command: Arguments of ``rlinf``; those of RL also get ``output_dir``, those of recipes ``train.output_dir``.
        wrong: What is wrong, or None.
        fault_key: Acceptable names of the cause.
    """

    name: str
    task: str
    command: str
    wrong: str | None = None
    fault_key: tuple[str, ...] = ()


CASES = [
    Case(
        "table_grpo_sparse", "tabletop",
        f"{TABLE} algorithm=grpo env.tasks=[push] env.reward_mode=sparse rollout.num_envs=64 trainer.max_steps=20 seed=3",
        wrong="A policy that never succeeds learns from successes alone: no group has two different returns",
        fault_key=("env.reward_mode", "env.tasks", "sft.max_steps", "reward"),
    ),
    Case(
        "table_clone_lr_huge", "tabletop", f"{CLONE} trainer.learning_rate=0.3 seed=4",
        wrong="The learning rate is 150 times too high for a policy that was cloned well", fault_key=("trainer.learning_rate",),
    ),
    Case(
        "table_lr_tiny", "tabletop", f"{PPO} trainer.learning_rate=2e-7 seed=5",
        wrong="The learning rate is 10,000 times too low", fault_key=("trainer.learning_rate",),
    ),
    Case(
        "table_clone_turned", "tabletop", f"{CLONE} env.name=table_a plugins=[{WORLDS}] seed=6",
        wrong="The sign of the reward is turned", fault_key=("reward",),
    ),
    Case(
        "table_state_noise", "tabletop", f"{PPO} env.name=table_b plugins=[{WORLDS}] seed=7",
        wrong="The state is noise", fault_key=("observation", "state"),
    ),
    Case(
        "table_actions_rolled", "tabletop", f"{PPO} env.name=table_c plugins=[{WORLDS}] seed=8",
        wrong="Each env executes the action of its neighbour", fault_key=("actions", "observation"),
    ),
    Case(
        "table_success_never", "tabletop", f"{PPO} env.name=table_d plugins=[{WORLDS}] seed=9",
        wrong="The env never reports a success; the dense reward is right", fault_key=("success", "reward"),
    ),
    Case(
        "table_head_tiny", "tabletop", f"{HEAD} algorithm.head.scale=0.005 seed=10",
        wrong="The head may correct 0.5 % of the range, the aim is off by more", fault_key=("algorithm.head.scale",),
    ),
    Case(
        "swing_gamma_zero", "gymnasium", f"{SWING} algorithm.gamma=0.0 algorithm.gae_lambda=0.0 seed=11",
        wrong="Only the next reward counts, and a swing-up costs reward first", fault_key=("algorithm.gamma", "algorithm.gae_lambda"),
    ),
    Case(
        "swing_reward_constant", "gymnasium", f"{SWING} env.id=Swing-v1 plugins=[{WORLDS}] seed=12",
        wrong="Every step pays -1", fault_key=("reward",),
    ),
    Case(
        "swing_reward_noise", "gymnasium", f"{SWING} env.id=Swing-v2 plugins=[{WORLDS}] seed=13",
        wrong="The reward is noise", fault_key=("reward",),
    ),
    Case(
        "swing_reward_huge", "gymnasium", f"{SWING} env.reward_scale=10000 seed=14",
        wrong="Rewards of some ten thousand: the critic's gradients leave the policy nothing", fault_key=("env.reward_scale", "reward"),
    ),
    Case(
        "pole_state_noise", "gymnasium", f"{POLE_PPO} env.id=Pole-v1 plugins=[{WORLDS}] seed=15",
        wrong="The state is noise", fault_key=("observation", "state"),
    ),
    Case(
        "pole_actions_late", "gymnasium", f"{POLE_PPO} env.id=Pole-v2 plugins=[{WORLDS}] seed=16",
        wrong="Actions are executed 15 steps late", fault_key=("actions", "observation"),
    ),
    Case(
        "sft_shuffled", "arithmetic", f"{SFT} train.epoch=3 train.train_policy.dataset.name=../data/shuffled/train.jsonl train.seed=17",
        wrong="The answers of the rows are shuffled", fault_key=("data", "train.train_policy.dataset.name"),
    ),
    Case(
        "sft_cut", "arithmetic", f"{SFT} policy.model_max_length=24 train.seed=18",
        wrong="Rows are cut before the answer", fault_key=("policy.model_max_length", "data"),
    ),
    Case(
        "answers_lr_huge", "arithmetic", f"{ANSWERS} train.max_num_steps=24 validation.freq=12 train.optm_lr=2e-2 train.seed=19",
        wrong="The learning rate is 200 times too high", fault_key=("train.optm_lr",),
    ),
    Case(
        "answers_cold", "arithmetic", f"{ANSWERS} train.train_policy.temperature=0.02 train.seed=20",
        wrong="The answers to a question are all alike", fault_key=("train.train_policy.temperature",),
    ),
    Case(
        "answers_no_template", "arithmetic", f"{ANSWERS} train.max_num_steps=24 validation.freq=12 "
        "train.train_policy.prompt_column_name=question train.seed=21",
        wrong="Prompts are plain text, without the chat template that the model knows",
        fault_key=("train.train_policy.prompt_column_name", "data", "reward"),
    ),
    Case(
        "answers_floats", "arithmetic",
        f"{ANSWERS} train.train_policy.dataset.name=../data/floats/train.jsonl "
        "validation.dataset.name=../data/floats/test.jsonl train.seed=22",
        wrong="The reference says 85.0 where the answer is 85, so no answer is right",
        fault_key=("data", "reward", "train.train_policy.reward_function", "train.train_policy.response_column_name"),
    ),
    Case("table_ppo", "tabletop", f"{PPO} seed=101"),
    Case("table_ppo_slow", "tabletop", f"{PPO} trainer.learning_rate=1e-4 trainer.max_steps=40 seed=102"),
    Case("table_ppo_two_tasks", "tabletop", f"{PPO} env.tasks=[reach,touch_two] rollout.num_chunks=28 seed=103"),
    Case("table_grpo", "tabletop", f"{GRPO} trainer.max_steps=40 seed=104"),
    Case("table_clone_mastered", "tabletop", f"{CLONE} trainer.learning_rate=3e-4 seed=105"),
    Case("table_clone_aside", "tabletop", f"{CLONE} sft.expert.aim_offset_m=[0.06,0.0] trainer.learning_rate=2e-4 seed=106"),
    Case("table_short", "tabletop", f"{PPO} trainer.max_steps=2 trainer.eval_every=1 seed=107"),
    Case("table_head", "tabletop", f"{HEAD} trainer.max_steps=12 trainer.eval_every=6 seed=108"),
    Case("swing_ppo", "gymnasium", f"{SWING} trainer.max_steps=18 seed=111"),
    Case("swing_ppo_slow", "gymnasium", f"{SWING} trainer.learning_rate=3e-4 model.init_config.hidden_sizes=[64,64] seed=112"),
    Case("swing_short", "gymnasium", f"{SWING} trainer.max_steps=5 trainer.eval_every=2 seed=113"),
    Case("pole_ppo", "gymnasium", f"{POLE_PPO} seed=114"),
    Case(
        "pole_rloo", "gymnasium",
        f"{POLE} algorithm=rloo rollout.num_envs=64 rollout.group_size=8 trainer.minibatch_size=1280 model.micro_batch_size=1280 "
        "trainer.max_steps=12 seed=115",
    ),
    Case("pole_mastered", "gymnasium", f"{POLE_PPO} init_from=../pole_ppo/run trainer.learning_rate=3e-4 trainer.max_steps=10 seed=116"),
    Case("sft_half", "arithmetic", f"{SFT} train.epoch=6 train.seed=0"),
    Case(
        "sft_clean", "arithmetic",
        f"{SFT} train.epoch=1 validation.freq=20 train.optm_lr=1e-3 policy.model_name_or_path=../sft_half/run/safetensors/final "
        "train.train_policy.dataset.name=../data/clean/train.jsonl train.seed=117",
    ),
    Case("answers_grpo", "arithmetic", f"{ANSWERS} train.max_num_steps=24 train.seed=118"),
    Case("answers_rloo", "arithmetic", f"{ANSWERS} train.train_policy.variant=rloo train.optm_lr=5e-5 train.seed=119"),
    Case("answers_short", "arithmetic", f"{ANSWERS} train.max_num_steps=4 validation.freq=2 train.seed=120"),
    Case(
        "answers_mastered", "arithmetic",
        f"{ANSWERS} policy.model_name_or_path=../sft_clean/run/safetensors/final train.optm_lr=3e-5 train.max_num_steps=8 train.seed=121",
    ),
]  # fmt: skip

OUTCOMES = {
    ("rose",): [
        "table_ppo", "table_ppo_slow", "table_ppo_two_tasks", "table_grpo", "table_clone_aside", "table_short", "table_head",
        "swing_ppo", "swing_ppo_slow", "pole_ppo", "pole_rloo",
        "sft_half", "sft_clean", "answers_grpo", "answers_rloo", "answers_short", "answers_cold",
    ],
    ("fell",): ["table_clone_lr_huge", "table_clone_turned", "answers_lr_huge"],
    ("did_not_rise",): [
        "table_grpo_sparse", "table_lr_tiny", "table_success_never", "swing_reward_constant", "sft_cut",
        "answers_floats",
    ],
    ("did_not_rise", "cannot_be_told"): [
        "table_state_noise", "table_actions_rolled", "table_head_tiny", "table_clone_mastered",
        "swing_gamma_zero", "swing_reward_noise", "pole_state_noise", "pole_mastered",
        "sft_shuffled", "answers_no_template", "answers_mastered",
    ],
    # The 50 paired evaluations differ a little, which no row of metrics.jsonl says; its rollouts do not.
    ("rose", "did_not_rise", "cannot_be_told"): ["swing_reward_huge", "swing_short"],
    ("fell", "did_not_rise", "cannot_be_told"): ["pole_actions_late"],
}  # fmt: skip
"""Acceptable answers to whether the runs rose, by what ``judge`` says of them."""


def outcome_of(name: str) -> tuple[str, ...]:
    """Return the acceptable outcomes of a case."""
    return next(outcome for outcome, names in OUTCOMES.items() if name in names)


def make_data(folder: Path) -> None:
    """Write the arithmetic tasks and a model of half a million parameters into ``folder``, and the two sets with faults."""
    script = [sys.executable, str(ROOT / "scripts/make_arithmetic_data.py")]
    size = ["--hidden-size", "96", "--num-layers", "3", "--test", "400"]
    subprocess.run([*script, "arithmetic", *size], check=True, cwd=folder)
    subprocess.run([*script, "clean", *size, "--wrong-share", "0"], check=True, cwd=folder)
    rows = {split: _rows(folder / f"arithmetic/{split}.jsonl") for split in ("train", "test")}
    for split, split_rows in rows.items():
        for row in split_rows:
            row["answer"] += ".0"
        _write(folder / f"floats/{split}.jsonl", split_rows)
    answers = [row["messages"][1] for row in rows["train"]]
    random.Random(0).shuffle(answers)
    for row, answer in zip(rows["train"], answers, strict=True):
        row["messages"][1] = answer
    _write(folder / "shuffled/train.jsonl", rows["train"])


def run(case: Case, folder: Path) -> None:
    """Run a case in ``folder/<name>`` and write its processor time next to what it says."""
    own = folder / case.name
    own.mkdir(parents=True, exist_ok=True)
    command, *arguments = case.command.split()
    arguments += ["train.output_dir=.", "train.timestamp=run"] if command == "launch" else ["output_dir=run"]
    if command == "launch" and not (own / "arithmetic").exists():
        (own / "arithmetic").symlink_to("../data/arithmetic")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (own / "log.txt").open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "rlinf", command, *arguments],
            env={**os.environ, **ONE_THREAD},
            cwd=own,
            stdout=log,
            stderr=log,
        ).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (own / "cpu_s.txt").write_text(f"{seconds:.1f}\n")
    print(
        f"{case.name}: exit status {code}, {seconds:.0f} s of processor time, {time.strftime('%H:%M:%S')}", flush=True
    )


def judge(case: Case, folder: Path) -> str:
    """Return what the two ends of a run say: means, and the 95 % interval of their difference (Newcombe 1998, or of a paired t)."""
    own = folder / case.name / "run"
    if case.task == "arithmetic":
        rewards = [row["eval/reward_mean"] for row in _rows(own / "metrics.jsonl") if "eval/reward_mean" in row]
        return _rates(rewards[0], rewards[-1], 400)
    before, after = (
        json.loads((own / f"eval/{when}_rl/result.json").read_text())["results"] for when in ("before", "after")
    )
    if case.task == "tabletop":
        return _rates(*(sum(row["success"] for row in rows) / len(rows) for rows in (before, after)), len(before))
    changes = [late["episode_return"] - early["episode_return"] for early, late in zip(before, after, strict=True)]
    mean, error = sum(changes) / len(changes), 2.01 * _deviation(changes) / math.sqrt(len(changes))
    first, last = (sum(row["episode_return"] for row in rows) / len(rows) for rows in (before, after))
    return f"return {first:.2f} -> {last:.2f}, change {mean:+.2f} ({mean - error:+.2f} to {mean + error:+.2f})"


def _rates(first: float, last: float, number: int) -> str:
    (low_1, high_1), (low_2, high_2) = (_wilson(rate, number) for rate in (first, last))
    low = last - first - math.hypot(last - low_2, high_1 - first)
    high = last - first + math.hypot(high_2 - last, first - low_1)
    return f"{first:.1%} -> {last:.1%} of {number}, change {low:+.1%} to {high:+.1%}"


def _wilson(rate: float, number: int) -> tuple[float, float]:
    z = 1.96
    middle, half = rate + z**2 / (2 * number), z * math.sqrt(rate * (1 - rate) / number + z**2 / (4 * number**2))
    return (middle - half) / (1 + z**2 / number), (middle + half) / (1 + z**2 / number)


def _deviation(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def compact(case: Case, folder: Path) -> dict:
    """Return a line of the fixture: what the run wrote, without clocks and memory, in numbers of 5 digits."""
    own = folder / case.name / "run"
    config = max(own.glob("checkpoints/rl_*/config.yaml"), default=own / "config.yaml")
    rows = [
        {key: value for key, value in row.items() if not key.startswith(("time", "memory/", "throughput/"))}
        for row in _rows(own / "metrics.jsonl")
    ]
    found = {
        "name": case.name,
        "task": case.task,
        "kind": "fault" if case.wrong else "healthy",
        "fault_key": case.fault_key,
        "outcome": outcome_of(case.name),
        "command": f"rlinf {case.command}",
        "config": yaml.safe_load(config.read_text()),
        "metrics": _thinned(rows),
        "summary": json.loads((own / "summary.json").read_text()),
    }
    return _relative(_rounded(found), {f"{ROOT}/": "", f"{folder}/": "runs/"})


def _thinned(rows: list[dict], most: int = 24) -> list[dict]:
    """Keep evaluations, the first 10 and last 10 of the other rows of a phase, and some between."""
    kept: set[int] = set()
    for phase in {row["phase"] for row in rows}:
        own = [number for number, row in enumerate(rows) if row["phase"] == phase and not _evaluates(row)]
        stride = max(1, (len(own) - 20) // (most - 20))
        kept |= {*own[:10], *own[10:-10:stride], *own[-10:]}
    return [row for number, row in enumerate(rows) if number in kept or _evaluates(row)]


def _evaluates(row: dict) -> bool:
    return any(key.startswith("eval/") for key in row)


def _rounded(value):
    """Round floats to 5 significant digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _relative(value, folders: dict[str, str]):
    """Leave the folders of a machine out of texts."""
    if isinstance(value, str):
        for folder, instead in folders.items():
            value = value.replace(folder, instead)
        return value
    if isinstance(value, dict):
        return {key: _relative(part, folders) for key, part in value.items()}
    return [_relative(part, folders) for part in value] if isinstance(value, list) else value


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="cases to run; all by default")
    parser.add_argument("--write-only", action="store_true", help="run nothing")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if not (folder / "data").exists():
        (folder / "data").mkdir(parents=True)
        make_data(folder / "data")
    for case in (
        [] if given.write_only else sorted(CASES, key=lambda case: case.wrong is not None)
    ):  # some start from healthy ones
        if not given.names or case.name in given.names:
            run(case, folder)
    for case in CASES:
        if (folder / case.name / "run/summary.json").exists():
            print(f"{case.name}: {judge(case, folder)}; labelled {' or '.join(outcome_of(case.name))}")
    finished = [case for case in CASES if (folder / case.name / "run/summary.json").exists()]
    _write(FIXTURE, [compact(case, folder) for case in finished])


if __name__ == "__main__":
    main()
