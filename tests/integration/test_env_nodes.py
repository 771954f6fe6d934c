"""Simulators in actors of Ray: the same episodes, also after an actor was lost."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import walk_env
from ray_clusters import patience
from wanderer import Wanderer

from rlinf.cluster.factory import env_maker
from rlinf.cluster.rollouts import make_collector
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.contracts.env import check_env, equal_rows, seeded_actions, spread_specs
from rlinf.distributed import deadlines, stack_dump
from rlinf.distributed.ray import cluster as ray_cluster
from rlinf.distributed.start import rank_fingerprint
from rlinf.envs import make_env
from rlinf.envs.remote.env import EnvNodes, RemoteVectorEnv
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.errors import ConfigError, SimulatorError

ray = pytest.importorskip("ray", reason="Ray is not installed (scripts/setup.sh --ray)")

NUM_ENVS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ.pop("RAY_ADDRESS", None)
    with patience():
        yield ray_cluster.connect("these tests")
        ray.shutdown()


TABLETOP = TabletopConfig(tasks=["push"], image_size=16, cameras=["front", "wrist"], max_episode_steps=8)


def nodes(count=2, **settings):
    return EnvNodes(count, **{"timeout_s": 60.0, "prepare": walk_env.register, **settings})


def remote_tabletop(num_envs, auto_reset, config=TABLETOP, **settings):
    return RemoteVectorEnv.of(TabletopVectorEnv, nodes(**settings))(config, num_envs, auto_reset)


def remote_walk(num_envs, auto_reset, config=None, **settings):
    config = config or walk_env.WalkConfig(num_processes=0)
    return RemoteVectorEnv.of(walk_env.WalkVectorEnv, nodes(**settings))(config, num_envs, auto_reset)


def test_simulators_elsewhere_fulfil_the_contract():
    assert check_env(remote_walk) == []


def test_episodes_are_those_of_simulators_in_this_process():
    local = make_env(TABLETOP, NUM_ENVS, auto_reset=True)
    remote = remote_tabletop(NUM_ENVS, True, count=3)
    for env in (local, remote):
        env.reset(seed=7)
    for number in range(5):
        specs = local.current_specs()
        actions = seeded_actions(local, specs, 3, first=3 * number)
        here, there = local.chunk_step(actions), remote.chunk_step(actions)
        assert remote.current_specs() == local.current_specs() and there.episodes == here.episodes
        assert equal_rows(here.observation, there.observation)
        for name in ("rewards", "executed", "terminated", "truncated", "success", "final_env_ids", "lost_env_ids"):
            assert np.array_equal(getattr(here, name), getattr(there, name)), name
    assert any(spec.init_state_id for spec in specs)
    rows = [3, 0]
    assert np.array_equal(local.render_frames(rows, 32), remote.render_frames(rows, 32))
    assert local.poses(rows) == remote.poses(rows)
    assert np.array_equal(local.expert_actions(), remote.expert_actions())
    assert local.action_statistics() == remote.action_statistics()
    local.close()
    remote.close()


def test_a_rollout_has_the_bits_of_one_in_this_process(tmp_path):
    """Through the collector of a run, in two worker threads."""
    (tmp_path / "walk_plugin.py").write_text("import walk_env\nwalk_env.register()\n")
    batches = []
    for count in (0, 2):
        config = build_config(compose_config(["model=mlp", f"cluster.num_env_workers={count}"]))
        config = replace(config, env=walk_env.WalkConfig(num_processes=0), plugins=[str(tmp_path / "walk_plugin.py")])
        config.rollout.num_envs, config.rollout.num_chunks, config.rollout.pipeline_stages = 4, 6, 2
        walk_env.register()
        env = env_maker(config, 1)(1, auto_reset=False)
        assert isinstance(env, RemoteVectorEnv) == bool(count)
        collector = make_collector(config, env, Wanderer(), nullcontext)
        batches.append(collector.collect(Wanderer(), 3, 0, False))
        collector.close()
        env.close()
    local, remote = batches
    assert len(local.episodes) and remote.episodes == local.episodes and remote.specs == local.specs
    assert equal_rows(local.observation, remote.observation)
    tensors = remote.tensors()
    assert tensors.keys() == local.tensors().keys() and tensors["action_mask"].any()
    for name, one in local.tensors().items():
        assert torch.equal(one, tensors[name]), name


def kill(env, actor, number=signal.SIGKILL):
    os.kill(env.places()[actor][1], number)


def test_the_episodes_of_a_killed_actor_restart(caplog):
    """As those of a lost simulator process; the rows of the other actor continue."""
    env = remote_tabletop(NUM_ENVS, False)
    alone = make_env(TABLETOP, NUM_ENVS, auto_reset=False)
    specs = spread_specs(env, NUM_ENVS)
    actions = seeded_actions(env, specs, 3)
    for each in (env, alone):
        each.reset(options={"episodes": specs})
        each.chunk_step(actions)
    kill(env, 1)
    step, undisturbed = env.chunk_step(actions), alone.chunk_step(actions)
    assert step.lost_env_ids.tolist() == [2, 3] and env.num_restarts == 1
    assert not step.executed[2:].any() and not step.rewards[2:].any()
    assert equal_rows(step.observation.select([0, 1]), undisturbed.observation.select([0, 1]))
    first, _ = alone.reset(options={"episodes": specs})
    assert equal_rows(step.observation.select([2, 3]), first.select([2, 3]))
    assert "envs 2 to 3" in caplog.text and "Its episodes restart (restart 1 of 20)" in caplog.text
    again = env.chunk_step(actions).observation.select([2, 3])
    assert equal_rows(again, alone.chunk_step(actions).observation.select([2, 3]))
    assert not equal_rows(again, alone.chunk_step(actions * 0).observation.select([2, 3])), "a control"
    assert env.rows_lost_with(np.array([2])).tolist() == env.rows_lost_with(np.array([3, 2])).tolist() == [2, 3]
    kill(env, 1)
    assert env.render_frames([0, 3], 32).shape == (2, 32, 32, 3)  # asked again in the new actor
    assert env.chunk_step(actions).lost_env_ids.tolist() == [2, 3]
    env.close()
    alone.close()


def test_a_lost_simulator_process_inside_an_actor_is_told(tmp_path):
    env = remote_walk(NUM_ENVS, False, walk_env.WalkConfig(num_processes=2, fault_file=str(tmp_path / "fault")))
    specs = spread_specs(env, NUM_ENVS)
    env.reset(options={"episodes": specs})
    (tmp_path / "fault").write_text("step raise")
    step = env.chunk_step(np.zeros((NUM_ENVS, 2, 2), np.float32))
    assert len(step.lost_env_ids) == 1 and env.num_restarts == 1
    kill(env, 0)
    env.chunk_step(np.zeros((NUM_ENVS, 2, 2), np.float32))
    assert env.num_restarts == 2  # that of the actor, and that inside its predecessor
    env.close()


def test_a_silent_actor_is_named_with_its_wait_and_replaced_but_not_too_often(caplog, monkeypatch):
    env = remote_walk(2, False, count=1, max_restarts=1)
    env.reset()
    replace_actor, patient = env._replace, env.nodes

    def replace_patiently(actor, why):
        env.nodes = patient  # the next actor may be slow on a busy machine
        replace_actor(actor, why)

    monkeypatch.setattr(env, "_replace", replace_patiently)
    env.nodes = replace(patient, timeout_s=2.0)
    kill(env, 0, signal.SIGSTOP)
    step = env.chunk_step(np.zeros((2, 1, 2), np.float32))
    assert step.lost_env_ids.tolist() == [0, 1]
    assert "step_chunk made no progress for 2 s (cluster.env_worker_timeout_s)" in caplog.text
    assert "no reply: it is stopped or lost" in caplog.text
    kill(env, 0)
    with pytest.raises(SimulatorError, match=r"2 env actors have been lost .*set cluster.env_worker_restarts=4"):
        env.chunk_step(np.zeros((2, 1, 2), np.float32))
    with pytest.raises(SimulatorError, match="is closed"):
        env.chunk_step(np.zeros((2, 1, 2), np.float32))


def test_an_actor_that_is_lost_while_it_replaces_another_is_replaced_too(tmp_path, caplog):
    env = remote_walk(2, False, count=1, prepare=partial(walk_env.register_or_exit, str(tmp_path)), max_restarts=2)
    first, _ = env.reset()
    kill(env, 0)
    step = env.chunk_step(np.zeros((2, 1, 2), np.float32))
    assert len(list(tmp_path.iterdir())) == 3 and env.num_restarts == 2
    assert step.lost_env_ids.tolist() == [0, 1] and equal_rows(step.observation, first)
    assert "it was lost during open" in caplog.text and "restart 2 of 2" in caplog.text
    env.close()


def test_an_actor_that_is_lost_at_the_start_ends_it(tmp_path):
    (tmp_path / "0").touch()
    with pytest.raises(SimulatorError, match="did not start: it was lost during open"):
        remote_walk(2, False, count=1, prepare=partial(walk_env.register_or_exit, str(tmp_path)))


def test_slow_simulators_are_waited_for_as_long_as_they_get_on(caplog):
    """12 steps of 0.5 s in a worker process, with a limit of 5 s."""
    config = walk_env.WalkConfig(num_processes=1, step_sleep_s=0.5, max_episode_steps=12)
    env = remote_walk(1, False, config, count=1)
    env.reset()
    env.nodes = replace(env.nodes, timeout_s=5.0)
    step = env.chunk_step(np.zeros((1, 12, 2), np.float32))
    assert step.executed.all() and not len(step.lost_env_ids) and "progress" not in caplog.text
    env.close()


def test_the_stacks_of_actors_and_their_simulators_are_in_the_report(tmp_path, monkeypatch):
    """Also those of an actor whose simulator is stopped, for which it waits."""
    assert stack_dump.CHILDREN_S + 1 < stack_dump.REMOTE_S < deadlines.REPLY_S - 1
    monkeypatch.setattr(stack_dump, "REMOTE_S", 60.0)  # of a busy machine; a report takes as long as it needs
    fault = tmp_path / "fault"
    env = remote_walk(2, False, walk_env.WalkConfig(num_processes=1, fault_file=str(fault)), count=1)
    env.reset()
    simulator = int(env.poses([0])[0]["pid"][0])
    fault.write_text("step hang")
    stepping = threading.Thread(target=env.chunk_step, args=(np.zeros((2, 1, 2), np.float32),))
    stepping.start()
    while fault.exists():
        time.sleep(0.05)
    try:
        report = stack_dump.stacks_of_children()
        assert "The env actor of the envs 0 to 1 on" in report
        assert "in step_chunk" in report and "in fall_asleep" in report  # of the actor, and of the simulator's process
        os.kill(simulator, signal.SIGSTOP)
        report = stack_dump.stacks_of_children()
        assert "in step_chunk" in report and "no reply: it is stopped or holds Python's lock" in report
        assert "in fall_asleep" not in report
    finally:
        os.kill(simulator, signal.SIGKILL)
        stepping.join()
        env.close()


def test_an_error_of_the_user_in_an_actor_is_raised_here():
    with pytest.raises(ConfigError, match="state"):
        remote_walk(1, False, walk_env.WalkConfig(num_processes=0, wrong="state"), count=1).reset()


def test_actors_with_other_software_are_refused(monkeypatch):
    software = rank_fingerprint(()) | {"version of torch": "1.0"}
    monkeypatch.setattr("rlinf.envs.remote.env.rank_fingerprint", lambda words: software)
    with pytest.raises(
        ConfigError,
        match=r"different software than the run:\n  version of torch: the actor on .*, the run on .* has 1.0",
    ):
        remote_walk(1, False, count=1)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster listens there"),
        ("ray://127.0.0.1:10001", "needs host:port"),
        ("somewhere", "needs host:port"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address, words, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=words) as caught:
        ray_cluster.check_address("cluster.num_env_workers=2")
    assert address in str(caught.value) and "unset it" in str(caught.value)


def test_an_env_whose_cluster_has_ended_asks_it_nothing():
    """Asking would start another cluster."""

    class Ended:
        is_initialized = staticmethod(lambda: False)

        def __getattr__(self, name):
            pytest.fail(f"'{name}' was used after the end")

    env = remote_tabletop(1, False, count=1)
    handle = env._workers[0].handle
    env._ray = env._workers[0].handle = Ended()
    assert env.request_stacks()(time.monotonic() + 60) == ""
    env.close()
    assert env._workers[0].handle is None
    ray.kill(handle)
