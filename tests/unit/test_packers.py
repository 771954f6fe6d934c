"""Packers: which tokens are learned, token by token, against what each chat template writes by hand."""

import random
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlinf.errors import ConfigError
from rlinf.recipes.packers import ChatPacker, PromptPacker, RawTextPacker
from rlinf.recipes.questions import Question, QuestionPacker
from rlinf.recipes.samples import BadRowError, truncated_and_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import PIECES, SPECIAL, chat_tokenizer

KINDS = ("bytes", "trimmed", "words")


def recipe(**settings) -> SimpleNamespace:
    """Return the keys of a recipe that packers read."""
    policy = SimpleNamespace(model_max_length=settings.pop("max_length", 1000))
    names = {"conversation_column_name": "messages", "prompt_column_name": "prompt", "response_column_name": "answer"}
    dataset = SimpleNamespace(name=settings.pop("name", "no folder"), subset="")
    method = SimpleNamespace(**{"system_prompt": ""} | names | settings, dataset=dataset)
    return SimpleNamespace(policy=policy, train=SimpleNamespace(train_policy=method))


def ready(packer, processor, **settings):
    packer.setup(recipe(**settings), processor)
    return packer


@lru_cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable ones stand for themselves."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


def token_bytes(tokenizer: PreTrainedTokenizerFast, token: int, kind: str, special: set[str]) -> bytes:
    """Return the bytes that a token stands for, from its name alone."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name in special:
        return name.encode()
    if kind == "words":
        is_byte = len(name) == 6 and name.startswith("<0x")
        return bytes([int(name[3:5], 16)]) if is_byte else name.replace("▁", " ").encode()
    alphabet = byte_alphabet()
    return bytes(alphabet[char] for char in name)


def slow_mask(tokenizer, ids: list[int], pieces: list[tuple[str, bool]], kind: str, special: set[str]) -> list[bool]:
    """Return which tokens have a byte of a learned piece, by adding up the bytes of tokens and of pieces."""
    learned = [flag for text, flag in pieces for _ in text.encode()]
    mask, position, after_special = [], 0, True
    for token in ids:
        written = token_bytes(tokenizer, token, kind, special)
        if kind == "words" and after_special and written.startswith(b" "):
            written = written[1:]  # a text, and what follows a special token, starts with a space of its own
        after_special = written.decode(errors="ignore") in special
        mask.append(any(learned[position : position + len(written)]))
        position += len(written)
    assert position == len(learned), "the tokens are not the text that the template writes"
    return mask


WORDS = [
    "yes", "Paris", "It is", " 42", "1, 2", "\n", "  ", "é", "日本", "🙂", "x+1", ".", "no.\n\n", "user", "[INST]",
    "def f(x):", "</think>",
]  # fmt: skip


def conversation(generator: random.Random, family: str) -> list[dict]:
    """Return a conversation of random words."""

    def text() -> str:
        words = [generator.choice(WORDS[: -1 if family == "qwen" else None]) for _ in range(generator.randint(1, 6))]
        return "".join(words)

    messages = [{"role": "system", "content": "s" + text()}] * generator.randint(0, 1)
    for _ in range(generator.randint(1, 3)):
        messages += [{"role": "user", "content": "a" + text()}, {"role": "assistant", "content": "b" + text() + "c"}]
    return messages


CASES = [(family, kind) for family in PIECES for kind in KINDS if kind != "words" or family in ("mistral", "gemma")]
"""The public models of the other families have byte-level tokenizers."""


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_answers_and_their_end_tokens_are_learned_and_nothing_else(family, kind):
    tokenizer = chat_tokenizer(family, kind)
    packer, generator = ready(ChatPacker(), tokenizer), random.Random(1)
    special = {"<pad>", "<s>", "</s>", *SPECIAL[family]}
    for _ in range(12):
        messages = conversation(generator, family)
        sample = packer.sample({"messages": messages})
        assert sample.input_ids == tokenizer.apply_chat_template(messages, return_dict=False), "the template's tokens"
        pieces = PIECES[family](messages)
        expected = slow_mask(tokenizer, sample.input_ids, pieces, kind, special)
        assert sample.token_mask == expected, messages
        assert sum(expected) < len(expected)
        control = slow_mask(
            tokenizer, sample.input_ids, [(text, not learned) for text, learned in pieces], kind, special
        )
        assert sample.token_mask != control


QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris"}


def learned(tokenizer, sample) -> list[str]:
    """Return the text of each run of learned tokens."""
    runs, last = [], False
    for token, is_learned in zip(sample.input_ids, sample.token_mask, strict=True):
        if is_learned:
            runs[-1:] = [runs[-1] + [token]] if last else [*runs[-1:], [token]]
        last = is_learned
    return [tokenizer.decode(run) for run in runs]


def test_thoughts_that_a_template_drops_or_moves_are_followed():
    tokenizer = chat_tokenizer("qwen")
    packer = ready(ChatPacker(), tokenizer)
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis"}
    assert learned(tokenizer, packer.sample({"messages": [QUESTION, thought, QUESTION, thought]})) == [
        "Paris<|im_end|>",
        "<think>\nhm\n</think>\n\nParis<|im_end|>",
    ]


def test_padding_that_is_the_end_token_and_padding_in_a_text_change_nothing():
    tokenizer = chat_tokenizer("phi")
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    packer = ready(ChatPacker(), tokenizer)
    row = {"messages": [QUESTION | {"content": "<|im_end|>" * 12}, ANSWER | {"content": "a" + "<|im_end|>" * 12}]}
    assert learned(tokenizer, packer.sample(row)) == ["a" + "<|im_end|>" * 13]


def test_a_long_text_is_cut_and_a_cut_before_the_answer_is_refused():
    tokenizer = chat_tokenizer("phi")
    row = {"messages": [QUESTION, ANSWER | {"content": "Paris " * 50}]}
    whole = ready(ChatPacker(), tokenizer).sample(row)
    cut = ready(ChatPacker(), tokenizer, max_length=60).sample(row)
    assert (
        cut.input_ids == whole.input_ids[:60] and cut.token_mask == whole.token_mask[:60] and sum(cut.token_mask) > 10
    )
    with pytest.raises(BadRowError, match="none of its first 5 tokens is learned"):
        ready(ChatPacker(), tokenizer, max_length=5).sample(row)


def test_mistral_refuses_roles_that_do_not_alternate_and_raw_text_takes_them():
    tokenizer = chat_tokenizer("mistral")
    row = {"messages": [QUESTION, QUESTION, ANSWER]}
    with pytest.raises(BadRowError, match="roles must alternate .*raw_text_sft.py, which needs no chat template"):
        ready(ChatPacker(), tokenizer).sample(row)
    sample = ready(RawTextPacker(), tokenizer).sample(row)
    expected = "user: What is the capital of France?\nuser: What is the capital of France?\nassistant: Paris"
    assert tokenizer.decode(sample.input_ids) == expected and all(sample.token_mask)


def test_raw_text_is_learned_whole():
    tokenizer = chat_tokenizer("plain")
    packer = ready(RawTextPacker(column="conversation"), tokenizer, max_length=8)
    assert ready(RawTextPacker(), tokenizer).text({"messages": "a: b"}) == "a: b"
    sample = packer.sample({"conversation": "The quick brown fox jumps over the lazy dog"})
    assert tokenizer.decode(sample.input_ids).startswith("The quick") and sample.token_mask == [True] * 8
    assert tokenizer.bos_token_id not in sample.input_ids
    with pytest.raises(BadRowError, match="'conversation' is empty"):
        packer.sample({"conversation": ""})
    for call in (packer.prompt, packer.pair):
        with pytest.raises(ConfigError, match="raw text has no prompt"):
            call({"conversation": "a"})


def test_messages_of_sharegpt_are_those_with_role_and_content():
    system = {"role": "system", "content": "Be brief."}
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[each["role"]], "value": each["content"]} for each in (system, QUESTION, ANSWER)]
    packer = ready(ChatPacker(), chat_tokenizer("qwen"))
    expected = packer.sample({"messages": [system, QUESTION, ANSWER]})
    assert packer.sample({"messages": sharegpt}) == expected
    nulls = [{"role": None, "content": None, **message} for message in sharegpt]  # as a file of both kinds is read
    assert packer.sample({"messages": nulls}) == expected
    asked = [packer.prompt({"messages": each, "answer": "Paris"}) for each in (sharegpt[:2], [system, QUESTION])]
    assert asked[0].input_ids == asked[1].input_ids
    swapped = [sharegpt[0], *({**each, "from": "gpt" if each["from"] == "human" else "human"} for each in sharegpt[1:])]
    assert packer.sample({"messages": swapped}) != expected, "control"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no column 'messages'. Known: text. Set train.train_policy.conversation_column_name=<column>"),
        ({"messages": None}, "column 'messages' is null"),
        ({"messages": []}, "its conversation is .*expected messages with role"),
        ({"messages": ["a"]}, "message 0 is 'a'; expected role and content"),
        (
            {"messages": [QUESTION, {"content": "b"}]},
            "message 1 has no 'role', only content",
        ),
        (
            {"messages": [{"from": "alien", "value": "b"}]},
            "message 0 has 'from': 'alien'; expected one of human, gpt, system",
        ),
        ({"messages": [QUESTION]}, "no assistant message"),
        (
            {"messages": [QUESTION | {"content": [{"type": "image"}]}, ANSWER]},
            "type image, but the model is text-only",
        ),
        (
            {"messages": [QUESTION, ANSWER | {"content": [{"type": "image"}]}]},
            "an assistant message has parts .'image'.; expected text",
        ),
        ({"messages": [QUESTION | {"content": "\ufdd0"}, ANSWER]}, "characters U.FDD0"),
    ],
)
def test_bad_rows_are_named(row, message):
    with pytest.raises(BadRowError, match=message):
        ready(ChatPacker(), chat_tokenizer("phi")).sample(row)


IMAGE_ROWS = {
    "images": ({"images": ["a.png", "b.png"]}, "its column 'images' has 2, which a text-only model would not see"),
    "image": ({"image": b"jpeg", "images": None}, "its column 'image' has 1, which a text-only model"),
    "video": ({"video": "a.mp4"}, "its column 'video' has 1, but videos in columns are not read"),
    "none": ({"image": None, "images": [], "video": None, "videos": []}, None),
    "an empty text": ({"image": "", "video": " "}, None),
    "empty entries": ({"images": [None, ""], "videos": [None], "image": {"bytes": None, "path": None}}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGE_ROWS)
def test_images_are_not_dropped_when_the_model_reads_text_only(name):
    images, message = IMAGE_ROWS[name]
    question, answer = ({"role": role, "content": "Yes."} for role in ("user", "assistant"))
    tokenizer = chat_tokenizer("plain")
    chat, raw, prompts = (
        ready(ChatPacker(), tokenizer),
        ready(RawTextPacker("messages"), tokenizer),
        ready(PromptPacker(), tokenizer),
    )
    cases = {
        "sample": (chat.sample, {"messages": [question, answer]}),
        "prompt": (chat.prompt, {"messages": [question], "answer": "Yes."}),
        "pair": (chat.pair, {"prompt": [question], "chosen": "Yes.", "rejected": "No."}),
        "text": (raw.sample, {"messages": [question, answer]}),
        "text of a prompt": (prompts.prompt, {"prompt": "Yes?", "answer": "Yes."}),
    }
    for pack, row in cases.values():
        if message is None:
            assert pack(row | images)
            continue
        words = message
        if pack == raw.sample and "model" in message:
            words = message.split(", which")[0] + ", which are not text"
        with pytest.raises(BadRowError, match=words):
            pack(row | images)


def test_models_without_template_or_offsets_are_refused():
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template. .*raw_text_sft.py"):
        ready(ChatPacker(), tokenizer)
    slow = SimpleNamespace(chat_template="x", is_fast=False)
    with pytest.raises(ConfigError, match="expected a fast tokenizer"):
        ready(ChatPacker(), slow)


def test_a_template_that_changes_answers_is_refused():
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | replace('Par', 'par')")
    packer = ready(ChatPacker(), tokenizer)
    assert learned(tokenizer, packer.sample({"messages": [QUESTION, ANSWER]})) == ["paris<|im_end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("replace('Par', 'par')", "truncate(5, true, '', 0)")
    with pytest.raises(BadRowError, match="the chat template .* its assistant messages"):
        packer.sample({"messages": [QUESTION, ANSWER]})


def test_a_token_that_joins_prompt_and_answer_is_refused():
    tokenizer = chat_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'The qui' if m['role'] == 'user' else m['content'] }}{% endfor %}"
    )
    with pytest.raises(BadRowError, match="a token joins '.*' of the chat template with an assistant message"):
        ready(ChatPacker(), tokenizer).sample({"messages": [QUESTION, ANSWER | {"content": "ck brown"}]})


def test_an_end_token_at_which_the_run_does_not_stop_is_announced(caplog):
    tokenizer = chat_tokenizer("gpt_oss")
    packer, rows = ready(ChatPacker(), tokenizer), ([QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION, ANSWER])
    packer.end_tokens = [tokenizer.convert_tokens_to_ids("<|return|>")]
    for messages, warns in zip(rows, (False, True), strict=True):
        packer.sample({"messages": messages})
        assert ("'<|end|>'" in caplog.text) == warns


def test_a_prompt_that_is_rendered_already_begins_once_and_never_with_an_end():
    tokenizer = chat_tokenizer("mistral")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [("<s>", begin), ("</s>", end)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=ends
    )
    packer = ready(PromptPacker(), tokenizer)
    rendered = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    by_messages = packer.prompt({"prompt": [QUESTION], "answer": ""}).input_ids
    assert rendered.startswith("<s>") and packer.prompt({"prompt": rendered, "answer": ""}).input_ids == by_messages
    plain = packer.prompt({"prompt": "The quick", "answer": ""}).input_ids
    assert plain == [begin, *tokenizer("The quick", add_special_tokens=False)["input_ids"]]
    questions = QuestionPacker(Path(), 1000)
    questions.prepare(tokenizer)
    asked = [Question("1", "", text, text, "", {}, False) for text in (rendered, "The quick")]
    assert [questions.question(each).input_ids for each in asked] == [by_messages, plain]


def test_a_system_prompt_and_columns_of_prompt_and_response():
    tokenizer = chat_tokenizer("phi")
    packer = ready(ChatPacker(), tokenizer, system_prompt="Be brief.", conversation_column_name="conversations")
    sample = packer.sample({"prompt": QUESTION["content"], "answer": "Paris"})
    system = {"role": "system", "content": "Be brief."}
    assert sample.input_ids == tokenizer.apply_chat_template([system, QUESTION, ANSWER], return_dict=False)
    assert learned(tokenizer, sample) == ["Paris<|im_end|>"]


def test_prompts_end_where_the_model_answers():
    tokenizer = chat_tokenizer("phi")
    for prompt in ([QUESTION], [QUESTION, ANSWER, QUESTION]):
        row = {"prompt": prompt, "answer": 7, "level": 3}
        found = ready(PromptPacker(), tokenizer).prompt(row)
        expected = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert (found.input_ids, found.reference, found.row) == (expected, "7", row)
    as_it_is = ready(PromptPacker(), tokenizer, response_column_name="").prompt({"prompt": "The quick"})
    assert as_it_is.input_ids == tokenizer("The quick")["input_ids"] and as_it_is.reference is None
    tokenizer.chat_template = None
    assert (
        ready(PromptPacker(), tokenizer).prompt({"prompt": "The quick", "answer": "x"}).input_ids == as_it_is.input_ids
    )
    with pytest.raises(BadRowError, match="last message is from the assistant"):
        ready(PromptPacker(), chat_tokenizer("phi")).prompt({"prompt": [QUESTION, ANSWER], "answer": ""})
    row = {"prompt": [QUESTION], "answer": ""}
    length = len(ready(PromptPacker(), chat_tokenizer("phi")).prompt(row).input_ids)
    assert ready(PromptPacker(), chat_tokenizer("phi"), max_length=length + 1).prompt(row)
    with pytest.raises(
        BadRowError, match=f"prompt has {length} tokens; expected fewer than policy.model_max_length={length}"
    ):
        ready(PromptPacker(), chat_tokenizer("phi"), max_length=length).prompt(row)
    with pytest.raises(BadRowError, match="no column 'answer'.*response_column_name"):
        ready(PromptPacker(), chat_tokenizer("phi")).prompt({"prompt": [QUESTION]})


def test_the_last_answers_of_a_preference_are_compared():
    tokenizer = chat_tokenizer("phi")
    packer = ready(ChatPacker(), tokenizer)
    rows = (
        {"prompt": QUESTION["content"], "chosen": "Paris", "rejected": "London"},
        {"prompt": [QUESTION, ANSWER, QUESTION], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "London"}]},
        {
            "chosen": [QUESTION, ANSWER, QUESTION, ANSWER],
            "rejected": [QUESTION, ANSWER, QUESTION, ANSWER | {"content": "London"}],
        },
    )
    for row in rows:
        chosen, rejected = packer.pair(row)
        assert learned(tokenizer, chosen) == ["Paris<|im_end|>"] and learned(tokenizer, rejected) == [
            "London<|im_end|>"
        ]
        first = chosen.token_mask.index(True)
        assert chosen.input_ids[:first] == rejected.input_ids[:first]
    with pytest.raises(BadRowError, match="no column 'rejected'"):
        packer.pair({"prompt": "a", "chosen": "b"})


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
TWO_TURNS = [("user", "a"), ("assistant", "wrong"), ("user", "b"), ("assistant", "right")]


def turns(*fields: dict) -> list[dict]:
    """Return ``TWO_TURNS`` as messages, with further fields for the first of them."""
    messages = [{"role": role, "content": text} for role, text in TWO_TURNS]
    return [message | extra for message, extra in zip(messages, [*fields, {}, {}, {}, {}], strict=False)]


def learned_text(row: dict, **settings) -> str:
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = settings.pop("template", CHATML)
    sample = ready(ChatPacker(), tokenizer, **settings).sample(row)
    return tokenizer.decode([token for token, flag in zip(sample.input_ids, sample.token_mask, strict=True) if flag])


@pytest.mark.parametrize(
    "field", [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"loss": False}, {"train_on_turn": 0}]
)
def test_an_answer_that_is_not_to_be_learned_is_context(field):
    assert learned_text({"messages": turns({}, field)}) == "right<|im_end|>"
    assert learned_text({"messages": turns({}, dict.fromkeys(field, 1))}) == "wrong<|im_end|>right<|im_end|>", "control"
    assert learned_text({"messages": turns({}, dict.fromkeys(field))}) == "wrong<|im_end|>right<|im_end|>", (
        "null is none"
    )
    tokenizer = chat_tokenizer("phi")
    with pytest.raises(BadRowError, match="'weight'"):
        ready(RawTextPacker(), tokenizer).sample({"messages": turns({}, field)})
    with pytest.raises(BadRowError, match="no assistant message is learned"):
        learned_text({"messages": turns({}, field)[:2]})


@pytest.mark.parametrize(
    ("message", "field"),
    [(1, {"weight": 0.5}), (0, {"train": True}), (1, {"thinking": "hm"}), (1, {"mask": False}),
     (0, {"images": ["a.png"]}), (1, {"function_call": {"name": "f"}})],
)  # fmt: skip
def test_fields_with_a_meaning_that_nothing_reads_are_rejected_by_name(message, field):
    (name,) = field
    with pytest.raises(BadRowError, match=f"'{name}'"):
        learned_text({"messages": turns(*([{}] * message), field)})


def test_reasoning_is_learned_where_the_template_shows_it_and_else_rejected():
    row = {"messages": turns({}, {"reasoning_content": "hm"})}
    assert learned_text(row) == "<think>hm</think>wrong<|im_end|>right<|im_end|>"
    with pytest.raises(BadRowError, match="'reasoning_content'"):
        learned_text(row, template=CHATML.replace("m.reasoning_content", "m.nothing"))


def test_a_system_column_is_the_system_message():
    def text(row: dict, **settings) -> str:
        tokenizer = chat_tokenizer("phi")
        tokenizer.chat_template = CHATML
        return tokenizer.decode(ready(ChatPacker(), tokenizer, **settings).sample(row).input_ids)

    system = {"role": "system", "content": "Be brief."}
    expected = text({"messages": [system, *turns()]})
    for row in ({"messages": turns(), "system": "Be brief."}, {"messages": [system, *turns()], "system": "Be brief."}):
        assert text(row) == expected
    assert text({"messages": turns(), "system": " "}) == text({"messages": turns()})
    for row, settings in (({"messages": [system, *turns()], "system": "Be long."}, {}),
                          ({"messages": turns(), "system": "Be long."}, {"system_prompt": "Be brief."})):  # fmt: skip
        with pytest.raises(BadRowError, match="Be long.*Be brief.*system_prompt=''"):
            text(row, **settings)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "system": "Be brief."}
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = CHATML
    assert all("Be brief." in tokenizer.decode(each.input_ids) for each in ready(ChatPacker(), tokenizer).pair(pair))
    with pytest.raises(BadRowError, match="system"):
        ready(PromptPacker(), tokenizer).prompt({"prompt": "q", "answer": "a", "system": "Be brief."})
    with pytest.raises(BadRowError, match="'system'.*Be brief"):
        text({"messages": turns(), "system": ["Be brief."]})


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ({"weight": 0.5}, {}),
        ({"loss_mask": [1, 0]}, {}),
        ({"history": [["a", "b"]]}, {}),
        ({"input": "2 + 2"}, {"prompt_column_name": "instruction"}),
    ],
)
def test_columns_with_a_meaning_that_nothing_reads_are_rejected_by_name(field, settings):
    row = {"instruction": "Add.", "prompt": "Add.", "answer": "4"}
    (name,) = field
    with pytest.raises(BadRowError, match=f"column '{name}'"):
        learned_text(row | field, **settings)
    assert learned_text(row | dict.fromkeys(field), **settings) == "4<|im_end|>", "control"


def test_chosen_and_rejected_answer_the_same_prompt():
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = CHATML
    packer = ready(ChatPacker(), tokenizer)
    whole = lambda asked, answer: [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]  # noqa: E731
    for row in (
        {"chosen": whole("q1", "a"), "rejected": whole("q2", "b")},
        {"chosen": whole("q1", "a"), "rejected": "b", "prompt": "q2"},
        {"chosen": whole("q1", "a"), "rejected": whole("q1", "b")[:1]},
        {"chosen": [*whole("q1", "a"), *whole("q", "a")], "rejected": whole("q1", "b")},
    ):
        with pytest.raises(BadRowError, match="same prompt"):
            packer.pair(row)
    first, second = packer.pair({"chosen": whole("q1", "a"), "rejected": "b", "prompt": "q1"})
    assert first.input_ids[:4] == second.input_ids[:4] != [], "control"


def test_what_a_cut_leaves_is_noted():
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = CHATML
    row = {"prompt": "q", "chosen": "long " * 30 + "yes", "rejected": "long " * 30 + "no", "messages": turns()}
    for length, is_truncated, is_equal in ((1000, False, False), (20, True, True)):
        packer = ready(ChatPacker(), tokenizer, max_length=length)
        assert truncated_and_equal(packer.pair(row)) == (is_truncated, is_equal)
    whole = len(ready(RawTextPacker(), tokenizer).sample(row).input_ids)
    for kind in (ChatPacker, RawTextPacker):
        assert ready(kind(), tokenizer, max_length=14).sample(row).is_truncated
    assert not ready(RawTextPacker(), tokenizer, max_length=whole).sample(row).is_truncated, "control"
