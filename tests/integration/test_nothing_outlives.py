"""Commands that are killed, terminated or interrupted leave no process: ranks, rollout workers, simulators, engines, Ray's daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import nothing_is_left, processes_of, wait_until
from ray_clusters import SURROUNDINGS

from rlinf.evaluation.partial import num_saved

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHORT = [
    "env.max_episode_steps=3", "evaluation.num_envs=2", "evaluation.num_videos_per_task=0", "tracking.progress=false",
    "cluster.num_threads=1",
]  # fmt: skip
WALK = ["plugins=[walk_plugin.py]", "env=walk", "env.tasks=[near]", "env.num_processes=1", *SHORT]
STATE = ["model=mlp", "model.init_config.state_dim=2", "env.cameras=[]"]
TABLETOP = ["model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", *SHORT]
ENDLESS = [
    "rollout.num_envs=8", "rollout.num_chunks=3", "trainer.minibatch_size=12", "model.micro_batch_size=12", "trainer.max_steps=100000",
    "trainer.save_every=1", "sft.max_steps=0", "evaluation.num_episodes=2", "evaluation.probe=false", "tracking.tensorboard=false",
]  # fmt: skip
RAY = ["cluster.start=ray", "cluster.num_rollout_workers=2"]
SPLIT = ["cluster.start=ray", "cluster.placement=disaggregated"]
RUNS = {
    "engine": (
        signal.SIGKILL,
        [
            "train", "experiment=quickstart_vllm", *WALK, "env.cameras=[front]", *ENDLESS, *SPLIT, "cluster.num_rollout_workers=1",
            "algorithm.tis_cap=2.0", "algorithm.critic_warmup_steps=0",
        ],
        ["gcs_server", "RolloutWorkerActor", "vllm_process", "envs.process.worker_process"],
    ),
    "ranks that ray places": (
        signal.SIGINT,
        ["train", *WALK, *STATE, *ENDLESS, *SPLIT, "cluster.num_rollout_workers=2", "cluster.num_processes=2"],
        ["gcs_server", "run_rank", "RolloutWorkerActor"],
    ),
    "evaluation": (
        signal.SIGTERM,
        ["evaluate", *WALK, *STATE, "env.step_sleep_s=0.05", "evaluation.num_episodes=200", *RAY],
        ["gcs_server", "RolloutWorkerActor"],
    ),
    "ranks": (
        signal.SIGTERM,
        ["train", *WALK, *STATE, *ENDLESS, "cluster.num_processes=2"],
        ["multiprocessing", "envs.process.worker_process"],
    ),
    "rollout processes": (
        signal.SIGINT,
        ["train", *TABLETOP, *ENDLESS, "rollout.worker_processes=2"],
        ["rollout.worker_process"],
    ),
}  # fmt: skip
"""The signal, the command, and words in the commands of its processes."""
NEEDS = {"vllm_process": "vllm", "gcs_server": "ray"}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_command_outlives_it(name, tmp_path):
    """A terminal sends SIGINT to all processes of a command; the other signals go to the command only."""
    number, words, kinds = RUNS[name]
    for kind in NEEDS.keys() & set(kinds):
        pytest.importorskip(NEEDS[kind])
    (tmp_path / "walk_plugin.py").write_text("import walk_env\nwalk_env.register()\n")
    temporary, run, log = (tmp_path / part for part in ("temporary", "run", "log"))
    temporary.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = os.pathsep.join([str(FIXTURES), str(FIXTURES.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = (
        kept | SURROUNDINGS | {"RUN_OF_THIS_TEST": str(tmp_path), "PYTHONPATH": paths, "TMPDIR": str(temporary)}
    )
    mark = f"RUN_OF_THIS_TEST={tmp_path}"

    def has_begun() -> bool:
        assert process.poll() is None, log.read_text()
        commands = " ".join(processes_of(mark).values())
        saved = num_saved(run) if words[0] == "evaluate" else len(list(run.glob("checkpoints/rl_*/manifest.json")))
        return saved > 0 and all(kind in commands for kind in kinds)

    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlinf", *words, f"output_dir={run}"],
            cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        assert wait_until(has_begun, 300), (processes_of(mark), log.read_text())
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        status = process.wait(300)
    finally:
        process.kill()
    assert status in ((-number,) if number == signal.SIGKILL else (128 + number, -number)), log.read_text()
    assert nothing_is_left(mark, 120), processes_of(mark)
    if number != signal.SIGKILL:
        for word in ("leaked", "resource_tracker", "Exception ignored", "BrokenPipe", "Traceback"):
            assert word not in log.read_text()
        assert words[0] == "evaluate" or "continue with: rlinf train resume=" in log.read_text()
