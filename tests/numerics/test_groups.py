"""Algorithms that compare the episodes of a group, on rollouts small enough for a hand calculation."""

import pytest
import torch
from rollout_batches import rollout_batch

from rlinf.algorithms.config import GRPOConfig, ReinforcePPConfig, RLOOConfig
from rlinf.algorithms.groups import GRPO, RLOO, check_groups, check_one_episode, known_episodes
from rlinf.algorithms.reinforce_pp import ReinforcePP
from rlinf.types import EpisodeSpec

LOST = 100
"""Added to the id of an episode that restarts because its simulator was lost."""


def rollout(rewards, groups, ends=None, lost=(), num_actions=2, width=2):
    """Make a time-major rollout whose calls earn ``rewards [T][B]``, all with their first action.

    Args:
        rewards: By call and env.
        groups: Group of each env.
        ends: Last call of each env's episode; None: the last one.
        lost: Envs whose simulator is lost after the first call: that call is void, and a new episode starts.
        num_actions: Of a call; the last one is never executed, where there are several.
        width: Tokens of an action.
    """
    paid = torch.tensor(rewards, dtype=torch.float32)
    shape = num_calls, num_envs = paid.shape
    calls = torch.arange(num_calls)[:, None].expand(shape)
    ends = torch.tensor([num_calls - 1] * num_envs if ends is None else ends)
    was_lost = torch.tensor([env in lost for env in range(num_envs)])
    valid = (calls <= ends) & ~(was_lost & (calls == 0))
    executed = valid.unsqueeze(-1).repeat(1, 1, num_actions)
    if num_actions > 1:
        executed[..., -1] = False
    return rollout_batch(
        *shape,
        num_actions=num_actions,
        width=width,
        action_rewards=torch.nn.functional.pad(paid.unsqueeze(-1), (0, num_actions - 1)),
        action_mask=executed,
        loss_mask=valid,
        terminated=calls == ends,
        group_ids=torch.tensor(groups).expand(shape),
        episode_ids=torch.arange(num_envs) + LOST * (was_lost & (calls > 0)),
        old_logprobs=torch.zeros(*shape, num_actions * width),
        specs={i + more: EpisodeSpec("t", 0, group, 0) for i, group in enumerate(groups) for more in (0, LOST)},
    )


# Returns 3 and 1; 2 and 2; 4, lost and 0. The second env of the first group ends after one call, and what follows pays nothing.
REWARDS = [[1.0, 1.0, 2.0, 0.0, 4.0, 9.0, 0.0], [2.0, 50.0, 0.0, 2.0, 0.0, 7.0, 0.0]]
GROUPS = [5, 5, 2, 2, 8, 8, 8]
ENDS = [1, 0, 1, 1, 1, 1, 1]
MIXED = {"rewards": REWARDS, "groups": GROUPS, "ends": ENDS, "lost": (5,)}


def test_known_episodes_begin_with_the_rollout():
    assert known_episodes(rollout(**MIXED)).tolist() == [True] * 5 + [False, True]
    never_begun = rollout(**MIXED)
    never_begun.loss_mask[0, 0] = False
    assert known_episodes(never_begun).tolist() == [False] + [True] * 4 + [False, True]
    followed = rollout(**MIXED)  # by another episode, as with auto-reset
    followed.episode_ids[1, 2] = 77
    assert known_episodes(followed).tolist() == [True, True, False, True, True, False, True]


def test_advantages_of_a_group_leave_out_the_lost_episode():
    """Leave-one-out: 3 - 1, 1 - 3; 2 - 2; 4 - 0, 0 - 4. Of six known episodes two are in a group of equal returns."""
    batch = rollout(**MIXED)
    metrics = RLOO(RLOOConfig()).compute_advantages(batch)
    expected = torch.tensor([2.0, -2.0, 0.0, 0.0, 4.0, 0.0, -4.0])
    assert torch.equal(batch.advantages, expected[None, :, None].expand(2, 7, 2))
    assert torch.equal(batch.returns[:, :5], torch.tensor([3.0, 1.0, 2.0, 2.0, 4.0]).expand(2, 5))
    assert batch.loss_mask.tolist() == [
        [True, True, False, False, True, False, True],
        [True, False, False, False, True, False, True],
    ]
    assert metrics == {
        "rollout/zero_variance_group_fraction": pytest.approx(2 / 6),
        "train/return_mean": pytest.approx((3 + 1 + 2 + 2 + 4 + 0) / 6),
    }


def test_advantages_and_returns_can_be_written_one_at_a_time():
    """Each call and each action has a number of its own, which it shares with no other."""
    batch = rollout(**MIXED)
    RLOO(RLOOConfig()).compute_advantages(batch)
    for name in ("advantages", "returns"):
        numbers = getattr(batch, name)
        before = numbers.clone()
        numbers[0, 0] = 99.0
        assert (numbers != before)[1:].sum() == 0 and (numbers != before)[0, 1:].sum() == 0, name
    batch.advantages[0, 0, 1] = -99.0
    assert batch.advantages[0, 0].tolist() == [99.0, -99.0]


def test_group_relative_advantages_with_and_without_the_deviation():
    scaled, plain = rollout(**MIXED), rollout(**MIXED)
    GRPO(GRPOConfig()).compute_advantages(scaled)
    GRPO(GRPOConfig(scale_by_std=False)).compute_advantages(plain)
    torch.testing.assert_close(scaled.advantages[0, :, 0], torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, 0.0, -1.0]))
    assert plain.advantages[0, :, 0].tolist() == [1.0, -1.0, 0.0, 0.0, 2.0, 0.0, -2.0]


def test_groups_of_equal_returns_stay_where_the_setting_says_so():
    batch = rollout(**MIXED)
    RLOO(RLOOConfig(drop_zero_variance_groups=False)).compute_advantages(batch)
    assert batch.loss_mask.tolist() == [
        [True, True, True, True, True, False, True],
        [True, False, True, True, True, False, True],
    ]


def test_normalisation_counts_executed_actions_of_valid_calls():
    """2 twice, -2 once, 4 and -4 twice each: mean 2/7; of the two actions of a call only the first was executed."""
    batch = rollout(**MIXED)
    RLOO(RLOOConfig(normalize_advantages=True)).compute_advantages(batch)
    kept = torch.tensor([2.0, 2.0, -2.0, 4.0, 4.0, -4.0, -4.0])
    std = ((kept - 2 / 7) ** 2).mean().sqrt()
    expected = (torch.tensor([2.0, -2.0, 0.0, 0.0, 4.0, 0.0, -4.0]).expand(2, 7) - 2 / 7) / std
    torch.testing.assert_close(batch.advantages[..., 0], expected * batch.loss_mask)
    assert not batch.advantages[..., 1].any()


def test_envs_of_groups_without_a_difference_are_uninformative():
    """The second group has equal returns; of the fourth all but one episode is lost; the third still compares two."""
    batch = rollout(
        [[*REWARDS[0], 1.0, 6.0], [*REWARDS[1], 0.0, 6.0]], [*GROUPS, 1, 1], [*ENDS, 1, 1], lost=(5, 8)
    )  # fmt: skip
    uninformative = RLOO(RLOOConfig()).uninformative_envs(batch)
    assert uninformative.tolist() == [False, False, True, True, False, False, False, True, True]


def test_a_lost_episode_does_not_make_equal_returns_differ():
    batch = rollout([[1.0, 1.0, 9.0], [0.0, 0.0, 9.0]], [0, 0, 0], lost=(2,))
    assert RLOO(RLOOConfig()).uninformative_envs(batch).tolist() == [True] * 3


def test_a_rollout_of_one_call_by_hand():
    batch = rollout([[1.0, 5.0, 2.0, 2.0]], [0, 0, 1, 1])
    algorithm = RLOO(RLOOConfig())
    assert known_episodes(batch).all()
    assert algorithm.uninformative_envs(batch).tolist() == [False, False, True, True]
    assert algorithm.compute_advantages(batch)["train/return_mean"] == 2.5
    assert batch.advantages[..., 0].tolist() == [[-4.0, 4.0, 0.0, 0.0]]


def test_one_known_episode_has_a_return_but_no_advantage():
    batch = rollout([[1.0, 4.0], [2.0, 4.0]], [0, 0], lost=(1,))
    metrics = RLOO(RLOOConfig()).compute_advantages(batch)
    assert metrics == {"rollout/zero_variance_group_fraction": 1.0, "train/return_mean": 3.0}
    assert not batch.advantages.any() and not batch.loss_mask.any()


@pytest.mark.parametrize(
    "algorithm", [GRPO(GRPOConfig(normalize_advantages=True)), RLOO(RLOOConfig()), ReinforcePP(ReinforcePPConfig())]
)
def test_a_rollout_whose_episodes_are_all_lost_teaches_nothing(algorithm):
    batch = rollout([[1.0, 4.0], [2.0, 4.0]], [0, 0], lost=(0, 1))
    metrics = algorithm.compute_advantages(batch)
    assert metrics and set(metrics.values()) == {0.0}
    assert not batch.advantages.any() and not batch.loss_mask.any()


def test_resampling_is_as_often_as_configured_and_groups_are_asked_for():
    for algorithm in (GRPO(GRPOConfig(max_resamples=3)), RLOO(RLOOConfig(max_resamples=3))):
        assert algorithm.max_resamples == 3
        assert algorithm.needs_groups and algorithm.needs_full_episodes
        assert not algorithm.needs_values and not algorithm.penalizes_rewards


def test_episodes_that_change_inside_a_column_are_refused():
    batch = rollout(**MIXED)
    check_one_episode(batch)  # the lost episode's void call does not count
    batch.episode_ids = batch.episode_ids.clone()
    batch.episode_ids[1, 1] = 77
    check_one_episode(batch)  # nor does a call after the end
    batch.episode_ids[1, 2] = 77
    for reject in (check_one_episode, check_groups, RLOO(RLOOConfig()).compute_advantages):
        with pytest.raises(ValueError, match="rollout.auto_reset=false"):
            reject(batch)
    with pytest.raises(ValueError, match="rollout.auto_reset=false"):
        ReinforcePP(ReinforcePPConfig()).compute_advantages(batch)


def test_a_group_of_several_initial_states_is_refused():
    batch = rollout([[1.0, 5.0, 2.0, 2.0]], [0, 0, 1, 1])
    check_groups(batch)
    batch.specs[3] = EpisodeSpec("t", 0, 9, 0)
    for reject in (check_groups, GRPO(GRPOConfig()).compute_advantages):
        with pytest.raises(ValueError, match=r"Group 1 mixes episodes with .*init_state_id=1.* and .*init_state_id=9"):
            reject(batch)


@pytest.mark.parametrize("groups", [[0, 0, 1], [0, 1, 1], [0, 1, 2]])
def test_a_group_of_one_episode_is_refused(groups):
    with pytest.raises(ValueError, match="rollout.group_size=2"):
        check_groups(rollout([[1.0, 5.0, 2.0]], groups))
    check_groups(rollout([[1.0, 5.0, 2.0]], [4, 4, 4]))
    check_groups(rollout([[1.0, 5.0, 2.0, 7.0]], [0, 1, 0, 1]))


def test_reinforce_pp_leaves_the_lost_episode_out():
    """Returns-to-go of the valid calls: 3 and 2; 1; 2 and 0; 2 and 2; 4 and 0; 0 and 0."""
    batch = rollout(**MIXED)
    metrics = ReinforcePP(ReinforcePPConfig(normalize_advantages=False)).compute_advantages(batch)
    returns = torch.tensor([[3.0, 1.0, 2.0, 2.0, 4.0, 0.0, 0.0], [2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]])
    assert torch.equal(batch.returns, returns)
    assert torch.equal(batch.advantages, returns.unsqueeze(-1).expand(2, 7, 2))
    assert batch.loss_mask.tolist() == [[True] * 5 + [False, True], [True, False, True, True, True, False, True]]
    assert metrics == {"train/advantage_mean": pytest.approx(16 / 11), "train/return_mean": pytest.approx(16 / 11)}


def test_reinforce_pp_averages_over_one_call_too():
    """A single call. First one of its two actions is executed; then two of its three, each with its own advantage."""
    algorithm = ReinforcePP(ReinforcePPConfig(normalize_advantages=False, advantage_level="action"))
    assert algorithm.compute_advantages(rollout([[3.0]], [0])) == {
        "train/advantage_mean": 3.0,
        "train/return_mean": 3.0,
    }
    batch = rollout([[3.0]], [0], num_actions=3)
    assert algorithm.compute_advantages(batch) == {"train/advantage_mean": 1.5, "train/return_mean": 3.0}
    assert batch.advantages.tolist() == [[[3.0, 0.0, 0.0]]]


def test_reinforce_pp_sums_the_penalty_of_the_tokens_of_executed_actions():
    """0.5 times the log-ratios 0.1 + 0.3 of the first action; the second one was not executed."""
    batch = rollout([[3.0, 1.0]], [0, 1], ends=[0, 0])
    batch.ref_logprobs = torch.tensor([[[-0.1, -0.3, -5.0, -7.0], [0.2, 0.4, -5.0, -7.0]]])
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0.5, normalize_advantages=False))
    algorithm.compute_advantages(batch)
    torch.testing.assert_close(batch.returns, torch.tensor([[3 - 0.5 * 0.4, 1 + 0.5 * 0.6]]))
    assert algorithm.penalizes_rewards and algorithm.needs_full_episodes and not algorithm.needs_groups
