"""Rows of recipes: where they are read from, in which order, and what is wrong with them."""

import json
import logging

import pytest
from PIL import Image

from rlinf.errors import ConfigError, MissingDependencyError, import_extra
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows, load_rows, local_folder
from rlinf.recipes.samples import BadRowError, Sample

datasets = pytest.importorskip("datasets", reason="needs rlinf[recipes]")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cosmos"))


def write_lines(path, rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbers(rows) -> list[int]:
    return [rows[index]["n"] for index in range(len(rows))]


ROWS = [{"n": number, "text": f"row {number}"} for number in range(7)]


def test_files_and_folders_give_the_same_rows(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.to_csv(str(tmp_path / "a.csv"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "rl": table.select([1])}).save_to_disk(str(tmp_path / "saved_splits"))
    write_lines(tmp_path / "folder" / "train.jsonl", ROWS)
    write_lines(tmp_path / "folder" / "test.jsonl", ROWS[:2])
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv", "saved", "saved_splits", "folder"):
        rows = load_rows(str(tmp_path / name))
        assert [rows[index] for index in range(len(rows))] == ROWS, name
    assert numbers(load_rows(str(tmp_path / "saved_splits"), "rl")) == [1]
    assert numbers(load_rows(str(tmp_path / "folder"), ["test", "train"])) == [0, 1, *range(7)]
    assert numbers(load_rows(lines, "any name")) == list(range(7)), "the rows of a file are the split that is asked for"


def test_a_mirror_is_found_in_the_cache_by_subset_and_split(tmp_path):
    mirror = tmp_path / "cosmos" / "datasets" / "owner" / "data"
    for number in (0, 1):
        (mirror / "robovqa").mkdir(parents=True, exist_ok=True)
        (mirror / "robovqa" / f"robovqa_reasoning_{number}.json").write_text(json.dumps([{"n": number}]))
    (mirror / "robovqa" / "robovqa_understanding.json").write_text(json.dumps([{"n": 9}]))
    assert local_folder("owner/data") == mirror
    assert numbers(load_rows("owner/data", "reasoning", "robovqa")) == [0, 1]
    assert numbers(load_rows("owner/data", "understanding", "robovqa")) == [9]


def test_images_are_read_by_who_needs_them(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "1.png")
    (tmp_path / "images" / "2.png").write_text("no image")
    write_lines(
        tmp_path / "images" / "metadata.jsonl", [{"file_name": "1.png", "n": 1}, {"file_name": "2.png", "n": 2}]
    )
    rows = load_rows(str(tmp_path / "images"))
    assert [row["image"]["path"].rpartition("/")[2] for row in map(rows.__getitem__, range(2))] == ["1.png", "2.png"]
    features = datasets.Features({"images": datasets.List(datasets.Image())})
    nested = datasets.Dataset.from_list([{"images": [{"bytes": b"no image", "path": None}]}], features=features)
    nested.save_to_disk(str(tmp_path / "nested"))
    assert load_rows(str(tmp_path / "nested"))[0] == {"images": [{"bytes": b"no image", "path": None}]}


def test_the_first_rows_are_split_off_and_keep_their_numbers():
    rows = Rows(ROWS, "data")
    test, train = rows.split_off(2)
    assert numbers(test) == [0, 1] and numbers(train) == [2, 3, 4, 5, 6] and train.number(0) == 2
    assert [len(part) for part in rows.split_off(0.2)] == [2, 5]  # a fraction is rounded up
    assert rows.split_off(None) == (None, rows) and rows.split_off(0)[0] is None
    for size in (7, 1.0, -1):
        with pytest.raises(ConfigError, match="test_size"):
            rows.split_off(size)


def test_the_rows_of_a_step_depend_on_seed_and_step_alone():
    def rows(seed=3):
        return PackedRows(Rows(ROWS), lambda row: row["n"], seed)

    whole = [rows().batch(step, 3) for step in range(14)]
    fresh = rows()
    assert [fresh.batch(step, 3) for step in range(9, 14)] == whole[9:], "as a resumed run reads them"
    flat = [number for batch in whole for number in batch]
    epochs = [flat[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs), "an epoch is every row once"
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [rows(4).batch(step, 3) for step in range(14)] != whole
    shares = [[rows().batch(step, 6, rank, 3) for rank in range(3)] for step in range(3)]
    assert [sum(parts, []) for parts in shares] == [rows().batch(step, 6) for step in range(3)]
    with pytest.raises(ConfigError, match="7 rows cannot be divided among 2 ranks"):
        rows().batch(0, 7, 0, 2)
    assert PackedRows(Rows(ROWS), lambda row: row["n"], None).batch(2, 3) == [6, 0, 1]


def even(row: dict) -> int:
    if row["n"] % 2:
        raise BadRowError("it is odd; expected even.")
    return row["n"]


def test_a_bad_row_ends_the_run_or_is_replaced_and_counted(caplog):
    with pytest.raises(BadRowError, match="Row 1 of data .*skip_bad_rows=true"):
        PackedRows(Rows(ROWS, "data"), even).check()
    test, train = Rows(ROWS, "data").split_off(3)
    with pytest.raises(BadRowError, match="Row 3 of data"):
        PackedRows(train, even).check()
    rows = PackedRows(Rows(ROWS, "data"), even, skip_bad_rows=True)
    with caplog.at_level(logging.WARNING, logger="rlinf"):
        assert rows.check() == 7 and rows.num_skipped == 3
    assert (
        "3 of the first 7 rows of data are skipped" in caplog.text
        and "Row 5 of data is skipped: it is odd" in caplog.text
    )
    unchecked = PackedRows(Rows(ROWS, "data"), even, skip_bad_rows=True)
    assert [rows.batch(step, 5) for step in range(5)] == [unchecked.batch(step, 5) for step in range(5)]
    assert rows[1] == 2 and rows[5] == 6, "the next good row"
    with pytest.raises(ConfigError, match="None of the 2 rows of data can be used. First row: it is odd"):
        PackedRows(Rows([ROWS[1], ROWS[3]], "data"), even, skip_bad_rows=True).check()


def test_cut_rows_and_equal_pairs_are_counted(caplog):
    def pack(row):
        answer = Sample([1, 2, row["n"] % 3], [False, True, True], is_truncated=row["n"] > 4)
        return answer, Sample([1, 2, 0], [False, True, True])

    with caplog.at_level(logging.WARNING, logger="rlinf"):
        assert PackedRows(Rows(ROWS, "data"), pack).check() == 7
    assert "2 of the first 7 rows of data" in caplog.text, "5 and 6 are cut"
    assert "3 of the first 7 rows of data" in caplog.text, "0, 3 and 6 are equal"
    with pytest.raises(ConfigError, match="All 2 pairs.*1 of them.*policy.model_max_length"):
        PackedRows(Rows([ROWS[3], ROWS[6]], "data"), pack).check()


def test_a_check_stops_when_its_time_is_over():
    assert PackedRows(Rows(ROWS), even).check(seconds=-1) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "type '.txt'; expected .csv, .json"),
        ("empty.jsonl", "", "has no rows; expected at least one. Set"),
        ("bad.jsonl", '{"n": 1}\n{"n": \n', "Line 2 of .*bad.jsonl is not JSON"),
        ("bad.parquet", "x", "bad.parquet' .split train. cannot be read"),
        ("missing.jsonl", None, "missing.jsonl does not exist. Set train.train_policy.dataset.name="),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_rows(str(tmp_path / name))


def test_names_and_splits_that_do_not_exist_are_named(tmp_path):
    write_lines(tmp_path / "folder" / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match="Unknown split .*rl.* Set .*dataset.split"):
        load_rows(str(tmp_path / "folder"), "rl")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="Unknown split 'rl'. Should be one of .'train'."):
        load_rows(str(tmp_path / "saved"), "rl")
    with pytest.raises(ConfigError, match="dataset.name=''"):
        load_rows("")
    with pytest.raises(ConfigError, match="the dataset has no rows"):
        Rows([])
    with pytest.raises(BadRowError, match="Row 0 of the dataset cannot be used: it is 3; expected a map of columns"):
        PackedRows(Rows([3]), even).check()


def stream(tmp_path, **options) -> StreamedRows:
    name = write_lines(tmp_path / "stream.jsonl", [{"n": number} for number in range(23)])
    return StreamedRows(
        load_rows(name, streaming=True), options.pop("pack", lambda row: row["n"]), **options, block_rows=5
    )


def test_a_stream_reads_every_row_once_an_epoch(tmp_path):
    rows = stream(tmp_path, seed=1)
    flat = [number for step in range(23) for number in rows.batch(step, 4)]
    epochs = [flat[start : start + 23] for start in range(0, 92, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] and all(sorted(epoch[:5]) == [0, 1, 2, 3, 4] for epoch in epochs)
    in_order = stream(tmp_path, seed=None)
    assert [in_order.batch(step, 4) for step in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match="Step 9 of the dataset was requested, but it is at step 2"):
        in_order.batch(9, 4)


def test_a_stream_goes_on_where_it_was(tmp_path):
    rows = stream(tmp_path, seed=1)
    whole, states = [], []
    for step in range(17):
        states.append(json.loads(json.dumps(rows.state_dict())))
        whole.append(rows.batch(step, 4))
    for step in (0, 3, 5, 6, 11, 16):
        resumed = stream(tmp_path, seed=1)
        resumed.load_state_dict(states[step])
        assert [resumed.batch(number, 4) for number in range(step, 17)] == whole[step:], step
    other = stream(tmp_path, seed=2)
    assert [other.batch(step, 4) for step in range(17)] != whole, "control"


def test_ranks_share_a_stream_and_bad_rows_are_replaced(tmp_path):
    ranks = [stream(tmp_path, seed=1, pack=even, skip_bad_rows=True) for _ in range(2)]
    single = stream(tmp_path, seed=1, pack=even, skip_bad_rows=True)
    for step in range(12):
        parts = [rows.batch(step, 4, rank, 2) for rank, rows in enumerate(ranks)]
        assert sum(parts, []) == single.batch(step, 4)
    assert single.num_skipped >= 11
    with pytest.raises(BadRowError, match="Row 7 of the dataset"):
        rows = stream(tmp_path, seed=None, pack=lambda row: even(row) if row["n"] == 7 else 0)
        [rows.batch(step, 4) for step in range(3)]
    with pytest.raises(ConfigError, match="required for streaming: datasets.IterableDataset"):
        StreamedRows(iter(ROWS), even)


def test_a_missing_package_is_reported_with_the_extra_that_installs_it():
    with pytest.raises(
        MissingDependencyError, match=r"An upload needs the package no_such_package.*\[s3\].*or set x=no"
    ):
        import_extra("no_such_package", "An upload", "s3", ", or set x=no")
