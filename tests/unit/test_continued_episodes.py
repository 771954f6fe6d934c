"""`rollout.continue_episodes`: an episode that runs at the end of a rollout continues in the next one."""

import numpy as np
import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import make_env
from rlinf.envs.episodes import EpisodeSampler
from rlinf.models import build_policy
from rlinf.rollout.collector import RolloutCollector

NUM_ENVS, NUM_CHUNKS, HORIZON = 6, 11, 5
OVERRIDES = ["model=mlp", "env.tasks=[reach,reach_zone]", "env.cameras=[]", f"env.max_episode_steps={HORIZON}"]


@pytest.fixture(scope="module")
def parts():
    config = build_config(compose_config(OVERRIDES))
    env = make_env(config.env, 1, auto_reset=False)
    torch.manual_seed(0)
    yield config, env, build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}}).eval()
    env.close()


def two_rollouts(parts, continue_episodes, **kwargs):
    config, env, model = parts
    sampler = EpisodeSampler(env.episode_specs("train"), 2, num_groups=NUM_ENVS, seed=3)
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=True), sampler, num_envs=NUM_ENVS, num_chunks=NUM_CHUNKS,
        temperature=1.0, continue_episodes=continue_episodes, **kwargs,
    )  # fmt: skip
    try:
        return [collector.collect(model, step, 0, needs_values=True) for step in (7, 8)]
    finally:
        collector.close()


@pytest.mark.parametrize("num_worker_threads", [1, 2])
def test_an_episode_goes_on_in_the_next_rollout(parts, num_worker_threads):
    """Episodes that run over the end of a rollout, replayed from their specs with the actions of both."""
    _, env, model = parts
    first, second = two_rollouts(parts, True, num_worker_threads=num_worker_threads)
    ended = first.terminated[-1] | first.truncated[-1]
    assert 0 < (~ended).sum() and NUM_CHUNKS % HORIZON
    for b in (~ended).nonzero().flatten().tolist():
        before = (first.episode_ids[:, b] == first.episode_ids[-1, b]).nonzero().flatten()
        after = (second.episode_ids[:, b] == second.episode_ids[0, b]).nonzero().flatten()
        spec = first.specs[int(first.episode_ids[-1, b])]
        assert second.specs[int(second.episode_ids[0, b])] == spec
        env.reset(options={"episodes": [spec]})
        for t in before:
            chunk = env.chunk_step(model.decode_actions(first.action_tokens[t, b][None]).numpy())
        np.testing.assert_allclose(second.observation.state[b], chunk.observation.state[0], atol=1e-6)
        for t in after:
            chunk = env.chunk_step(model.decode_actions(second.action_tokens[t, b][None]).numpy())
        assert [bool(chunk.terminated[0]), bool(chunk.truncated[0])] == [
            bool(each[after[-1], b]) for each in (second.terminated, second.truncated)
        ]
        assert len(before) + len(after) <= HORIZON
        whole = next(one for row, one in second.episodes if row == b)
        assert (whole.spec, whole.num_env_steps) == (spec, len(before) + len(after))
    values = model.predict_values(**model.preprocess(second.observation.select(range(NUM_ENVS))))
    torch.testing.assert_close(first.bootstrap_values[-1][~ended], values[~ended].detach())
    fresh = two_rollouts(parts, False)[1]  # control: each rollout starts with episodes of its own
    assert all(
        fresh.specs[int(fresh.episode_ids[0, b])] != first.specs[int(first.episode_ids[-1, b])] for b in range(NUM_ENVS)
    )
