"""Rows of files and their values as text: what the file says, in every format, streamed or not; files that are no text are named."""

import datetime
import decimal
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf.errors import ConfigError
from rlinf.files import TextFileError, decode_text, parse_json_lines, write_text
from rlinf.recipes.questions import QuestionsConfig, read_questions
from rlinf.recipes.row_files import AnyOf, as_reference
from rlinf.recipes.samples import BadRowError

datasets = pytest.importorskip("datasets", reason="needs rlinf[recipes]")
from rlinf.recipes.datasets import load_rows  # noqa: E402
from rlinf.recipes.packers import column  # noqa: E402

WORDS = [
    "2024-01-02",
    "007",
    "1.10",
    "NA",
    "None",
    "null",
    "nan",
    "TRUE",
    "1e5",
    "1_000",
    "+5",
    " 4 ",
    "-0",
    "1" * 40,
    "é\u2028\x85x",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def answers(name, **options) -> list[str]:
    rows = load_rows(str(name), **options)
    return [as_reference(column(row, "answer"), "it") for row in rows]


def expected(path) -> list[str]:
    return [question.expected for question in read_questions(QuestionsConfig(checkpoint="x", questions=str(path)))]


def write(path, rows) -> str:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def test_texts_are_those_of_the_file_in_every_format(tmp_path):
    rows = [{"question": "q", "answer": word, "id": f"{n:03}"} for n, word in enumerate(WORDS)]
    write(tmp_path / "a.jsonl", rows)
    write_text(tmp_path / "a.json", "\ufeff" + json.dumps(rows))
    for suffix, separator in ((".csv", ","), (".tsv", "\t")):
        lines = [("question", "answer", "id"), *((row["question"], row["answer"], row["id"]) for row in rows)]
        write_text(tmp_path / f"a{suffix}", "\ufeff" + "".join(separator.join(line) + "\r\n" for line in lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in sorted(tmp_path.glob("a.*")):
        assert answers(path) == answers(path, streaming=True) == expected(path) == WORDS, path.name
        asked = read_questions(QuestionsConfig(checkpoint="x", questions=str(path), category_column="id"))
        assert (
            [question.id for question in asked]
            == [question.category for question in asked]
            == [row["id"] for row in rows]
        )


def test_numbers_and_truths_have_the_text_of_the_file(tmp_path):
    written = ["1.10", "1E3", "true", "0", "12345678901234567890", "-0.0"]
    write_text(tmp_path / "a.jsonl", "".join(f'{{"question": "q", "answer": {text}}}\n' for text in written))
    assert answers(tmp_path / "a.jsonl") == expected(tmp_path / "a.jsonl") == written
    assert load_rows(str(tmp_path / "a.jsonl"))[0]["answer"] == 1.1, "a reward that computes has the number"
    typed = pa.table({"question": ["q"] * 2, "answer": pa.array([datetime.date(2024, 1, 2)] * 2)})
    pq.write_table(typed, tmp_path / "a.parquet")
    assert answers(tmp_path / "a.parquet") == expected(tmp_path / "a.parquet") == ["2024-01-02"] * 2
    assert as_reference(decimal.Decimal("1.10"), "it") == "1.10"


def test_any_of_a_list_counts_and_what_is_no_text_is_rejected(tmp_path):
    found = as_reference(["4", 1.5, True], "it")
    assert isinstance(found, AnyOf) and found.references == ["4", "1.5", "true"]
    for bad in ([], {}, {"a": 1}, [["4"]], [None], float("nan"), datetime.datetime(2024, 1, 2), b"4"):
        with pytest.raises(BadRowError):
            as_reference(bad, "it")
        path = (
            write(tmp_path / "a.jsonl", [{"question": "q", "answer": bad}]) if isinstance(bad, (list, dict)) else None
        )
        if path:
            with pytest.raises(ConfigError, match="Row 0"):
                expected(path)
    options = {"question": "q", "options": ["x", "y", "z"], "answer": ["A", 2]}
    (right,) = expected(write(tmp_path / "a.jsonl", [options]))
    assert right.references == ["A", "C"]


def test_folders_and_splits_have_no_guessed_types_either(tmp_path):
    (tmp_path / "data").mkdir()
    write_text(tmp_path / "data" / "train.csv", "answer\n007\nNA\n3\n")
    write_text(tmp_path / "data" / "test.csv", "answer\n008\n")
    for split, found in (
        ("train", ["007", "NA", "3"]),
        ("train[1:]", ["NA", "3"]),
        (["test", "train[:1]"], ["008", "007"]),
    ):
        assert answers(tmp_path / "data", split=split) == found
    assert answers(tmp_path / "data", split="train", streaming=True) == ["007", "NA", "3"]
    assert answers(tmp_path / "data" / "train.csv", split="train[1:]") == ["NA", "3"]
    (tmp_path / "packed").mkdir()
    with gzip.open(tmp_path / "packed" / "train.jsonl.gz", "wt") as file:
        file.write('{"answer": "2024-01-02"}\n')
    for streaming in (False, True):
        assert answers(tmp_path / "packed", streaming=streaming) == ["2024-01-02"]


@pytest.mark.parametrize(("name", "words"), [("metadata.jsonl", ["2024-01-02"] * 3), ("metadata.csv", WORDS)])
def test_what_is_said_about_a_folder_of_images_has_no_guessed_types(tmp_path, name, words):
    tmp_path = tmp_path / "images"
    tmp_path.mkdir()
    rows = [{"file_name": f"{n}.png", "mask_file_name": "0.png", "answer": word} for n, word in enumerate(words)]
    for row in rows:
        Image.new("RGB", (2, 2)).save(tmp_path / row["file_name"])
    write(tmp_path / "metadata.jsonl", rows)
    if name == "metadata.csv":
        (tmp_path / "metadata.jsonl").unlink()
        write_text(tmp_path / name, "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    for streaming in (False, True):
        assert answers(tmp_path, streaming=streaming) == words
        for n, row in enumerate(load_rows(str(tmp_path), streaming=streaming)):
            assert [row[key]["path"] for key in ("image", "mask")] == [f"{tmp_path}/{n}.png", f"{tmp_path}/0.png"]


def test_a_line_ends_at_a_newline_only_and_blank_lines_are_none(tmp_path):
    text = '\ufeff{"answer": "a\u2028b"}\r\n\n  \n{"answer": "c\x85d"}'
    write_text(tmp_path / "a.jsonl", text)
    assert answers(tmp_path / "a.jsonl") == ["a\u2028b", "c\x85d"]
    write_text(tmp_path / "a.json", '\ufeff\n\n [\n{"answer": "a"},\n{"answer": "b"}]')
    assert answers(tmp_path / "a.json") == ["a", "b"]
    assert parse_json_lines(text.encode(), "x") == [{"answer": "a\u2028b"}, {"answer": "c\x85d"}]
    half = {"text": "\ud83d\n\u2028"}
    written = write_text(tmp_path / "half", json.dumps(half, ensure_ascii=False)).read_bytes()
    assert json.loads(written) == half and b"\n" not in written
    assert decode_text("\ufeffa = 1".encode(), "recipe.toml") == "a = 1"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"answer": "a"}\n{"answer": "se\xf1or"}\n', 2),
        ("a.json", b'[{"answer": "a"},\n\n{"answer": "se\xf1or"}]', 3),
        ("a.csv", b"question,answer\nq,a\nq,se\xf1or\n", 3),
        ("a.jsonl", '{"answer": "a"}'.encode("utf-16"), 1),
        ("a.jsonl", b'{"answer": "a"}\n{"answer": \n', 2),
        ("a.jsonl", b'{"answer": "a"}\n{"answer": "\\ud83d"}\n', 2),
        ("a.jsonl", b"[" * 100_000, 1),
        ("a.jsonl", b'{"answer": ' + b"1" * 5000 + b"}", 1),
        ("a.csv", b"question,answer\nq,a\nq,a,b\n", 3),
        ("a.csv", b'question,answer\nq,"a\n', 2),
        ("a.csv", b"answer,answer\nq,a\n", 1),
    ],
)
def test_the_line_that_cannot_be_read_is_named(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    for read in (answers, expected, lambda path: answers(path, streaming=True)):
        with pytest.raises(TextFileError, match=f"Line {line} of .*{name}") as caught:
            read(tmp_path / name)
        assert len(str(caught.value)) < 500


def test_nulls_of_a_file_survive_and_those_of_a_table_do_not(tmp_path):
    from rlinf.recipes.messages import check_messages, tools_of

    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"city": "Paris", "unit": None}}}
    tools = [{"type": "function", "function": {"name": "f", "default": None}}]
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}

    def kept(row) -> list:
        message = check_messages(row["messages"])[0]
        assert "id" not in message["tool_calls"][0], "templates tell a missing id by its key"
        return [message["tool_calls"][0]["function"]["arguments"], tools_of(row)[0]["function"]]

    written = [{"city": "Paris", "unit": None}, {"name": "f", "default": None}]
    path = write(tmp_path / "a.jsonl", [row])
    assert kept(load_rows(path)[0]) == kept(next(iter(load_rows(path, streaming=True)))) == written
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert kept(load_rows(str(tmp_path / "a.parquet"))[0]) == [{"city": "Paris"}, {"name": "f"}]


def test_contents_of_messages_may_be_texts_and_lists(tmp_path):
    parts = [{"type": "text", "text": "a"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]}
    assert load_rows(write(tmp_path / "a.jsonl", [row]))[0] == row
