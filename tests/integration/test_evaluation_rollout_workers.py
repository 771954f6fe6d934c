"""`rlinf evaluate` by rollout workers of Ray: the result of one process, also when rollout workers and the command itself are killed."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from ray_clusters import one_machine
from run_results import result_content, run_config

from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.commands.evaluate import evaluate
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError, RankError
from rlinf.evaluation.partial import num_saved, partial_files
from rlinf.preflight.placement import Placement
from rlinf.preflight.validation import validate

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
PLUGIN = Path(__file__).parents[1] / "fixtures" / "slow_tabletop.py"
NUM_EPISODES = 60
WORDS = [
    "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.tasks=[reach,push]", "env.cameras=[]",
    "env.max_episode_steps=8", f"evaluation.num_episodes={NUM_EPISODES}", "evaluation.num_envs=4", "evaluation.num_videos_per_task=0",
    "cluster.num_threads=1", "tracking.progress=false",
]  # fmt: skip


def configured(output: Path, *overrides: str) -> RunConfig:
    config = run_config(output, *WORDS, *overrides)
    validate(config, "evaluate")
    return config


def workers(number: int) -> list[str]:
    return ["cluster.start=ray", f"cluster.num_rollout_workers={number}"]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("one")
    evaluate(configured(folder, "evaluation.num_videos_per_task=2"))
    return result_content(folder)


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine; this process is connected to it."""
    with one_machine(num_cpus=3):
        yield


def kill_a_rollout_worker(made: list[RolloutWorkers], folder: Path, number: int, killed: list[int]) -> None:
    """Kill a rollout worker as soon as ``number`` results are on disk."""
    import ray

    while num_saved(folder) < number:
        time.sleep(0.01)
    where = [ray.get(each) for each in made[0]._where.values()]
    victim = random.choice(where).pid
    os.kill(victim, signal.SIGKILL)
    killed.append(victim)


def test_three_rollout_workers_write_the_file_of_one_process_also_if_one_is_killed(
    cluster, of_one, tmp_path, monkeypatch, caplog
):
    made: list[RolloutWorkers] = []
    killed: list[int] = []
    init = RolloutWorkers.__init__
    monkeypatch.setattr(
        RolloutWorkers, "__init__", lambda self, *args, **more: made.append(self) or init(self, *args, **more)
    )
    number = random.Random(0).randrange(1, NUM_EPISODES - 20)
    thread = threading.Thread(target=kill_a_rollout_worker, args=(made, tmp_path, number, killed), daemon=True)
    thread.start()
    evaluate(configured(tmp_path, *workers(3), "env.sleep_s=0.02", "evaluation.num_videos_per_task=2"))
    assert len(killed) == 1 == caplog.text.count("was lost: The actor died")
    assert result_content(tmp_path) == of_one and len(of_one["results"]) == NUM_EPISODES
    videos = of_one["videos"]
    assert videos and all((tmp_path / video["path"]).stat().st_size for video in videos)
    assert not partial_files(tmp_path)


def test_results_are_kept_and_the_same_command_continues(cluster, of_one, tmp_path, monkeypatch, capsys):
    """The run ends because a rollout worker was lost and none may be replaced; then one process runs the remaining episodes."""
    ask = RolloutWorkers.submit

    def one_dies(self, number, *arguments):
        import ray

        if num_saved(tmp_path) >= 8:
            os.kill(ray.get(self._where[number]).pid, signal.SIGKILL)
        return ask(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutWorkers, "submit", one_dies)
        way_on = f"then run the same command with output_dir={tmp_path}, or raise the limit: cluster.max_restarts=2"
        with pytest.raises(RankError, match=way_on):
            evaluate(configured(tmp_path, *workers(2), "cluster.max_restarts=0"))
    kept = num_saved(tmp_path)
    assert 8 <= kept < NUM_EPISODES and f"{kept} results are saved in {tmp_path};" in capsys.readouterr().err
    evaluate(configured(tmp_path))
    assert f"{kept} of {NUM_EPISODES} episodes were already done" in capsys.readouterr().err
    assert result_content(tmp_path) == {**of_one, "videos": []}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["cluster.start=ray"], "cluster.num_rollout_workers=2 cluster.num_processes=1"),
        (["cluster.num_rollout_workers=2"], "cluster.start=ray"),
        ([*workers(2), "cluster.num_processes=2"], "cluster.num_processes=1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_override_that_mends_it(tmp_path, overrides, fix):
    with pytest.raises(ConfigError, match=f"Set {fix}"):
        configured(tmp_path, *overrides)
    configured(tmp_path, *overrides, *fix.split())


def test_rollout_workers_have_all_gpus_because_the_rank_of_an_evaluation_computes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf.preflight.placement.resolve_device", lambda device, _: "cuda")
    placement = Placement.of_evaluation(configured(tmp_path, *workers(2)))
    assert placement.bundle["GPU"] == 1 and placement.gpus_of_ranks == 0
    training = run_config(tmp_path, *WORDS, *workers(2), "cluster.placement=disaggregated")
    assert Placement.of(training).gpus_of_ranks == 1, "control"
