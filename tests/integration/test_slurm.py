"""The jobs of examples/cluster on a real SLURM of two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
from processes import processes_of
from run_results import SMALL_RUN, run_config, untimed_metrics

from rlinf.commands.train import train

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SMALL = [*SMALL_RUN, "cluster.device=cpu"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if lacking := slurm_cluster.missing():
        pytest.skip(lacking)
    with slurm_cluster.two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


TWO_NODES = """
import sys, time
from pathlib import Path
import slurm_cluster
with slurm_cluster.two_nodes(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_killed_test_run_leaves_no_daemon(tmp_path):
    if lacking := slurm_cluster.missing():
        pytest.skip(lacking)
    mark, folder = f"SLURM_CONF={tmp_path}/slurm.conf", Path(slurm_cluster.__file__).parent
    words = [sys.executable, "-c", TWO_NODES, str(tmp_path)]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        assert len(processes_of(mark)) >= 4, "control: two nodes, their controller and munged"
        run.kill()
    slurm_cluster.until(lambda: not processes_of(mark), "daemons stay")


def ranks_of(mark: str) -> dict[str, int]:
    """Return the processes of a job's ranks by rank."""
    found = {}
    for pid, command in processes_of(mark).items():
        variables = (Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")).split("\0")
        rank = [value.partition("=")[2] for value in variables if value.startswith("SLURM_PROCID=")]
        if "rlinf\0train" in command and "python" in command.partition("\0")[0] and rank:
            found.setdefault(rank[0], pid)
    return found


def test_a_killed_rank_sends_the_job_back_into_the_queue_where_it_resumes(slurm, tmp_path):
    """Metrics and the number of starts of a job that lost a rank; they equal the metrics of an undisturbed run."""
    words = [*SMALL, "trainer.max_steps=12", "trainer.save_every=1"]
    job = slurm.submit(FOLDER / "slurm_ranks.sh", *words, f"output_dir={tmp_path}/run", MARK=str(tmp_path))
    checkpoints = tmp_path / "run" / "checkpoints"
    slurm_cluster.until(lambda: any(checkpoints.glob("rl_*")), job.output, 200)
    victims = ranks_of(f"MARK={tmp_path}")
    assert sorted(victims) == ["0", "1"]
    os.kill(victims["1"], signal.SIGKILL)
    fields = job.wait()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), job.output()
    assert f"job {job.number} is requeued" in job.output()
    assert "2 ranks" in job.output() and "there is no complete checkpoint" in job.output()
    assert (tmp_path / "run" / "report.html").is_file()
    train(run_config(tmp_path / "whole", *words, "cluster.num_processes=2"))
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")


def test_a_refused_word_does_not_go_back_into_the_queue(slurm, tmp_path):
    job = slurm.submit(FOLDER / "slurm_ranks.sh", *SMALL, "trainer.max_step=1", f"output_dir={tmp_path}/run")
    fields = job.wait()
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "2:0", "0"), job.output()
    assert "Did you mean 'max_steps'?" in job.output()


def test_ray_starts_on_the_nodes_of_a_job(slurm, tmp_path):
    """A rank and a rollout worker, which Ray places on two nodes."""
    pytest.importorskip("ray", reason="Ray is not installed: bash scripts/setup.sh --ray")
    words = [
        *SMALL,
        "trainer.max_steps=1",
        "cluster.num_processes=1",
        "cluster.num_rollout_workers=1",
        f"output_dir={tmp_path}/run",
    ]
    with slurm_cluster.held_ports(1) as (port,):
        job = slurm.submit(FOLDER / "slurm_ray.sh", *words, PORT=str(port), RAY_memory_monitor_refresh_ms="0")
        fields = job.wait()
    assert fields["JobState"] == "COMPLETED", job.output()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] > 0
