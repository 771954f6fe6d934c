"""A run with rollout workers loses a rank, or the Ray cluster: it ends with the cause, and continues bit for bit."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import nothing_is_left, processes_of
from run_results import QUIET, run_config, untimed_metrics, weights_of

from rlinf.commands.train import train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
STATE = [
    *QUIET, "model=mlp", "env.tasks=[reach]", "env.cameras=[]", "rollout.num_envs=8", "rollout.num_chunks=16",
    "env.max_episode_steps=16", "trainer.minibatch_size=64", "model.micro_batch_size=32", "trainer.save_every=1", "sft.max_steps=0",
    "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.probe=false",
]  # fmt: skip
SPLIT = ["cluster.start=ray", "cluster.placement=disaggregated", "cluster.num_rollout_workers=2"]
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a machine that is short of memory for other reasons is not this test's matter
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
MARK = "RUN_OF_THIS_TEST"
HEAD = r"RankError: The head of the Ray cluster at \S+ has not replied for 5 s. .*RAY_gcs_rpc_server_reconnect_timeout_s=20"


def saved_steps(run: Path) -> list[int]:
    """Return the iterations after which a run has saved."""
    return [int(folder.name.removeprefix("rl_")) for folder in (run / "checkpoints").glob("rl_*")]


@pytest.mark.parametrize(
    ("victim", "number", "ranks", "message"),
    [
        ("import run_rank", signal.SIGSTOP, 2, r"DeadlineError: Rank [01] .* was in '(\w+)' for more than [12]0 s; no reply from rank [01]\. "
                                          r".*set cluster.deadlines.\1=[24]0"),
        ("gcs_server", signal.SIGKILL, 1, HEAD),
        # Ray may end the process before it can say anything.
        ("raylet/raylet", signal.SIGKILL, 1, ""),
    ],
    ids=["rank stopped", "head killed", "daemon killed"],
)  # fmt: skip
def test_a_loss_ends_the_run_with_its_cause_and_it_goes_on_bit_for_bit(tmp_path, victim, number, ranks, message):
    """A checkpoint does not know how its run ended: only the first run continues."""
    run, mark = tmp_path / "run", f"{MARK}={tmp_path}"
    short = [f"cluster.deadlines.{name}=10" for name in ("update", "save", "push")] if number == signal.SIGSTOP else []
    words = [*STATE, f"cluster.num_processes={ranks}", "trainer.max_steps=2000", "cluster.deadlines.rollout=20"]
    words += ["cluster.max_restarts=0"] if ranks > 1 else []  # else lost ranks start again
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept |= RAY | {MARK: str(tmp_path)}
    command = [sys.executable, "-m", "rlinf", "train", *words, *short, *SPLIT, f"output_dir={run}"]
    with (
        open(tmp_path / "log", "w+", encoding="utf-8") as log,
        subprocess.Popen(command, env=kept, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            while process.poll() is None and not any(step > 1 for step in saved_steps(run)):
                time.sleep(0.05)
            found = [pid for pid, command in processes_of(mark).items() if victim in command]
            assert len(found) == ranks, (tmp_path / "log").read_text()
            start = time.monotonic()
            os.kill(found[-1], number)
            status = process.wait(timeout=200)
        finally:
            process.kill()
        print(f"{victim} {number!r}: ended after {time.monotonic() - start:.1f} s")
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert status == 1 and re.search(message, text), text
    if number == signal.SIGSTOP and ranks == 2:
        (stopped,) = re.findall(r"--- rank (\d) on [^:]*: no reply: it is stopped or lost", text)
        other = 1 - int(stopped)
        assert (
            f"--- rank {other} on" in text
            and f"rollout worker {other}: all responsive processes have written their stacks" in text
        ), text
    assert nothing_is_left(mark), processes_of(mark)
    if number == signal.SIGKILL:
        return
    steps = max(saved_steps(run))
    # As many worker threads as there were rollout workers: calls of the policy with other rows round otherwise.
    more = [
        *STATE,
        f"cluster.num_processes={ranks}",
        f"rollout.pipeline_stages={2 // ranks}",
        f"trainer.max_steps={steps + 1}",
    ]
    train(run_config(tmp_path / "whole", *more))
    train(run_config(run, *more, f"resume={run}"))
    for name, tensor in weights_of(tmp_path / "whole", f"rl_{steps + 1:06d}").items():
        assert torch.equal(tensor, weights_of(run, f"rl_{steps + 1:06d}")[name]), name
    lines, others = untimed_metrics(run), untimed_metrics(tmp_path / "whole")
    assert [line for line in lines if "train/loss" in line] == [line for line in others if "train/loss" in line]
