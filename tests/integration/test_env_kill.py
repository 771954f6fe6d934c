"""Worker processes of simulators are killed while evaluations and rollouts run, and parents die: nothing is counted twice,
nothing is missing, and no process is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from processes import is_running
from walk_env import WalkConfig, WalkVectorEnv
from wanderer import Wanderer

from rlinf.distributed.child_process import SharedMemory
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.process.env import Worker
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.rollout.collector import RolloutCollector

NUM_KILLS = 4


class Killer(threading.Thread):
    """Kills a worker of ``envs`` every 0.2 s, ``NUM_KILLS`` of them, each after it has started to step."""

    def __init__(self, envs: list[WalkVectorEnv]) -> None:
        super().__init__(daemon=True)
        self.envs, self.killed = envs, []

    def run(self) -> None:
        generator = np.random.default_rng(0)
        first_seen: dict[int, int] = {}
        while len(self.killed) < NUM_KILLS and not any(env.closed for env in self.envs):
            time.sleep(0.2)
            workers = [(env, worker) for env in self.envs for worker in env._workers if worker.process is not None]
            if not workers:
                continue
            env, worker = workers[generator.integers(len(workers))]
            process, num_calls = worker.process, env._num_calls(worker)
            # Each row is made, reset and shown before the first step: three calls.
            begun = num_calls > first_seen.setdefault(process.pid, num_calls) + 3 * len(worker.ids)
            if begun and process.pid not in self.killed:
                process.kill()
                self.killed.append(process.pid)


def test_an_evaluation_counts_every_episode_once_while_workers_are_killed():
    policy, results = Wanderer(), []
    quiet = WalkVectorEnv(WalkConfig(num_processes=0, max_episode_steps=20), 6, False)
    specs = quiet.episode_specs("eval")[:40]
    expected = evaluate_policy(policy, quiet, specs, greedy=False)
    env = WalkVectorEnv(WalkConfig(num_processes=2, max_episode_steps=20, step_sleep_s=0.02), 6, False)
    killer = Killer([env])
    killer.start()
    evaluation = evaluate_policy(policy, env, specs, greedy=False, on_result=results.append)
    found = evaluation.results
    env.close()
    assert killer.killed and env.num_restarts >= len(killer.killed) - 1  # the last kill may have come after the end
    assert evaluation.warnings[0].startswith(f"{env.num_restarts} simulator worker processes were lost")
    assert found == expected.results and not expected.warnings and sorted(r.spec for r in results) == sorted(specs)
    assert 0 < sum(result.success for result in found) < len(found)


def test_a_rollout_holds_every_episode_once_while_workers_are_killed():
    num_envs, num_chunks = 6, 60
    envs: list[WalkVectorEnv] = []

    def make(count: int) -> WalkVectorEnv:
        envs.append(WalkVectorEnv(WalkConfig(num_processes=1, max_episode_steps=8, step_sleep_s=0.02), count, True))
        return envs[-1]

    split = WalkVectorEnv(WalkConfig(num_processes=0), 1, True).episode_specs("train")
    sampler = EpisodeSampler(split, 2, num_groups=num_envs, seed=1, init_states="ordered")
    collector = RolloutCollector(
        make, sampler, num_envs=num_envs, num_chunks=num_chunks, temperature=1.0, num_worker_threads=2
    )
    killer = Killer(envs)
    killer.start()
    batch = collector.collect(Wanderer(), 0, 0, needs_values=False)
    collector.close()
    num_lost = len(batch.episode_ids.unique()) - len(batch.episode_ids[batch.loss_mask].unique())
    assert len(killer.killed) == sum(env.num_restarts for env in envs) == NUM_KILLS <= num_lost
    for env in range(num_envs):
        valid = batch.loss_mask[:, env]
        ids = torch.unique_consecutive(batch.episode_ids[valid, env]).tolist()
        assert len(set(ids)) == len(ids)
        # What is valid is the episodes of an undisturbed rollout, in their order, each with its end but for the last.
        assert [batch.specs[i] for i in ids] == [sampler.spec(0, env, position) for position in range(len(ids))]
        ends = (batch.terminated | batch.truncated)[valid, env]
        assert int(ends.sum()) in (len(ids), len(ids) - 1)
        assert batch.action_mask[valid, env].any(1).all()


def test_workers_outlive_the_signals_that_a_terminal_sends_to_its_whole_group():
    """The parent ends the run after the present step, for which it needs them."""
    env = WalkVectorEnv(WalkConfig(num_processes=2), 4, False)
    env.reset()
    before = env.worker_processes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for process in before:
            process.send_signal(number)
        assert not len(env.chunk_step(np.zeros((4, 1, 2))).lost_env_ids), number
    assert env.worker_processes() == before and env.num_restarts == 0
    env.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV])
def test_a_worker_that_somebody_ended_did_not_fail_by_its_episode(number):
    worker, memory = Worker(np.arange(2)), SharedMemory(1)
    worker.connection, theirs = Pipe()
    worker.log = memory.file
    worker.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    theirs.close()
    worker.process.send_signal(number)
    assert worker.receive(1.0, "step").from_outside is (number != signal.SIGSEGV)


SCRIPT = """
import os, sys, threading, time
import numpy as np
from walk_env import WalkConfig, WalkVectorEnv

how, limit_s = sys.argv[2], 4.0 if sys.argv[2] == "grip" else 600.0
config = WalkConfig(num_processes=2, fault_file=sys.argv[1], step_timeout_s=limit_s, reset_timeout_s=limit_s)
env = WalkVectorEnv(config, 4, False)
env.reset()
print(*[process.pid for process in env.worker_processes()], flush=True)
if how in ("hang", "grip"):
    open(sys.argv[1], "w").write("step always_" + how)
    env.chunk_step(np.zeros((4, 1, 2)))
elif how == "raise":
    raise RuntimeError("an error of the parent")
"""


@pytest.mark.parametrize("how", ["hang", "grip", "raise", "end"])
def test_no_process_outlives_its_parent(how, tmp_path):
    """Killed while the workers sleep in a step or are stuck in C code that holds Python's lock, an error, an env that nobody closed."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "fault"), how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    if how in ("hang", "grip"):
        time.sleep(0.5)
        assert all(map(is_running, pids))
        process.kill()
    messages = process.communicate(timeout=280)[1]
    # Where C code holds Python's lock, the deadlines of 4 s have to pass first; the sleeps last for 1000 s.
    deadline = time.monotonic() + 60.0
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
    for word in ("leaked", "resource_tracker", "Exception ignored", "BrokenPipe"):
        assert word not in messages
