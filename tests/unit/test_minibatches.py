"""The rows of each minibatch: dealt from all env groups, and known without asking the other ranks more than once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.distributed.process_group import rank_range
from rlinf.training import train_worker
from rlinf.training.train_worker import MinibatchPlan


def plans(monkeypatch, valid: torch.Tensor, num_env_groups: int, num_ranks: int, size: int, seed: int = 3):
    """Return the plan of each rank over the envs ``valid [T, B]``; what ranks tell each other is put in by hand."""
    counts = torch.tensor([int(part.sum()) for part in valid.tensor_split(num_env_groups, 1)])
    monkeypatch.setattr(train_worker, "gather_env_groups", lambda env_groups: counts)
    shares = valid.tensor_split(num_ranks, 1)
    return [
        MinibatchPlan(shares[rank], rank_range(num_env_groups, rank, num_ranks), size, seed)
        for rank in range(num_ranks)
    ]


def places(rows: torch.Tensor, rank: int, share: int) -> list[tuple[int, int]]:
    """Return (call, env) of flattened rows."""
    return [(row // share, row % share + rank * share) for row in rows.tolist()]


@given(
    st.sampled_from([(1, 1, 1), (2, 1, 2), (4, 2, 2), (6, 1, 3), (4, 3, 4), (8, 1, 4)]), st.integers(1, 7), st.integers(1, 20),
    st.integers(0, 10**6),
)  # fmt: skip
def test_the_rows_of_all_ranks_are_dealt_evenly(shape, num_chunks, size, seed):
    num_env_groups, group, num_ranks = shape
    num_envs = num_env_groups * group
    valid = torch.rand(num_chunks, num_envs, generator=torch.Generator().manual_seed(seed)) < 0.7
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = plans(monkeypatch, valid, num_env_groups, num_ranks, size)
        (alone,) = plans(monkeypatch, valid, num_env_groups, 1, size)
    count, share = int(valid.sum()), num_envs // num_ranks
    assert all(plan.num_rows == count and plan.num_minibatches == -(-count // size) for plan in ranks)
    for epoch in range(2):
        dealt = [list(plan.epoch(epoch)) for plan in ranks]
        whole = [places(each.rows, 0, num_envs) for each in alone.epoch(epoch)]
        joined = [
            [place for rank, each in enumerate(shares) for place in places(each.rows, rank, share)]
            for shares in zip(*dealt, strict=True)
        ]
        assert joined == whole
        assert sorted(sum(whole, [])) == [tuple(place) for place in valid.nonzero().tolist()]
        sizes = [len(rows) for rows in whole]
        assert len(sizes) == -(-count // size) and max(sizes, default=0) <= size
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        for env_group in range(num_env_groups):
            taken = [sum(env // group == env_group for _, env in rows) for rows in whole]
            assert max(taken, default=0) - min(taken, default=0) <= 1, "each takes its fraction of every env group"
        for shares in zip(*dealt, strict=True):
            assert {each.max_rows for each in shares} == {max(len(each.rows) for each in shares)}


def test_one_row_of_each_block_is_not_all_in_the_first_minibatch(monkeypatch):
    (plan,) = plans(monkeypatch, torch.ones(1, 6, dtype=torch.bool), 6, 1, 2)
    assert [sorted(each.rows.tolist()) for each in plan.epoch(0)] == [[0, 3], [1, 4], [2, 5]]


def test_the_order_depends_on_seed_epoch_and_block(monkeypatch):
    def order(seed=3, epoch=0, env_groups=(0, 1)):
        valid = torch.ones(50, 2, dtype=torch.bool)
        (plan,) = plans(monkeypatch, valid, 2, 1, 100, seed)
        (only,) = plan.epoch(epoch)
        return [[row // 2 for row in only.rows.tolist() if row % 2 == env_group] for env_group in env_groups]

    first, second = order()
    assert first != second and sorted(first) == sorted(second) == list(range(50)) != first
    assert order() == [first, second]
    for other in (order(seed=4), order(epoch=1)):
        assert first not in other and second not in other


def test_a_rollout_without_a_valid_row_has_no_minibatch(monkeypatch):
    (plan,) = plans(monkeypatch, torch.zeros(3, 4, dtype=torch.bool), 4, 1, 2)
    assert plan.num_rows == 0 and list(plan.epoch(0)) == []
