"""Ranks that a launcher starts: torchrun on one machine and on two, and srun."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from run_results import SMALL_RUN, result_content, run_config, untimed_metrics

from rlinf.commands.train import train
from rlinf.distributed.start import MPIRUN, SRUN, TORCHRUN

SMALL = [*SMALL_RUN, "trainer.max_steps=2", "algorithm.critic_warmup_steps=1"]
CHOICE = [
    "sft.max_steps=60", "sft.num_demonstrations=32", "sft.batch_size=64", "env.tolerance_m=0.1", "evaluation.num_fresh_episodes=5",
]  # fmt: skip
"""Two checkpoints compete, and some episodes succeed, so that the best one is evaluated on fresh episodes."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def begin(folder: Path, launcher: list[str], words: list[str], **environment: str) -> subprocess.Popen:
    """Start a process of a command in ``folder``."""
    known = {name for names in (TORCHRUN, SRUN, MPIRUN) for name in names.values()}
    clean = {name: value for name, value in os.environ.items() if name not in known}
    return subprocess.Popen(
        [*launcher, "-m", "rlinf", *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=clean | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def ended(*processes: subprocess.Popen) -> list[tuple[int, str, str]]:
    return [(process.wait(), out, err) for process in processes for out, err in [process.communicate(timeout=240)]]


def two_ranks(folder: Path, words: list[str], others: list[str] | None = None) -> list[tuple[int, str, str]]:
    """Two ranks with the variables of torchrun, without its agent, which would import torch once more."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = enumerate((words, words if others is None else others))
    starts = [begin(folder, [sys.executable], own, RANK=str(k), LOCAL_RANK=str(k), **shared) for k, own in both]
    return ended(*starts)


def test_torchrun_on_two_machines_gives_the_numbers_of_ranks_that_the_command_starts(tmp_path):
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, "--rdzv-id=test"]
    words = ["train", *SMALL, *CHOICE]
    ends = ended(*(begin(tmp_path, torchrun(*options, f"--node-rank={node}"), words) for node in (0, 1)))
    assert [status for status, _, _ in ends] == [0, 0], ends
    folders = [path for path in (tmp_path / "outputs").glob("*/*") if not path.is_symlink()]
    assert len(folders) == 1, "one dated folder, which is that of rank 0"
    for line in ("each of 2 ranks", "after RL ", "to report: ", "fresh evaluation of"):
        assert sum(out.count(line) for _, out, _ in ends) == 1, "rank 0 alone prints"
    for seed in (0, 5):
        train(run_config(tmp_path / str(seed), *SMALL, *CHOICE, "cluster.num_processes=2", f"seed={seed}"))
    assert untimed_metrics(folders[0]) == untimed_metrics(tmp_path / "0") != untimed_metrics(tmp_path / "5")
    fresh, again = (result_content(folder / "eval" / "fresh") for folder in (folders[0], tmp_path / "0"))
    assert fresh == again and len(fresh["results"]) == 5


def test_ranks_of_another_configuration_are_refused(tmp_path):
    words = ["train", *SMALL, "output_dir=rejected"]
    ends = two_ranks(tmp_path, words, [*words, "seed=4"])
    found = {tuple(re.findall(r"ConfigError: .*\n.*", err)) for _, _, err in ends}
    assert len(found) == 1 and len(next(iter(found))) == 1, "the same error once on both"
    assert re.search(r"argument seed: rank \d on .* has .*rank 0 on ", str(found))
    assert 0 not in [status for status, _, _ in ends] and not (tmp_path / "rejected").exists()


def test_what_is_refused_is_one_error_on_every_rank_before_there_is_a_folder(tmp_path):
    """Other rejections: tests/unit/test_start.py."""
    for status, out, err in two_ranks(tmp_path, ["train", *SMALL, "cluster.num_processes=3"]):
        assert status != 0 and out == "" and not list(tmp_path.iterdir())
        errors = re.findall("^ConfigError: .*", err, re.MULTILINE)
        assert len(errors) == 1 and "cluster.num_processes=3, but torchrun started 2" in errors[0]


def test_a_command_without_ranks_runs_once(tmp_path):
    ends = two_ranks(tmp_path, ["models"])
    ((_, alone, _),) = ended(begin(tmp_path, [sys.executable], ["models"]))
    assert [status for status, _, _ in ends] == [0, 0] and "openvla_tiny" in alone
    assert [out for _, out, _ in ends] == [alone, ""] and "runs in one process" in "".join(err for _, _, err in ends)


TELL = """
import json, os, sys
from pathlib import Path
import torch
from rlinf.distributed import launch, process_group
from rlinf.distributed.devices import visible_gpus
from rlinf.distributed.start import launch_context
from rlinf.engines.vllm_engine import engine_environment

sys.path.insert(0, {fixtures!r})
from walk_env import WalkConfig, WalkVectorEnv
from rlinf.types import EpisodeSpec

def tell(folder):
    env = WalkVectorEnv(WalkConfig(num_processes=1), 1, False)
    env.reset(options={{"episodes": [EpisodeSpec("walk", 0, 0, 0)]}})
    simulator = Path(f"/proc/{{env._workers[0].process.pid}}/environ").read_text().split(chr(0))
    engine = engine_environment(1, visible_gpus(os.environ, 1))
    names = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
    found = [os.environ, dict(item.split("=", 1) for item in simulator if item), engine]
    told = [[one.get(name) for name in names] for one in found]
    Path(folder, str(process_group.rank())).write_text(json.dumps(told))
    env.close()

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 8
    context = launch_context(os.environ)
    sys.exit(launch.run_with_ranks(context, ["train"], lambda: launch.launch(tell, os.environ["FOLDER"], 2, "cpu") or 0))
"""


def test_a_launchers_rank_its_simulators_and_its_engine_see_one_gpu(tmp_path):
    """On a made-up machine of eight GPUs in another order, on which the launcher's shell had chosen an EGL device."""
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    (tmp_path / "tell.py").write_text(TELL.format(fixtures=fixtures))
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FOLDER": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "6,3,0,1,7,5,4,2", "MUJOCO_EGL_DEVICE_ID": "4", "RLINF_CHOSEN_EGL_DEVICE_ID": "4",
        "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "tell.py"], cwd=tmp_path, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    for rank, gpu in enumerate(["6", "3"]):
        assert json.loads((tmp_path / str(rank)).read_text()) == 3 * [[gpu, None]]
