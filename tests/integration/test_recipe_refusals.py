"""What two ranks of a recipe reject: all of them, with one message, and none waits for another."""

import json
import sys
from pathlib import Path

import datasets
import pytest

from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank
from rlinf.errors import ConfigError
from rlinf.options import from_mapping
from rlinf.recipes.build import RecipeData
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import PackedRows, Rows, StreamedRows
from rlinf.recipes.run import run
from rlinf.recipes.samples import BadRowError, Prompt, Sample
from rlinf.recipes.token_trainer import check_equal_rows
from rlinf.tracking.tracker import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import chat_tokenizer

ROWS = [{"ids": [5 + number, 6, 7]} for number in range(8)]


class Ids:
    """Packs rows of tokens."""

    def setup(self, config, processor):
        pass

    def sample(self, row):
        if not row["ids"]:
            raise BadRowError("it is empty.")
        return Sample(row["ids"], [True] * len(row["ids"]))

    def prompt(self, row):
        return Prompt(row["ids"])


def fraction_of_rows():
    """The rows of a script that divides them itself, unevenly."""
    return ROWS[:5] if rank() == 0 else ROWS[5:]


def other_rows():
    """The same, evenly."""
    return ROWS[rank() :: 2]


def other_row(changed):
    """Return all rows. One of them differs on rank 1."""
    return [{"ids": [9, 9, 9]} if rank() == 1 and number == changed else row for number, row in enumerate(ROWS)]


def stream(rows):
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


def other_second_epoch():
    """A stream that gives rank 1 another row in its second epoch, which the second step reads."""
    times = []

    def read():
        times.append(None)
        yield from other_row(4) if len(times) > 1 else ROWS

    return datasets.IterableDataset.from_generator(read)


CASES = {
    "too few rows": ("sft", 4, lambda: ROWS[:3], "The dataset has 3 rows, too few for one batch of .*=4"),
    "rows by rank, unevenly": ("sft", 2, fraction_of_rows, "rank 0 has 5 rows, rank 1 has 3.*A script must pass all rows on every rank"),
    "rows by rank, evenly": ("sft", 2, other_rows, "row 0 of rank 1 differs from rank 0.*A script must pass all rows on every rank"),
    "another row in the middle": ("sft", 2, lambda: other_row(4), "row 4 of rank 1 differs from rank 0"),
    "another last row": ("sft", 2, lambda: other_row(7), "row 7 of rank 1 differs from rank 0"),
    "a stream by rank": ("sft", 2, lambda: stream(other_rows()), "differs between ranks in its first 4 rows. A script must pass"),
    "a stream that differs later": ("sft", 8, other_second_epoch, "The stream of the dataset differs between ranks"),
}  # fmt: skip


def recipe(model: str, output: Path, kind: str, batch_size: int) -> RecipeConfig:
    return from_mapping(RecipeConfig, {
        "train": {"output_dir": str(output), "param_dtype": "float32", "train_batch_per_replica": batch_size,
                  "max_num_steps": 2, "train_policy": {"type": kind}},
        "policy": {"model_name_or_path": model, "model_max_length": 16, "device": "cpu", "parallelism": {"dp_shard_size": 2}},
        "rollout": {"backend": "torch", "n_generation": 4, "max_response_length": 4},
    })  # fmt: skip


def reject_on_a_rank(arguments) -> None:
    model, folder = arguments
    found = {}
    for name, (kind, batch_size, rows, _) in CASES.items():
        try:
            run(
                recipe(model, folder / ("started" if "later" in name else "out"), kind, batch_size),
                RecipeData(rows(), Ids(), ["format"]),
            )
        except ConfigError as error:
            found[name] = str(error)
    (folder / f"{rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def model(tiny_lm):
    tokenizer = chat_tokenizer("plain")
    folder = tiny_lm("llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def test_all_ranks_refuse_with_the_same_words_and_leave_nothing(model, tmp_path):
    launch(reject_on_a_rank, (model, tmp_path), 2, "cpu")
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert one == two and one.keys() == CASES.keys()
    for name, (*_, message) in CASES.items():
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(one[name])
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob("started/*/metrics.jsonl")) and not list(tmp_path.glob("started/*/checkpoints/step_*"))


class OwnRows(PackedRows):
    """Rows that one rank alone cannot pack."""

    fault: Exception | None = None

    def __getitem__(self, index):
        if rank() == 1 and index == 7 and self.fault is not None:
            raise self.fault
        return super().__getitem__(index)


def compare_streams(folder) -> None:
    found = {}
    for name, changed in {"equal": 99, "another block": 7}.items():
        rows = StreamedRows(stream(other_row(changed)), Ids().sample, block_rows=3)
        check_equal_rows(rows)
        try:
            for step in range(8):
                rows.batch(step, 2, rank(), 2)
                check_equal_rows(rows)
        except ConfigError as error:
            found[name] = [step, str(error)]
    (folder / f"{rank()}.json").write_text(json.dumps(found))


def test_a_stream_is_compared_block_by_block(tmp_path):
    launch(compare_streams, tmp_path, 2, "cpu")
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert one == two and one.keys() == {"another block"}, "equal streams are no error, over two epochs"
    step, message = one["another block"]
    assert step == 3, "row 7 is of the third block, which starts with the seventh row"
    assert "in its first 8 rows. A script must pass all rows on every rank" in message


def compare_rows(folder) -> None:
    rows, found = OwnRows(Rows(ROWS), Ids().sample), {}
    for name, fault in {
        "row": BadRowError("it is odd.", 7),
        "packer": ZeroDivisionError("of a packer"),
        "": None,
    }.items():
        rows.fault = fault
        try:
            check_equal_rows(rows)
        except Exception as error:  # noqa: BLE001 - which one it is, is what is tested
            found[name] = [type(error).__name__, str(error)]
    (folder / f"{rank()}.json").write_text(json.dumps(found))


def test_an_error_of_one_rank_while_rows_are_compared_is_raised_on_all(tmp_path):
    launch(compare_rows, tmp_path, 2, "cpu")
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert (
        one["row"] == two["row"]
        and one["row"][0] == "BadRowError"
        and "Row 7 cannot be used: it is odd." in one["row"][1]
    )
    assert two["packer"] == ["ZeroDivisionError", "of a packer"] and one["packer"][0] == "RankError"
    assert "Rank 1 failed" in one["packer"][1] and "of a packer" in one["packer"][1]
    assert one.keys() == two.keys() == {"row", "packer"}, "control: without a fault there is no error"


def read_a_stream(arguments) -> None:
    model, folder = arguments
    rows = [*ROWS[:6], {"ids": []}, ROWS[7]]  # rank 1 reads it in the second batch of four; no comparison does
    config = recipe(model, folder / "out", "sft", 4)
    config.train.timestamp = "run"
    config.train.train_policy.dataloader_shuffle = False
    PackedRows.check = lambda self, seconds=0.0: 0  # as if the rows were too many to look at before training
    run(config, RecipeData(datasets.IterableDataset.from_generator(lambda: iter(rows)), Ids()))


def test_a_bad_row_that_one_rank_alone_reads_ends_both(model, tmp_path):
    with pytest.raises(BadRowError, match="Row 6 .*cannot be used: it is empty"):
        launch(read_a_stream, (model, tmp_path), 2, "cpu")
    assert len(read_metrics(tmp_path / "out" / "run")) == 1, "the step before it"
