"""Demonstrations as a replay buffer, next to a slow one of lists; what the frozen policy says of them is kept on disk."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.data.stored import DatasetInfo, Outcomes, StoredDemonstrations
from rlinf.envs.config import EnvConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.base_weights import tensors_digest
from rlinf.models.embodiment.actor_policy import ActorPolicy, make_actor
from rlinf.models.embodiment.mlp_action_model import MLPConfig, MLPForRLActionPrediction
from rlinf.offpolicy import base_outputs
from rlinf.offpolicy.base_outputs import query_dataset
from rlinf.offpolicy.demonstrations import _out_of_reach, offline_data, read_episodes, replay_slots
from rlinf.offpolicy.replay import ReplayBuffer

GAMMA, CHUNK, LOW, HIGH = 0.9, 3, torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])


def dataset_of(episodes: list[dict], **outcomes) -> StoredDemonstrations:
    """Rows of episodes with ``rewards``, ``success`` (a row, or None) and ``terminated``; the state of a row is its number."""
    lengths = [len(one["rewards"]) for one in episodes]
    number, total = np.repeat(np.arange(len(lengths)), lengths), sum(lengths)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, size=(total, 2)).astype(np.float32)
    success, terminated = np.zeros((2, total), dtype=bool)
    for first, one in zip(np.cumsum(lengths) - lengths, episodes, strict=True):
        if one.get("success") is not None:
            success[first + one["success"]] = True
        terminated[first + len(one["rewards"]) - 1] = one.get("terminated", False)
    found = {
        "executed": actions + 0.1,
        "rewards": np.concatenate([one["rewards"] for one in episodes]).astype(np.float32),
        "success": success,
        "terminated": terminated,
    }
    info = DatasetInfo("folder", "a test", len(lengths), {}, {}, "state", 2)
    state = np.arange(total, dtype=np.float32)[:, None] / 10
    come = Outcomes(**{**found, **outcomes})
    return StoredDemonstrations(info, {}, state, actions, np.zeros(total, np.int64), ["go"], number, outcomes=come)


def policy_of(actor: str = "residual", scale: float = 0.25, seed: int = 0, **more) -> ActorPolicy:
    torch.manual_seed(seed)
    statistics = {"action": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0], "mask": [True, True]}}
    config = MLPConfig(state_dim=1, hidden_sizes=[8], norm_stats={"a": statistics})
    base = MLPForRLActionPrediction(config, action_dim=2, action_chunks_len=CHUNK)
    config = ActorConfig(name=actor, scale=scale, hidden_size=8, **more)
    policy = ActorPolicy(base, make_actor(config, base.feature_dim, base, None), LOW, HIGH).eval()
    policy.base_sha256 = tensors_digest(base.state_dict())
    return policy


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlinf" / "proposals"


def fill(
    dataset: StoredDemonstrations, policy: ActorPolicy, env=None, which="all", seed=3, precision="fp32", batch_size=4
):
    def ask(rows):
        settings = {
            "conditions": {"precision": precision}, "batch_size": batch_size, "autocast": nullcontext, "seed": seed,
        }  # fmt: skip
        return query_dataset(dataset, rows, policy, **settings)

    return offline_data(dataset, policy, env or EnvConfig(reward_mode="sparse"), which, seed, ask)


def slow(episode: dict, first: int, env: EnvConfig) -> list[tuple]:
    """Return (row, executed rows, discounted return, discount, row that the critic values) of each policy call of an episode."""
    rows, reached, ended = [], False, False
    for step, stored in enumerate(episode["rewards"]):
        now = episode.get("success") is not None and step >= episode["success"]
        reward = stored if env.reward_mode != "sparse" else env.success_bonus * (now and not reached)
        reached |= now
        rows.append((first + step, reward))
        ended = (reached and (env.terminate_on_success or env.reward_mode == "sparse")) or (
            step == len(episode["rewards"]) - 1 and episode.get("terminated", False)
        )
        if ended:
            break
    last = None if ended else rows.pop()[0]
    found = []
    while rows:
        call, rows = rows[:CHUNK], rows[CHUNK:]
        after = rows[0][0] if rows else last
        total = sum(GAMMA**k * reward for k, (_, reward) in enumerate(call))
        found.append(
            (call[0][0], tuple(row for row, _ in call), total, 0.0 if after is None else GAMMA ** len(call), after)
        )
    return found


one_episode = st.integers(1, 8).flatmap(
    lambda length: st.fixed_dictionaries(
        {
            "rewards": st.lists(st.integers(-2, 2), min_size=length, max_size=length),
            "success": st.one_of(st.none(), st.integers(0, length - 1)),
            "terminated": st.booleans(),
        }
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(one_episode, min_size=1, max_size=4), st.sampled_from(["sparse", "shaped"]), st.booleans())
def test_calls_are_those_of_lists_of_episodes(episodes, mode, ends):
    env = EnvConfig(reward_mode=mode, terminate_on_success=ends, success_bonus=2.0)
    slots = replay_slots(read_episodes(dataset_of(episodes), env), CHUNK)
    firsts = np.cumsum([0, *(len(one["rewards"]) for one in episodes)])
    wanted = [call for first, one in zip(firsts, episodes, strict=False) for call in slow(one, int(first), env)]
    found = []
    for k, row in enumerate(slots.rows):
        if slots.executed[k].any():
            length = int(slots.executed[k].sum())
            assert slots.executed[k, :length].all() and not slots.rewards[k, length:].any()
            total = float(sum(GAMMA**n * reward for n, reward in enumerate(slots.rewards[k, :length])))
            after = None if slots.terminated[k] else int(slots.rows[k + 1])
            discount = 0.0 if after is None else GAMMA**length
            found.append((int(row), tuple(range(row, row + length)), total, discount, after))
    assert [one[:2] + one[4:] for one in found] == [one[:2] + one[4:] for one in wanted]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in wanted], abs=1e-5)


PLAYED = [
    {"rewards": [0, 0, 0, 1], "success": 3},  # 3 and 1 env steps, then it is over
    {"rewards": [0, 0, 0, 0, 0]},  # cut: 3 and 1, and the critic values row 8
    {"rewards": [0, 0], "terminated": True},  # failed by the rules of the env
]


@pytest.mark.parametrize("actor", ["residual", "expo"])
def test_the_buffer_holds_what_the_frozen_policy_says_and_what_was_executed(actor):
    dataset, policy = dataset_of(PLAYED), policy_of(actor)
    data = fill(dataset, policy)
    replay, rows = data.replay, [0, 3, 4, 7, 8, 9]
    assert replay.num_transitions == 5 and data.num_queries == len(rows)
    assert replay.terminated[:, 0].tolist() == [False, True, False, False, False, True]
    assert replay.executed[:, 0].sum(1).tolist() == [3, 1, 3, 1, 0, 2]
    batch = replay.batch(replay.transitions(), GAMMA)
    assert batch.returns.tolist() == [0, 1, 0, 0, 0]
    assert batch.discounts.tolist() == pytest.approx([GAMMA**3, 0, GAMMA**3, GAMMA, 0])
    asked = policy.base.propose(policy.preprocess(dataset.rows(np.array(rows))[0]), 1)
    torch.testing.assert_close(replay.features[:, 0], asked.features)
    torch.testing.assert_close(replay.base[:, 0, :1], policy.normalize(asked.chunks))
    torch.testing.assert_close(batch.next_features[[0, 2, 3]], asked.features[[1, 3, 4]])
    middle, half = (HIGH + LOW) / 2, (HIGH - LOW) / 2
    done = torch.from_numpy(dataset.outcomes.executed)
    wanted = ((done - middle) / half).clamp(-1, 1)
    torch.testing.assert_close(replay.actions[0, 0], wanted[[0, 1, 2]].flatten())
    torch.testing.assert_close(
        replay.actions[1, 0], wanted[[3, 3, 3]].flatten()
    )  # past the end the last one is repeated
    assert not torch.allclose(replay.actions[0, 0], ((torch.from_numpy(dataset.actions)[:3] - middle) / half).flatten())
    again = fill(dataset, policy)
    first, second = (one.replay.sample(20, GAMMA) for one in (data, again))
    assert torch.equal(first.actions, second.actions) and data.digest == again.digest
    assert fill(dataset, policy, which="successes").digest != data.digest


def test_actions_beyond_the_reach_of_the_head_are_stored_as_they_are_and_counted():
    dataset = dataset_of(PLAYED)
    near, far, free = (
        fill(dataset, policy_of(*settings)) for settings in (("residual", 2.0), ("residual", 0.01), ("direct",))
    )
    assert near.out_of_reach == free.out_of_reach == 0 and far.out_of_reach == 1
    assert torch.equal(near.replay.actions, far.replay.actions)


def test_a_head_with_several_candidates_reaches_what_is_near_one_of_them():
    """By hand, two numbers of an action; no candidate lends another one its number."""
    policy = policy_of("expo", 0.1)
    base = torch.zeros(4, 2, 2 * CHUNK)
    base[:, 1] = 0.5
    actions = torch.zeros(4, 2 * CHUNK)
    actions[1] = 0.55  # near the second
    actions[2, 0] = 0.5  # one number near the second, the others near the first
    actions[3] = 0.3  # between both
    assert _out_of_reach(policy, base, actions) == 0.5
    assert _out_of_reach(policy_of("residual", 0.1), base[:, :1], actions) == 0.75, "control: the greedy chunk alone"


def test_which_episodes_count():
    dataset = dataset_of(PLAYED)
    assert fill(dataset, policy_of()).success_rate == pytest.approx(1 / 3)
    only = fill(dataset, policy_of(), which="successes")
    assert only.success_rate == 1 and only.replay.num_transitions == 2
    assumed = fill(dataset, policy_of(), which="assume_success")
    assert assumed.success_rate == 1 and assumed.replay.rewards.sum() == 3
    untold = dataset_of(PLAYED, success=None)  # the last reward tells
    assert fill(untold, policy_of()).success_rate == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="Set algorithm.offline_episodes=all"):
        fill(dataset_of(PLAYED[1:]), policy_of(), which="successes")
    with pytest.raises(ConfigError, match="no transition"):
        fill(dataset_of([{"rewards": [0]}]), policy_of())
    assert fill(dataset_of([{"rewards": [1], "success": 0}]), policy_of()).replay.sample(2, GAMMA).returns.tolist() == [
        1,
        1,
    ]


def test_the_frozen_policy_is_asked_once_and_again_only_where_its_answers_would_differ(cache, caplog, monkeypatch):
    asked, real = [], MLPForRLActionPrediction._propose

    def counted(self, inputs, uniforms):
        asked.append(len(inputs["state"]))
        return real(self, inputs, uniforms)

    monkeypatch.setattr(MLPForRLActionPrediction, "_propose", counted)
    dataset, edit = dataset_of(PLAYED), policy_of("expo")

    def answers(*args, **more):
        asked.clear()
        return fill(*args, **more), sum(asked)

    first, count = answers(dataset, edit)
    assert count == 6 and len(list(cache.iterdir())) == 1
    second, count = answers(dataset, edit)
    assert count == 0 and second.num_queries == 0
    for name, tensor in first.replay.tensors.items():
        assert torch.equal(tensor, second.replay.tensors[name]), name
    assert answers(dataset, edit, env=EnvConfig(reward_mode="shaped"))[1] == 0  # rewards are not the policy's
    for more in ({"seed": 4}, {"precision": "bf16-mixed"}, {"batch_size": 2}, {"which": "successes"}):
        assert answers(dataset, edit, **more)[1] > 0, more
    assert answers(dataset, policy_of("expo", seed=1))[1] == 6  # other weights
    assert answers(dataset, policy_of("expo", num_candidates=2))[1] == 6
    assert answers(dataset, policy_of("residual"))[1] == 6 and answers(dataset, policy_of("direct"))[1] == 0
    assert answers(dataset_of(PLAYED[:2]), edit)[1] == 5
    others = dataset_of(PLAYED)
    others.state = others.state + 1
    assert answers(others, edit)[1] == 6
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    third, count = answers(dataset, edit)
    assert count == 6 and "cannot be read" in caplog.text and torch.equal(third.replay.base, first.replay.base)

    def full(_, path):
        path.write_bytes(b"the first part")
        raise OSError(28, "No space left")

    kept = set(cache.iterdir())
    monkeypatch.setattr(base_outputs, "save_file", full)
    assert answers(dataset, edit, seed=9)[1] == 6 and "cannot be cached" in caplog.text
    assert set(cache.iterdir()) == kept, "no part of a file stays"


def filled(num_slots: int, num_envs: int, num_steps: int, offset: float = 0.0) -> ReplayBuffer:
    """Episodes of 4 steps in each env, the last observation of every other one cut."""
    replay = ReplayBuffer(
        num_slots * num_envs, num_envs, feature_dim=1, num_candidates=1, output_dim=1, chunk_len=1, seed=0
    )  # fmt: skip
    envs, count = torch.arange(num_envs), offset
    for step in range(num_steps):
        replay.observe(envs, count + 100.0 * envs[:, None], torch.zeros(num_envs, 1, 1))
        over, cut = step % 8 == 3, step % 8 == 7
        if not cut:
            ones = torch.ones(num_envs, 1)
            replay.act(envs, count * ones, count * ones, ones.bool(), torch.full((num_envs,), over))
        count += 1.0
    return replay


def transitions(replay: ReplayBuffer) -> list[tuple]:
    batch = replay.batch(replay.transitions(), GAMMA)
    after = torch.where(batch.discounts > 0, batch.next_features[:, 0], 0.0)
    columns = (batch.features[:, 0], batch.actions[:, 0], batch.returns, batch.discounts, after)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(("num_slots", "num_envs"), [(30, 2), (40, 1), (20, 4)])
@pytest.mark.parametrize("num_steps", [13, 27])  # the second has gone round
def test_a_buffer_of_any_size_takes_over_another_one(num_slots, num_envs, num_steps):
    source = filled(20, 2, num_steps)
    wanted = transitions(source)
    replay = filled(num_slots, num_envs, 0)
    replay.take_over(source.state_dict())
    assert transitions(replay) == wanted and len(wanted) > 5
    # What follows is another episode, not what the newest action led to.
    replay.observe(torch.arange(num_envs), torch.full((num_envs, 1), 1000.0), torch.zeros(num_envs, 1, 1))
    assert transitions(replay) == wanted


def test_a_buffer_of_other_numbers_is_not_taken_over():
    source = filled(20, 2, 13)
    for name in ("features", "base", "actions", "executed"):
        state = source.state_dict()
        state[name] = state[name].expand(*state[name].shape[:-1], 3)
        replay = filled(30, 2, 0)
        with pytest.raises(CheckpointError, match=f"'{name}' has the shape .* in the checkpoint's replay buffer"):
            replay.take_over(state)
        assert not replay.counts.any()


def test_a_smaller_buffer_takes_over_the_newest():
    source = filled(20, 2, 27)
    replay = filled(5, 2, 0)
    replay.take_over(source.state_dict())
    wanted = [one for one in transitions(source) if one[0] % 100 >= 22]
    assert transitions(replay) == wanted and len(wanted) == 2 * 3


def test_episodes_with_a_row_that_has_no_image_are_left_out():
    dataset = dataset_of([{"rewards": [0.0] * 3}, {"rewards": [0.0] * 2}, {"rewards": [0.0] * 4}])
    dataset.unreadable[4] = True
    assert [episode.first for episode in read_episodes(dataset, EnvConfig(reward_mode="sparse"))] == [0, 5]
