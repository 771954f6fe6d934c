"""The commands of a run with rollout workers, as a user types them: what they print, and what they leave behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import processes_of, wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
WORDS = [
    sys.executable, "-m", "rlinf", "train", "model=mlp", "env.tasks=[reach]", "env.cameras=[]", "rollout.num_envs=8",
    "env.max_episode_steps=3", "trainer.minibatch_size=12", "model.micro_batch_size=12", "trainer.max_steps=10000", "sft.max_steps=0",
    "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.num_videos_per_task=0", "evaluation.probe=false",
    "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1", "cluster.start=ray",
]  # fmt: skip
PLAYERS = ["cluster.placement=disaggregated", "cluster.num_rollout_workers=2"]
RANKS = ["cluster.num_processes=2"]

MARK = "RUN_OF_THIS_TEST"


def start(folder: Path, mark: str, *more: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {MARK: mark}
    words = [*WORDS, *more, f"output_dir={folder / 'run'}"]
    return subprocess.Popen(
        words, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("more", "number", "status"),
    [(PLAYERS, signal.SIGINT, 130), (PLAYERS, signal.SIGKILL, -9), (RANKS, signal.SIGTERM, 143)],
    ids=["int", "kill", "ranks-term"],
)
def test_nothing_of_a_run_outlives_it(tmp_path, more, number, status):
    mark = f"{MARK}={tmp_path}"
    process = start(tmp_path, str(tmp_path), *more)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("eval before_rl"):
            break
    assert len(processes_of(mark)) > 3, "".join(lines)  # control: Ray's daemons, and the rollout workers or ranks
    process.send_signal(number)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == status, rest
    if number != signal.SIGKILL:
        assert "continue with: rlinf train resume=" in rest
    # After SIGKILL, two agents of Ray may take minutes to notice.
    assert wait_until(lambda: not processes_of(mark), 300)
