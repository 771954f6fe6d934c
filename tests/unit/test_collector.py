"""Rollouts: which episodes are played, what is recorded, and what stands behind the last step of an episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import make_env
from rlinf.models import build_policy
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.sampler import EpisodeSampler
from rlinf.training.trainer import replace_envs
from rlinf.types import EpisodeSpec

NUM_ENVS, NUM_CHUNKS, HORIZON = 6, 11, 5
OVERRIDES = ["model=mlp", "env.tasks=[reach,reach_zone]", "env.cameras=[]", f"env.max_episode_steps={HORIZON}"]


@pytest.fixture(scope="module")
def parts():
    config = build_config(compose_config(OVERRIDES))
    env = make_env(config.env, 1, auto_reset=False)
    torch.manual_seed(0)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}}).eval()
    yield config, env, model
    env.close()


def collect(parts, *, auto_reset=True, group_size=1, num_lanes=2, attempt=0, **kwargs):
    config, env, model = parts
    sampler = EpisodeSampler(
        env.episode_specs("train"), 2, num_groups=NUM_ENVS // group_size, group_size=group_size, seed=3
    )
    collector = RolloutCollector(
        lambda count: make_env(config.env, count, auto_reset=auto_reset), sampler, num_envs=NUM_ENVS,
        num_chunks=NUM_CHUNKS, temperature=1.0, num_lanes=num_lanes, **kwargs,
    )  # fmt: skip
    try:
        return collector.collect(model, 7, 42, needs_values=True, attempt=attempt)
    finally:
        collector.close()


def value_after(parts, batch, t, b) -> float:
    """Value of what follows step ``t`` of env ``b``, by replaying its episode alone from its spec."""
    config, env, model = parts
    episode = batch.episode_ids[t, b]
    steps = [s for s in range(t + 1) if batch.episode_ids[s, b] == episode]
    observation, _ = env.reset(options={"episodes": [batch.specs[int(episode)]]})
    for s in steps:
        action = model.decode_actions(batch.action_tokens[s, b][None])
        result = env.chunk_step(action.numpy())
        observation = result.observation
    return float(model.predict_action_batch(do_sample=False, **model.preprocess(observation)).values)


def test_bootstrap_values_are_those_of_the_true_final_observation(parts):
    batch = collect(parts)
    assert batch.truncated.sum() >= NUM_ENVS
    checked, differences = 0, []
    for t in range(NUM_CHUNKS):
        for b in range(NUM_ENVS):
            runs_on = t == NUM_CHUNKS - 1 and not batch.terminated[t, b]
            if batch.truncated[t, b] or runs_on:
                assert batch.bootstrap_values[t, b].item() == pytest.approx(value_after(parts, batch, t, b), abs=1e-5)
                checked += 1
                if batch.truncated[t, b] and t + 1 < NUM_CHUNKS:  # control: the next row shows the next episode
                    _, _, model = parts
                    row = batch.observation.select([(t + 1) * NUM_ENVS + b])
                    other = float(model.predict_action_batch(do_sample=False, **model.preprocess(row)).values)
                    differences.append(abs(other - batch.bootstrap_values[t, b].item()))
            else:
                assert batch.bootstrap_values[t, b] == 0
    assert checked >= 2 * NUM_ENVS and max(differences) > 1e-3


def test_what_is_recorded_is_what_was_seen(parts):
    """Scoring the recorded observations gives the recorded log-probabilities; shifted by one step it does not."""
    _, _, model = parts
    batch = collect(parts)
    tokens = batch.action_tokens.flatten(0, 1)
    with torch.no_grad():
        scored = model.evaluate_actions(model.preprocess(batch.observation), tokens).logprobs
    recorded = batch.rollout_logprobs.flatten(0, 1)
    torch.testing.assert_close(scored, recorded, atol=1e-5, rtol=1e-5)
    assert (scored.roll(NUM_ENVS, 0) - recorded).abs().max() > 0.01
    assert (batch.policy_version == 42).all()


def test_groups_share_their_episode_and_groups_differ(parts):
    batch = collect(parts, auto_reset=False, group_size=3)
    for group in batch.group_ids[0].unique():
        columns = torch.nonzero(batch.group_ids[0] == group).flatten()
        specs = {batch.specs[int(i)] for i in batch.episode_ids[0, columns]}
        assert len(columns) == 3 and len(specs) == 1
    assert len({batch.specs[int(i)] for i in batch.episode_ids[0]}) == 2
    assert (batch.group_ids == batch.group_ids[0]).all()


def test_frozen_rows_are_not_valid(parts):
    batch = collect(parts, auto_reset=False)
    assert batch.loss_mask.sum(0).tolist() == [HORIZON] * NUM_ENVS
    assert not batch.action_mask[HORIZON:].any() and (batch.rewards[HORIZON:] == 0).all()
    assert len(batch.episodes) == NUM_ENVS


@pytest.mark.parametrize("change", [{"num_lanes": 1}, {"num_lanes": 3}, {"offload_envs": True}])
def test_rollouts_do_not_depend_on_lanes_or_offloading(parts, change):
    batch, other = collect(parts), collect(parts, **change)
    np.testing.assert_allclose(other.observation.state, batch.observation.state, atol=1e-5)
    assert other.observation.instruction == batch.observation.instruction
    for name, tensor in batch.tensors().items():
        torch.testing.assert_close(other.tensors()[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_a_second_attempt_plays_other_episodes_and_replaces_whole_groups(parts):
    first = collect(parts, auto_reset=False, group_size=2)
    more = collect(parts, auto_reset=False, group_size=2, attempt=1)
    assert not set(first.group_ids[0].tolist()) & set(more.group_ids[0].tolist())
    unwanted = torch.tensor([False, False, True, True, False, False])
    useless = torch.tensor([True, True, False, False, False, False])
    mixed = replace_envs(first, unwanted, more, useless)
    expected = first.group_ids[0, [0, 1, 4, 5]].tolist() + more.group_ids[0, 2:4].tolist()
    assert mixed.group_ids[0].tolist() == expected
    states = mixed.observation.state.reshape(NUM_CHUNKS, NUM_ENVS, -1)
    np.testing.assert_array_equal(states[:, 4], more.observation.state.reshape(NUM_CHUNKS, NUM_ENVS, -1)[:, 2])
    # Where the new rollout has nothing better, the old groups stay, and none is lost or doubled.
    same = replace_envs(first, unwanted, more, torch.ones(NUM_ENVS, dtype=torch.bool))
    assert sorted(same.group_ids[0].tolist()) == sorted(first.group_ids[0].tolist())
    np.testing.assert_array_equal(states[:, 2], first.observation.state.reshape(NUM_CHUNKS, NUM_ENVS, -1)[:, 4])


SPECS = [EpisodeSpec("s", i % 2, i // 2, 0) for i in range(20)]


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
