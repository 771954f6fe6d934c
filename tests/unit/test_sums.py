"""Which rank owns which env groups, and sums that do not depend on it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed import process_group
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import any_rank, rank, world_size
from rlinf.errors import ConfigError
from rlinf.preflight.validation import check_env_groups

WHOLE = build_config(compose_config([]))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_every_block_is_owned_once_and_every_group_is_whole(num_ranks, groups_per_rank, group_size):
    num_env_groups = num_ranks * groups_per_rank
    owned = [process_group.rank_range(num_env_groups, r, num_ranks) for r in range(num_ranks)]
    assert [env_group for env_groups in owned for env_group in env_groups] == list(range(num_env_groups))
    envs_per_rank = num_env_groups * group_size // num_ranks
    for r, env_groups in enumerate(owned):
        assert all(env_group * num_ranks // num_env_groups == r for env_group in env_groups)
        envs = [env for env_group in env_groups for env in range(env_group * group_size, (env_group + 1) * group_size)]
        assert envs == list(range(r * envs_per_rank, (r + 1) * envs_per_rank))


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9))
def test_misfits_are_refused_with_the_override_that_mends_them(num_envs, group_size, num_ranks):
    def config_with(count):
        rollout = replace(WHOLE.rollout, num_envs=count, group_size=group_size)
        return replace(WHOLE, rollout=rollout, cluster=replace(WHOLE.cluster, num_processes=num_ranks))

    if num_envs % group_size == 0 and num_envs // group_size % num_ranks == 0:
        check_env_groups(config_with(num_envs))
        assert len(process_group.rank_range(num_envs // group_size, 0, num_ranks)) * num_ranks * group_size == num_envs
        return
    with pytest.raises(ConfigError, match=f"rollout.num_envs={num_envs}; expected a multiple of") as error:
        check_env_groups(config_with(num_envs))
    key, mended = str(error.value).rsplit("Set ", 1)[1].rstrip(".").split("=")
    assert key == "rollout.num_envs"
    check_env_groups(config_with(int(mended)))


def test_ranks_that_do_not_divide_the_blocks_are_refused():
    with pytest.raises(ValueError, match="3 env groups on 2 ranks"):
        process_group.rank_range(3, 0, 2)


NUMBERS = torch.tensor([[1e16, 1.0, 7.0], [1.0, 2.0, 7.0], [-1e16, 3.0, 7.0], [1.0, 4.0, 7.0]], dtype=torch.float64)
"""In their order the first column adds up to 1; in another one, or in pairs, to 0 or 2."""


def note_sums(folder: Path) -> None:
    share = len(NUMBERS) // world_size()
    own = NUMBERS[rank() * share : (rank() + 1) * share]
    noted = (
        process_group.sum_env_groups(own).tolist(),
        process_group.gather_env_groups(own.long()).tolist(),
        process_group.sum_counts(2**62 // world_size(), rank() + 1),
        process_group.maximum(float(rank()), -float(rank())),
        [any_rank(rank() == number) for number in range(world_size() + 1)],
    )
    torch.save(noted, folder / f"{rank()} of {world_size()}")


def test_sums_of_blocks_have_the_same_bits_on_any_number_of_ranks(tmp_path):
    in_pairs = (NUMBERS[:2].sum(0) + NUMBERS[2:].sum(0)).tolist()
    assert in_pairs[0] != 1.0, "control: sums of the ranks' sums differ"
    note_sums(tmp_path)
    for ranks in (2, 4):
        launch(note_sums, tmp_path, ranks, "cpu")
    for ranks in (1, 2, 4):
        for r in range(ranks):
            total, gathered, counts, largest, asked = torch.load(tmp_path / f"{r} of {ranks}")
            assert total == [1.0, 10.0, 28.0] and gathered == NUMBERS.long().tolist()
            assert counts == (2**62, ranks * (ranks + 1) // 2), "integers, exact beyond the 53 bits of a float"
            assert largest == (ranks - 1, 0.0)
            assert asked == [True] * ranks + [False], "one rank says yes, then no rank"
