"""Evaluation on files of questions: what is found in a completion, what is rejected before a model loads, the whole command."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from rlinf.cli import main
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.intervals import wilson_interval
from rlinf.recipes.evaluate_questions import find_model
from rlinf.recipes.questions import (
    REASONING_REQUEST,
    QuestionsConfig,
    first_letter,
    read_questions,
    scoring,
    tagged_letter,
)
from rlinf.recipes.questions_result import QuestionsResult

ROOT = Path(__file__).parents[2]
CHOICES = [
    {"id": "a", "subset": "sky", "video": "x.mp4",
     "qa_pairs": {"question": "Which colour has the sky?", "index2ans": {"A": "blue", "B": "red"}, "answer": "A"}},
    {"id": "b", "subset": "sea", "qa_pairs": {"question": "And the sea?", "index2ans": {"A": "red", "B": "blue"}, "answer": "B"}},
]  # fmt: skip
SUMS = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}", "category": "even" if a % 2 == 0 else "odd"}
        for a, b in ((11, 22), (14, 15), (32, 41), (20, 33))]  # fmt: skip


def rows_file(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(path: Path, **settings) -> list:
    return read_questions(QuestionsConfig(checkpoint="x", questions=str(path), **settings))


def test_questions_may_have_the_layout_of_sharegpt(tmp_path):
    """The same conversations as messages with role and content, answers and images included."""
    texts = [("system", "system", "Be brief."), ("human", "user", "<image> What is it?"), ("gpt", "assistant", "a cup")]
    rows = {
        "sharegpt": {"conversations": [{"from": name, "value": text} for name, _, text in texts]},
        "messages": {"messages": [{"role": role, "content": text} for _, role, text in texts]},
    }
    found = {}
    for name, row in rows.items():
        path = rows_file(tmp_path / f"{name}.jsonl", [row | {"answer": "a cup", "images": ["cup.png"]}])
        (question,) = asked(path, request="One word.")
        found[name] = (question.messages, question.prompt, question.expected, question.media)
    assert found["sharegpt"] == found["messages"]
    messages, prompt, expected, media = found["sharegpt"]
    assert [message["role"] for message in messages] == ["system", "user"], "the answer is not shown to the model"
    assert messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": " What is it? One word."}]
    assert "What is it? One word." in prompt and expected == "a cup" and media == [("image", "cup.png")]
    bad = [{"conversations": [{"from": "narrator", "value": "a"}], "answer": "b"}]
    with pytest.raises(ConfigError, match="message 0 has 'from': 'narrator'"):
        asked(rows_file(tmp_path / "bad.jsonl", bad))


@pytest.mark.parametrize(
    ("completion", "anywhere", "tagged"),
    # By hand, by the rule: the first capital letter, of the whole text or of what is between the first answer tags.
    [
        ("B", "B", None), ("The answer is B", "T", None), ("<answer>B</answer>", "B", "B"), ("<answer>B", "B", None), ("", None, None),
        ("<think>It is A or C.</think>\n\n<answer>\n(C) because\n</answer>", "I", "C"),
        ("<think>I see</think>\n\n<answer>b</answer>", "I", None), ("<answer>none</answer><answer>D</answer>", "D", None),
    ],
)  # fmt: skip
def test_the_letter_is_the_first_one_of_the_text_or_of_the_tags(completion, anywhere, tagged):
    assert first_letter(completion) == anywhere
    assert tagged_letter(completion) == tagged


def test_rewards_say_what_they_compare_and_a_letter_counts_only_if_it_is_the_right_one():
    name, reward, _ = scoring(None, has_options=True)
    assert name == "reasoning"
    assert reward("<answer>B</answer>", "B") == 1 and reward("<answer>A</answer>", "B") == 0 and reward("B", "B") == 0
    assert scoring("letter", has_options=True)[1]("B", "B") == 1
    _, reward, find = scoring("gsm8k", has_options=False)
    assert find("so 7 #### 1,042") == "1042" and reward("so 7 #### 1,042", "#### 1042") == 1
    assert find("so 7") is None
    for answer_type, has_options in (("gsm9k", False), (None, False), ("letter", False)):
        with pytest.raises(ConfigError, match="answer_type"):
            scoring(answer_type, has_options)


def test_options_and_request_are_those_of_the_dataset_script(tmp_path, monkeypatch):
    """A model is asked as it was trained."""
    questions = asked(rows_file(tmp_path / "q.jsonl", CHOICES), system_prompt="")
    path = ROOT / "examples" / "reasoning" / "tools" / "dataset" / "cosmos_grpo.py"
    spec = importlib.util.spec_from_file_location("cosmos_grpo_of_a_test", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(path.parent))
    spec.loader.exec_module(script)
    packer = script.CosmosChoicePacker.__new__(script.CosmosChoicePacker)
    assert questions[0].messages == packer.messages(CHOICES[0])
    assert questions[1].messages[1]["content"].endswith(f"(A) red\n(B) blue\n{REASONING_REQUEST}")
    assert [(one.id, one.category, one.expected) for one in questions] == [("a", "sky", "A"), ("b", "sea", "B")]
    listed = {"question": "Which?", "choices": ["x", "y", "z"], "answer": 2}
    (question,) = asked(rows_file(tmp_path / "q.jsonl", [listed]), answer_type="letter")
    assert question.expected == "C" and question.prompt.startswith("Which?\n(A) x\n(B) y\n(C) z\nAnswer")


IMAGE, WHAT = {"type": "image"}, {"type": "text", "text": "What?"}
TURNS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "cat"},
         {"role": "user", "content": "Colour?"}]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),  # contents of the messages as the model gets them, by hand
    [
        ({"question": "What?", "images": ["a", "b"]}, [[IMAGE, IMAGE, WHAT]]),
        ({"question": "<image>What?", "image": "a"}, [[IMAGE, WHAT]]),
        ({"question": "<image>What?", "image": "a", "video": "v"}, [["v", IMAGE, WHAT]]),
        ({"question": "What?", "image": "a", "video": "v"}, [[IMAGE, "v", WHAT]]),
        ({"messages": TURNS, "images": ["a"]}, [[IMAGE, WHAT], "cat", "Colour?"]),
        ({"messages": TURNS, "images": ["a"], "video": "v"}, [[IMAGE, WHAT], "cat", ["v", {**WHAT, "text": "Colour?"}]]),
        ({"messages": [{"role": "user", "content": [WHAT]}], "image": "a", "video": "v"}, [[IMAGE, "v", WHAT]]),
        ({"messages": [{"role": "user", "content": [IMAGE, WHAT]}], "image": "a", "video": "v"}, [["v", IMAGE, WHAT]]),
        ({"messages": [{"role": "user", "content": [WHAT, {"type": "video", "video": "v"}]}], "video": "v"}, [[WHAT, "v"]]),
        ({"question": "an <image> tag"}, ["an <image> tag"]),
    ],
)  # fmt: skip
def test_every_image_and_video_of_a_question_is_in_its_messages_once(tmp_path, row, expected):
    (question,) = asked(rows_file(tmp_path / "rows.jsonl", [{**row, "answer": "x"}]))
    contents = [message["content"] for message in question.messages]
    for content in contents:
        if isinstance(content, list):
            content[:] = [part["video"] if part["type"] == "video" else part for part in content]
    assert contents == expected


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (None, {}, "is not a file"),
        ("", {}, "has no rows"),
        ("{}\nnot json\n", {}, "Line 2 .* is not JSON"),
        ('{"question": "1 + 1?"}\n', {}, "Row 0 .* no answer in the column 'answer'"),
        ('{"answer": "2"}\n', {}, "no question column prompt or question"),
        ('{"question": "1?", "answer": "2"}\n', {"prompt_column": "questions"}, "Did you mean 'question'"),
        ('{"question": "1?", "answer": "D", "options": ["x", "y"]}\n', {}, "the letter of an option"),
        ('{"id": 1, "question": "1?", "answer": "2"}\n' * 2, {}, "Rows 0 and 1 .* the same id '1'"),
        ('{"question": "<image>What happens?", "video": "v.mp4", "answer": "x"}', {},
         "Row 0 .*its question has <image>, but its columns have a video and no image"),
        ('{"question": "1?", "answer": "2"}\n', {"category_column": "topic"}, "no column 'topic'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_with_its_row(tmp_path, text, settings, message):
    path = tmp_path / "q.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        asked(path, **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A language model with random weights and the tokenizer of the arithmetic task."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_arithmetic_data import make
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    folder = tmp_path_factory.mktemp("arithmetic")
    return make(folder, num_train=20, num_test=5, hidden_size=32, num_layers=1) / "model"


def evaluate(*words: str) -> int:
    settings = ("answer_type=gsm8k", "max_tokens=6", "batch_size=3", "device=cpu")
    return main(["evaluate", *words, *(word for word in settings if word.partition("=")[0] not in "".join(words))])


def test_the_command_writes_answers_manifest_and_report_and_counts_right_ones(model, tmp_path, capsys, monkeypatch):
    """The control answers at random; a model that is made to answer right scores 2 of 4."""
    file = rows_file(tmp_path / "sums.jsonl", SUMS)
    assert evaluate(f"checkpoint={model}", f"questions={file}", f"output_dir={tmp_path / 'a'}") == 0
    result = QuestionsResult.from_json(tmp_path / "a" / "result.json")
    assert [answer.expected for answer in result.results] == [row["answer"] for row in SUMS]
    assert result.total.successes == 0 and result.total.interval == wilson_interval(0, 4)
    assert list(result.per_category) == ["odd", "even"] and "0/4" in capsys.readouterr().out
    assert (tmp_path / "a" / "report.html").is_file()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["questions"]["temperature"] == 0 and len(manifest["model"]["sha256"]) == 64
    assert manifest["questions"]["sha256"] != manifest["model"]["sha256"] and "torch" in manifest["versions"]

    def right_half(self, prompts, seeds=None):
        found = complete(self, prompts, seeds)
        for each in found:
            is_known = "14 + 15" in each.prompt.row["question"] or "32 + 41" in each.prompt.row["question"]
            each.text = f"so {each.prompt.reference}" if is_known else "#### 0"
            each.reward, each.parts = self.rewards(each.text, each.prompt)
        return found

    from rlinf.recipes.completions import Completer

    complete = Completer.complete
    monkeypatch.setattr(Completer, "complete", right_half)
    words = (f"checkpoint={model}", f"questions={file}", f"output_dir={tmp_path / 'b'}", "file_per_question=true")
    assert evaluate(*words, f"compare={tmp_path / 'a'}") == 0
    assert QuestionsResult.from_json(tmp_path / "b" / "result.json").total.count == "2/4"
    out = capsys.readouterr().out
    assert "b - a = +50.0 percentage points" in out and "2/4" in out
    files = sorted((tmp_path / "b" / "questions").rglob("*.json"))
    names = [path.relative_to(tmp_path / "b" / "questions").as_posix() for path in files]
    assert names == ["even/1.json", "even/2.json", "even/3.json", "odd/0.json"]
    assert sum(json.loads(path.read_text())["is_correct"] for path in files) == 2
    report = (tmp_path / "b" / "report.html").read_text()
    assert "Paired comparison" in report and "4 common questions" in report


def test_results_on_other_lists_are_refused_until_allowed(model, tmp_path, capsys):
    other = {"question": "What is 1 + 1?", "answer": "#### 2"}
    for name, rows in (("a", SUMS), ("b", [*SUMS[:3], other]), ("c", random.Random(1).sample(SUMS, 4))):
        file = rows_file(tmp_path / f"{name}.jsonl", [row | {"id": row["question"]} for row in rows])
        assert evaluate(f"checkpoint={model}", f"questions={file}", f"output_dir={tmp_path / name}") == 0
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    capsys.readouterr()
    assert main(["evaluate", "--compare", a, b]) == 2
    assert "questions.sha256" in capsys.readouterr().err
    words = [f"questions={tmp_path / 'b.jsonl'}", f"output_dir={tmp_path / 'd'}", f"compare={a}"]
    assert evaluate(f"checkpoint={model}", *words) == 2 and "'allow_mismatch=[questions." in capsys.readouterr().err
    assert main(["evaluate", "--compare", a, b, "evaluation.allow_mismatch=[questions.sha256]"]) == 2
    assert "4 questions and the second 4, 3 of them in common" in capsys.readouterr().err
    assert main(["evaluate", "--compare", a, b, "evaluation.allow_mismatch=[questions]"]) == 0
    assert capsys.readouterr().out.count("0/3") == 2, "the common ones"
    page = (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert "2 questions found in only one of the two are excluded. Accepted: questions.sha256" in page
    allowed = "evaluation.allow_mismatch=[questions.sha256]"
    assert main(["evaluate", "--compare", a, str(tmp_path / "c"), allowed]) == 0, "another order is the same list"


def test_sampling_depends_on_the_question_and_not_on_the_batch(model, tmp_path):
    file = rows_file(tmp_path / "sums.jsonl", SUMS)
    texts = []
    for number, settings in enumerate((["batch_size=1"], ["batch_size=4"], ["batch_size=4", "seed=1"])):
        folder = tmp_path / str(number)
        words = [f"checkpoint={model}", f"questions={file}", f"output_dir={folder}", "temperature=1.0", *settings]
        assert evaluate(*words) == 0
        texts.append([answer.completion for answer in QuestionsResult.from_json(folder / "result.json").results])
    assert texts[0] == texts[1] and texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["questions=missing.jsonl"], "is not a file"),
        (["questions={file}", "answer_typ=gsm8k"], "There is no key 'answer_typ'"),
        (["questions={file}", "answer_type=gsm9k"], "answer_type is 'gsm9k'"),
        (["questions={file}", "temperature=-1"], "temperature is"),
        (["questions={media}", "answer_type=letter"], "its video 'x.mp4' does not exist"),
        (["questions={long}"], "its prompt has"),
        (["questions={file}", "output_dir={full}"], "nothing is overwritten"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_loads(model, tmp_path, monkeypatch, capsys, words, message):
    name = "rlinf.recipes.evaluate_questions.HuggingFaceGeneration"
    monkeypatch.setattr(name, lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "result.json").write_text("{}")
    places = {
        "file": rows_file(tmp_path / "sums.jsonl", SUMS),
        "media": rows_file(tmp_path / "media.jsonl", CHOICES),
        "long": rows_file(tmp_path / "long.jsonl", [SUMS[0], {"question": "1 + " * 400, "answer": "#### 1"}]),
        "full": tmp_path / "full",
    }
    assert evaluate(f"checkpoint={model}", *(word.format(**places) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_the_newest_export_of_a_run_is_meant(tmp_path, monkeypatch):
    for run in ("20260101000000", "20260102000000"):
        for name in ("step_10", "final"):
            folder = tmp_path / "outputs" / "sums" / run / "safetensors" / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    newest = tmp_path / "outputs" / "sums" / "20260102000000"
    assert find_model(str(newest)) == str(newest / "safetensors" / "final")
    assert find_model(str(newest.parent)) == str(newest / "safetensors" / "final")
    assert Path(find_model("latest")).resolve() == newest / "safetensors" / "final"
    (newest / "checkpoints" / "step_10").mkdir(parents=True)
    assert find_model(str(newest / "checkpoints" / "step_10")) == str(newest / "safetensors" / "step_10")
    (newest / "checkpoints" / "step_12").mkdir()
    for step in (10, 12):
        state = {"format": 2, "saved_at": step, "world_size": 1, "loop_state": {"phase": "step", "step": step}}
        (newest / "checkpoints" / f"step_{step}" / "state.json").write_text(json.dumps(state))
    assert find_model(str(newest / "checkpoints" / "step_12")) == str(newest / "safetensors" / "final"), "the last one"
    assert find_model("owner/name") == "owner/name"
    for missing in ("nowhere", str(tmp_path / "outputs" / "sums" / "nothing")):
        with pytest.raises(CheckpointError, match="There is no folder"):
            find_model(missing)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="only adapters"):
        find_model(str(tmp_path / "adapters"))
