"""Which episodes a run plays, and what its rollouts and evaluations take of the machine."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from rlinf.cluster.rollouts import make_collector
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs.config import EnvConfig, default_num_worker_threads
from rlinf.envs.episodes import EpisodeSampler
from rlinf.errors import RLinfError
from rlinf.training.evaluator import Evaluator
from rlinf.training.stop_signal import StopRequested, StopSignal
from rlinf.types import EpisodeSpec

FIXTURES = str(Path(__file__).parents[1] / "fixtures")
if FIXTURES not in sys.path:
    sys.path.append(FIXTURES)  # workers import from the same path

from walk_env import WalkConfig, WalkVectorEnv, register  # noqa: E402
from wanderer import Wanderer  # noqa: E402

SPECS = [EpisodeSpec("s", i % 2, i // 2, 0) for i in range(20)]


@pytest.fixture(autouse=True, scope="module")
def walk_is_registered(plugins_of_other_files_are_gone):
    register()


def test_ordered_init_states_visit_every_episode_once_per_lap():
    sampler = EpisodeSampler(SPECS, 2, num_groups=5, seed=0, init_states="ordered")
    played = [sampler.spec(step, env, 0) for step in range(4) for env in range(5)]
    assert played == SPECS
    assert sampler.spec(4, 0, 0) == SPECS[0]


def test_fixed_init_states_repeat_in_every_iteration():
    sampler = EpisodeSampler(SPECS, 2, num_groups=5, seed=0, init_states="fixed")
    assert [sampler.spec(3, env, 0) for env in range(5)] == SPECS[:5]
    assert sampler.spec(9, 2, 1) == SPECS[7]


def test_random_init_states_balance_tasks_and_depend_on_the_seed():
    sampler = EpisodeSampler(SPECS, 2, num_groups=6, seed=0)
    played = [sampler.spec(step, env, 0) for step in range(50) for env in range(6)]
    assert sum(spec.task_id for spec in played) == len(played) / 2
    assert len(set(played)) == len(SPECS)
    other = EpisodeSampler(SPECS, 2, num_groups=6, seed=1)
    assert played != [other.spec(step, env, 0) for step in range(50) for env in range(6)]


def test_in_a_training_run_threads_and_ranks_share_the_cores_and_no_worker_outlives_an_evaluation(
    monkeypatch, tmp_path
):
    config = replace(build_config(compose_config(["model=mlp"])), env=WalkConfig(max_episode_steps=2))
    config.rollout.num_envs, config.rollout.pipeline_stages, config.rollout.group_size = 64, 2, 1
    config.evaluation.num_episodes, config.evaluation.greedy = 2, False
    config.output_dir = str(tmp_path)
    monkeypatch.setattr("rlinf.envs.config.num_cores", lambda: 12)
    for name in ("world_size", "local_world_size"):
        monkeypatch.setattr(f"rlinf.cluster.rollouts.{name}", lambda: 2)
    env = WalkVectorEnv(replace(config.env, num_processes=1), 2, False)
    collector = make_collector(config, env, nn.Identity(), nullcontext)
    for thread in collector.worker_threads:
        thread.env.reset()
        assert len(thread.env.worker_processes()) == 12 // 2 // 2
    collector.close()
    env.reset()
    assert len(env.worker_processes()) == 1
    evaluator = Evaluator(config, env, StopSignal(announce=False), nullcontext)
    assert evaluator.run(Wanderer(), "step_000001").episodes == 2
    assert not env.worker_processes()

    def stopped(*_, **__):
        raise StopRequested

    monkeypatch.setattr("rlinf.training.evaluator.record_episodes", stopped)
    config.evaluation.record_episodes = 1
    config.evaluation.num_videos_per_task = 0
    result = evaluator.run(Wanderer(), "after_rl")
    evaluator.record(Wanderer(), "after_rl", result)
    assert result.episodes == 2, "a signal during the recording leaves the result"
    monkeypatch.setattr("rlinf.training.evaluator.record_episodes", lambda *_, **__: 1 / 0)
    with pytest.raises(RLinfError, match=r"its result is saved.*evaluation\.record_episodes=0"):
        evaluator.record(Wanderer(), "after_rl", result)
    evaluator.record(Wanderer(), "step_000001", result)
    env.close()


@pytest.mark.parametrize(
    "env, num_envs, num_worker_threads",
    [
        (EnvConfig(cameras=["front"]), 8, 2), (EnvConfig(cameras=["front"]), 1, 1), (EnvConfig(cameras=[]), 8, 1),
        (WalkConfig(cameras=[], num_processes=0), 8, 1), (WalkConfig(cameras=[], num_processes=1), 8, 2),
        (WalkConfig(cameras=[], num_processes=None), 8, 2),
    ],
)  # fmt: skip
def test_one_thread_where_a_step_costs_less_than_a_thread(env, num_envs, num_worker_threads):
    assert default_num_worker_threads(env, num_envs) == num_worker_threads


def test_a_simulation_on_the_gpu_is_not_split_into_threads(monkeypatch):
    config = replace(build_config(compose_config(["model=mlp"])), env=WalkConfig(num_processes=0))
    config.rollout.num_envs, config.rollout.pipeline_stages = 8, 2
    env = WalkVectorEnv(config.env, 1, False)
    for on_gpu, widths in ((True, [8]), (False, [4, 4])):
        monkeypatch.setattr(WalkVectorEnv, "on_gpu", on_gpu)
        collector = make_collector(config, env, nn.Identity(), nullcontext)
        assert [thread.env.num_envs for thread in collector.worker_threads] == widths
        collector.close()
    env.close()
