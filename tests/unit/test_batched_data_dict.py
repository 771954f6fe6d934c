"""Token batches: every operation on rows against lists written by hand, and shards that lose and repeat nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.distributed import BatchedDataDict
from rlinf.distributed.launch import launch
from rlinf.errors import ConfigError
from rlinf.llm.packing import first_fit_decreasing, pack_rows, token_budget_runs


def numbered(num_rows: int) -> BatchedDataDict:
    return BatchedDataDict({"row": torch.arange(num_rows), "name": [f"r{i}" for i in range(num_rows)], "scale": 0.5})


def of_lengths(lengths: list[int]) -> BatchedDataDict:
    widest = max(lengths)
    mask = torch.arange(widest) < torch.tensor(lengths).unsqueeze(1)
    return BatchedDataDict({"row": torch.arange(len(lengths)), "input_ids": mask * 7, "attention_mask": mask.long()})


def rows_of(batch: BatchedDataDict) -> list[int]:
    return batch["row"].tolist()


def test_it_is_generic_and_takes_scalars_and_defaults():
    batch = BatchedDataDict["GenerationDatumSpec"]({"input_ids": torch.ones(2, 3), "max_new_tokens": 7})
    assert isinstance(batch, BatchedDataDict) and batch.size == 2
    assert batch.get("max_new_tokens", 100) == 7 and batch.get("temperature", 0.7) == 0.7
    assert batch.get_dict() == dict(batch) and type(batch.get_dict()) is dict


def test_from_batches_pads_on_the_right_with_the_value_of_each_key():
    first = {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[1, 1, 1]]), "name": ["a"], "scale": 2}
    second = {"ids": torch.tensor([[4], [5]]), "mask": torch.tensor([[1], [1]]), "name": ["b", "c"], "scale": 2}
    joined = BatchedDataDict.from_batches([first, second], pad_value_dict={"ids": 9})
    assert joined["ids"].tolist() == [[1, 2, 3], [4, 9, 9], [5, 9, 9]]
    assert joined["mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert joined["name"] == ["a", "b", "c"] and joined["scale"] == 2


def test_from_batches_pads_every_axis():
    joined = BatchedDataDict.from_batches([{"x": torch.ones(1, 2, 1)}, {"x": torch.ones(1, 1, 3)}])["x"]
    assert joined.shape == (2, 2, 3) and joined.sum() == 5
    assert joined[0].tolist() == [[1, 0, 0], [1, 0, 0]] and joined[1].tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("batches", "words"),
    [([], "at least one"), ([{"a": [1]}, {"b": [1]}], "'a', 'b'"), ([{"a": [1], "n": 1}, {"a": [1], "n": 2}], "'n' is a value per batch"),
     ([{"a": torch.zeros(1)}, {"a": torch.zeros(1, 1)}], r"\[\[1\], \[1, 1\]\]"),
     ],
)  # fmt: skip
def test_from_batches_refuses_what_does_not_fit(batches, words):
    with pytest.raises(ConfigError, match=words):
        BatchedDataDict.from_batches(batches)


def test_selection_by_rows():
    batch = numbered(5)
    assert rows_of(batch.slice(1, 3)) == [1, 2] and batch.slice(1, 3)["name"] == ["r1", "r2"]
    assert rows_of(batch.get_batch(1, 2)) == [2, 3] and rows_of(batch.get_batch(2, 2)) == [4]
    assert rows_of(batch.select_indices([4, 0, 0])) == [4, 0, 0]
    assert batch.select_indices(torch.tensor([3, 1]))["name"] == ["r3", "r1"]
    chosen = batch.select_indices(batch["row"] > 2)
    assert rows_of(chosen) == [3, 4] and chosen["name"] == ["r3", "r4"]
    assert rows_of(batch.select_indices([])) == []
    assert rows_of(batch.repeat_interleave(2)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert batch.repeat_interleave(2)["scale"] == 0.5


def test_chunks_are_contiguous_and_differ_by_one_row_at_most():
    assert [rows_of(numbered(7).chunk(rank, 3)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_reorder_moves_row_i_to_place_i_of_the_indices():
    batch = numbered(3)
    batch.reorder_data([2, 0, 1])
    assert rows_of(batch) == [1, 2, 0] and batch["name"] == ["r1", "r2", "r0"]


def test_truncation_touches_only_tensors_with_that_axis():
    batch = BatchedDataDict({"ids": torch.ones(2, 5), "row": torch.arange(2), "short": torch.ones(2, 2)})
    batch.truncate_tensors(1, 3)
    assert batch["ids"].shape == (2, 3) and batch["short"].shape == (2, 2) and rows_of(batch) == [0, 1]


def test_to_moves_tensors_and_keeps_the_rest():
    batch = numbered(2).to("meta")
    assert batch["row"].device.type == "meta" and batch["name"] == ["r0", "r1"]


def test_micro_batches_of_a_size():
    assert [rows_of(part) for part in numbered(5).make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4]]


def test_plain_shards_spread_every_global_batch():
    shards = numbered(8).shard_by_batch_size(2, batch_size=4)
    assert [rows_of(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [rows_of(shard) for shard in numbered(6).shard_by_batch_size(2)] == [[0, 1, 2], [3, 4, 5]]


def test_uneven_shards_only_when_allowed():
    shards = numbered(7).shard_by_batch_size(3, allow_uneven_shards=True)
    assert [rows_of(shard) for shard in shards] == [[0, 1, 2], [3, 4], [5, 6]]


LENGTHS = st.lists(st.integers(1, 9), min_size=4, max_size=24)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, shards=st.integers(1, 4), packing=st.booleans())
def test_token_budget_shards_hold_every_row_once_within_the_budget(lengths, shards, packing):
    lengths = lengths[: len(lengths) - len(lengths) % shards]
    args = {"max_tokens_per_microbatch": 12}
    batch = of_lengths(lengths)
    parts, order = batch.shard_by_batch_size(
        shards, **{"sequence_packing_args" if packing else "dynamic_batching_args": args}
    )
    assert sorted(order) == list(range(len(lengths))) == sorted(row for part in parts for row in rows_of(part))
    assert len({len(part.micro_batches) for part in parts}) == 1, "every rank has the same number of forward passes"
    for part in parts:
        assert sorted(row for rows in part.micro_batches for row in rows) == list(range(part.size))
        for micro_batch in part.make_microbatch_iterator():
            tokens = sum(micro_batch.lengths()) if packing else micro_batch["attention_mask"].numel()
            assert tokens <= 12 and micro_batch["attention_mask"].shape[1] == max(micro_batch.lengths())
    joined = BatchedDataDict.from_batches(parts)
    joined.reorder_data(order)
    assert rows_of(joined) == list(range(len(lengths)))


def test_dynamic_batches_use_the_budget():
    parts, _ = of_lengths([2] * 12).shard_by_batch_size(2, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert [len(rows) for rows in parts[0].micro_batches] == [4, 2]
    args = {"max_tokens_per_microbatch": 8, "sequence_length_round": 4}
    parts, _ = of_lengths([2] * 12).shard_by_batch_size(2, dynamic_batching_args=args)
    assert [len(rows) for rows in parts[0].micro_batches] == [2, 2, 2]


def test_lengths_may_come_from_a_key():
    batch = BatchedDataDict({"row": torch.arange(4), "tokens": torch.tensor([8, 8, 1, 1])})
    args = {"max_tokens_per_microbatch": 8, "input_lengths_key": "tokens"}
    parts, _ = batch.shard_by_batch_size(1, sequence_packing_args=args)
    assert [rows_of(part) for part in parts[0].make_microbatch_iterator()] == [[0], [1], [2, 3]]


def test_of_outputs_prompt_and_response_are_counted():
    mask = (torch.arange(12) < torch.tensor([[4], [5]])).long()
    batch = BatchedDataDict({"row": torch.arange(2), "input_ids": 7 * mask, "attention_mask": mask, "generation_lengths": torch.tensor([5, 5]),
                             "output_ids": torch.arange(24).view(2, 12), "unpadded_sequence_lengths": torch.tensor([9, 10])})  # fmt: skip
    assert batch.lengths() == [9, 10] and batch.lengths("generation_lengths") == [5, 5]
    assert batch.without_padding_columns()["output_ids"].tolist() == batch["output_ids"][:, :10].tolist()
    parts, _ = batch.shard_by_batch_size(1, dynamic_batching_args={"max_tokens_per_microbatch": 10})
    widths = [(rows_of(part), part["output_ids"].shape[1]) for part in parts[0].make_microbatch_iterator()]
    assert widths == [([1], 10), ([0], 9)]


BUDGET = {"max_tokens_per_microbatch": 8}


def packed(lengths, shards=1, args=BUDGET, **more):
    return of_lengths(lengths).shard_by_batch_size(shards, sequence_packing_args=args, **more)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: BatchedDataDict({"a": torch.zeros(2), "b": [1, 2, 3]}).size, "'a': 2, 'b': 3"),
        (lambda: numbered(3).reorder_data([0, 0, 1]), r"\[0, 0, 1\]"),
        (lambda: numbered(3).truncate_tensors(0, 1), "dim=0; expected 1 or more"),
        (lambda: next(numbered(5).make_microbatch_iterator()), "microbatch_size"),
        (lambda: numbered(7).shard_by_batch_size(3), "7 rows do not divide into shards=3.*allow_uneven_shards=True"),
        (lambda: numbered(7).shard_by_batch_size(2, batch_size=4), "7 rows do not divide into batch_size=4"),
        (lambda: numbered(4).shard_by_batch_size(1, sequence_packing_args=BUDGET), "no 'attention_mask'"),
        (lambda: packed([1, 2], dynamic_batching_args=BUDGET), "exclude each other"),
        (lambda: packed([9, 2]), "9 tokens is longer than max_tokens_per_microbatch=8.*Pass 9 or more"),
        (lambda: packed([2], args={"max_tokens": 8}), "'max_tokens': 8.*expected max_tokens_per_microbatch"),
        (
            lambda: of_lengths([2]).shard_by_batch_size(1, dynamic_batching_args={}),
            "expected max_tokens_per_microbatch",
        ),
        (lambda: packed([8, 7, 8, 7, 8], 3), "5 sequences cannot fill a multiple of 3 bins of 8"),
        (lambda: numbered(1).shard_by_batch_size(1, 0), "shards=1, batch_size=.*expected 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_first_fit_decreasing_by_hand():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 2, 3, 5]]
    assert first_fit_decreasing([1, 1, 1, 1], 10) == [[0, 1, 2, 3]]
    assert first_fit_decreasing([1, 1, 1, 1], 10, num_bins_multiple=3) == [[0], [1, 3], [2]]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=30))
def test_first_fit_leaves_no_two_bins_that_fit_together(lengths):
    bins = first_fit_decreasing(lengths, 10)
    assert sorted(item for each in bins for item in each) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in each) <= 10 for each in bins)
    filled = sorted(sum(lengths[item] for item in each) for each in bins)
    assert len(bins) == 1 or filled[0] + filled[1] > 10


def test_runs_of_rows_by_hand():
    assert token_budget_runs([5, 3, 3, 1], 10) == [2, 2]
    assert token_budget_runs([5, 5, 5], 5) == [1, 1, 1]


def test_packed_rows_have_positions_of_their_own():
    ids = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    packed, positions = pack_rows(ids, torch.tensor([3, 1, 2]))
    assert packed.tolist() == [[1, 2, 3, 4, 5, 6]] and positions.tolist() == [[0, 1, 2, 0, 0, 1]]


def gather_on_two_ranks(folder: str) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    ids = torch.full((1 + rank, 2 + rank), rank + 1)
    batch = BatchedDataDict({"ids": ids, "name": [f"rank{rank}"] * (1 + rank), "scale": 3})
    gathered = batch.all_gather(dist.group.WORLD, pad_value_dict={"ids": 9})
    torch.save(gathered.get_dict(), f"{folder}/{rank}.pt")


def test_all_gather_joins_uneven_batches_on_every_rank(tmp_path):
    launch(gather_on_two_ranks, str(tmp_path), 2, "cpu")
    for rank in range(2):
        gathered = torch.load(tmp_path / f"{rank}.pt")
        assert gathered["ids"].tolist() == [[1, 1, 9], [2, 2, 2], [2, 2, 2]]
        assert gathered["name"] == ["rank0", "rank1", "rank1"] and gathered["scale"] == 3
