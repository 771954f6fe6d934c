"""Trainer ranks that Ray places, on two of its daemons: the numbers of ranks that the command starts, and how they end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from processes import is_running
from ray_clusters import two_machines
from run_results import QUIET, check_equal_runs, run_config

from rlinf.cluster.machine import CommandMachine
from rlinf.commands.train import train
from rlinf.distributed.ray.ranks import RankPlaces
from rlinf.errors import ConfigError, RankError, RankKilledError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
SMALL = [
    *QUIET, "model=mlp", "env.tasks=[reach]", "env.cameras=[]", "rollout.num_envs=8", "rollout.num_chunks=3", "env.max_episode_steps=3",
    "trainer.minibatch_size=12", "model.micro_batch_size=12", "trainer.max_steps=3", "trainer.eval_every=2", "trainer.save_every=1",
    "sft.max_steps=0", "evaluation.num_episodes=6", "evaluation.num_envs=4", "evaluation.probe=false", "cluster.num_processes=2",
]  # fmt: skip
RAY = ["cluster.start=ray"]
PLAYERS = [*RAY, "cluster.placement=disaggregated", "cluster.num_rollout_workers=2"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two machines; a rank and a rollout worker have room on each."""
    with two_machines() as cluster:
        yield cluster


def check_equal(folder, other):
    check_equal_runs(folder, other, "rl_000003", ("before_rl", "step_000002", "after_rl"), 6)


@pytest.fixture
def one_on_each(cluster):
    """Leave room for one rank on each machine."""
    import ray

    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(60)
    yield
    ray.util.remove_placement_group(group)


def rank_pids(folder):
    """Return the processes of the ranks of the run in ``folder``, by rank."""
    pids = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"run_rank" in command and f"WANDB_NOTES={folder}".encode() in environment:
            pids[int(next(each for each in environment if each.startswith(b"RANK=")).partition(b"=")[2])] = int(
                entry.name
            )
    return pids


@contextmanager
def disturbed(folder, number, what):
    """Call ``what(pids)`` in a thread once the run in ``folder`` has a checkpoint of iteration ``number``."""
    pids, over = {}, threading.Event()

    def disturb():
        while not (folder / "checkpoints" / f"rl_{number:06}").exists():
            if over.wait(0.02):
                return
        pids.update(rank_pids(folder))
        what(pids)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield pids
    finally:
        over.set()
        thread.join(60)
    assert sorted(pids) == [0, 1], "the run ended before it was disturbed"


def test_ranks_on_two_machines_are_bit_for_bit_those_of_the_command_also_if_one_is_killed_and_one_stopped(
    runs, one_on_each, tmp_path, monkeypatch, caplog
):
    """Rank 1 is killed after the first iteration and stopped after the second; a busy machine may miss these short deadlines more often."""
    start, nodes = RankPlaces.start, []

    def noted(self, *arguments):
        nodes.append(set(self.nodes))
        return start(self, *arguments)

    monkeypatch.setattr(RankPlaces, "start", noted)
    monkeypatch.setenv("WANDB_NOTES", str(tmp_path))  # marks the ranks of this run
    short = [f"cluster.deadlines.{name}=5" for name in ("push", "rollout", "update", "save", "evaluate")]
    with (
        disturbed(tmp_path, 1, lambda pids: os.kill(pids[1], signal.SIGKILL)) as killed,
        disturbed(tmp_path, 2, lambda pids: os.kill(pids[1], signal.SIGSTOP)) as stopped,
    ):
        train(run_config(tmp_path, *SMALL, *RAY, *short))
    check_equal(tmp_path, runs("own", *SMALL))
    assert len(nodes) >= 3 and all(len(of_start) == 2 for of_start in nodes), "machines of each start"
    assert "Rank 1 was killed by SIGKILL" in caplog.text and "for more than 5 s; no reply from rank 1" in caplog.text
    assert "Restarting all ranks from" in caplog.text and "(2 of 20 times)" in caplog.text
    assert not rank_pids(tmp_path) and not any(map(is_running, [*killed.values(), *stopped.values()]))


def test_a_rank_whose_folder_is_missing_ends_the_run_with_the_error_of_its_actor(tmp_path, monkeypatch, caplog):
    start = RankPlaces.start

    def elsewhere(self, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr("os.getcwd", lambda: f"{tmp_path}/nowhere")
            return start(self, *arguments)

    monkeypatch.setattr(RankPlaces, "start", elsewhere)
    with pytest.raises(RankError, match="Rank 0 could not be run: FileNotFoundError: .*nowhere") as caught:
        train(run_config(tmp_path / "run", *SMALL, *RAY))
    assert not isinstance(caught.value, RankKilledError) and "Restarting all ranks" not in caplog.text


def test_actors_of_a_start_that_fails_leave_their_places(one_on_each):
    import ray

    group = ray.util.placement_group([{"CPU": 1}] * 2)
    try:
        assert group.wait(60)
        with pytest.raises(ConfigError, match="has no folder /nowhere"):
            RankPlaces.of(
                group.id.hex(), "127.0.0.1", 60.0, partial(CommandMachine.here([]).check_for_rank, ["/nowhere"])
            )
        places = RankPlaces.of(group.id.hex(), "127.0.0.1", 60.0)  # nobody holds the places
        for agent in places.agents:
            ray.kill(agent)
    finally:
        ray.util.remove_placement_group(group)


def test_a_loss_more_than_allowed_ends_the_run_with_its_cause(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_NOTES", str(tmp_path))
    with disturbed(tmp_path, 1, lambda pids: os.kill(pids[0], signal.SIGKILL)):
        with pytest.raises(RankKilledError, match="Rank 0 was killed by SIGKILL"):
            train(run_config(tmp_path, *SMALL, *RAY, "cluster.max_restarts=0"))
    assert not rank_pids(tmp_path)


def test_two_ranks_and_two_players_that_ray_places_are_bit_for_bit_two_ranks_that_play(runs):
    folder = runs("split", *SMALL, *PLAYERS)
    check_equal(folder, runs("own", *SMALL))
    assert json.loads((folder / "summary.json").read_text())["rollout_workers"] == "1 worker"


def test_control_another_seed_is_another_run(runs):
    with pytest.raises(AssertionError):
        check_equal(runs("other", *SMALL, "seed=1"), runs("own", *SMALL))
