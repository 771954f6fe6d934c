"""Tool calls and tools in conversations: what the template shows of them, and which characters are learned."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.recipes.packers import ChatPacker, PromptPacker, RawTextPacker
from rlinf.recipes.samples import BadRowError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import chat_tokenizer

HERMES = (  # as Qwen2.5: content, then calls as JSON
    "{% if tools %}<|im_start|>system<|im_sep|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
CALL_ALONE = (  # as Llama 3.1: a message with a call shows the first call, and no content
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
BLIND = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
NO_HEADER = (  # as Mistral: no generation prompt, and calls as a list after a special token
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_sep|>{% elif m.role == 'tool' %}[{{ m.content }}]"
    "{% elif m.tool_calls %}[CALLS] [{% for call in m.tool_calls %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]<|im_end|>'
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
QUESTION = {"role": "user", "content": "Sum?", "tool_calls": None}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2, "c": None}}}]
ANSWER = {"role": "tool", "content": "3", "tool_calls": None}
LAST = {"role": "assistant", "content": "Yes.", "tool_calls": None}
TOOLS = [{"type": "function", "function": {"name": "add", "description": None}}]
SHOWN_TOOL = '{"type": "function", "function": {"name": "add"}}'


def packer(template: str, kind: type = ChatPacker) -> ChatPacker:
    tokenizer = chat_tokenizer("phi")
    tokenizer.chat_template = template
    method = SimpleNamespace(
        conversation_column_name="messages", prompt_column_name="prompt", response_column_name="answer", system_prompt="",
        dataset=SimpleNamespace(name="no folder", subset=""),
    )  # fmt: skip
    found = kind()
    found.setup(
        SimpleNamespace(policy=SimpleNamespace(model_max_length=1000), train=SimpleNamespace(train_policy=method)),
        tokenizer,
    )
    return found


def shown(template: str, row: dict) -> tuple[str, str]:
    """Return the text of a sample, and the part of it that is learned."""
    made = packer(template)
    sample = made.sample(row)
    learned = [token for token, flag in zip(sample.input_ids, sample.token_mask, strict=True) if flag]
    return made.tokenizer.decode(sample.input_ids), made.tokenizer.decode(learned)


def row(content: str | None, tools: object = TOOLS, calls: list = CALLS) -> dict:
    asked = {"role": "assistant", "content": content, "tool_calls": calls}
    return {"messages": [QUESTION, asked, ANSWER, LAST], "tools": tools}


JSON_CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
TAIL = "<|im_start|>tool<|im_sep|>3<|im_end|><|im_start|>assistant<|im_sep|>Yes.<|im_end|>"


@pytest.mark.parametrize("content", [None, "", "I add."])
def test_calls_are_learned_with_the_content_and_the_end_of_the_turn(content):
    text, learned = shown(HERMES, row(content))
    call = f"{content or ''}\n<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>"
    head = f"<|im_start|>system<|im_sep|>{SHOWN_TOOL}<|im_end|><|im_start|>user<|im_sep|>Sum?<|im_end|>"
    assert text == f"{head}<|im_start|>assistant<|im_sep|>{call}{TAIL}"
    assert learned == f"{call}Yes.<|im_end|>", "neither the tools nor the answer of the tool"


def test_several_calls_of_a_message_are_learned():
    second = {"type": "function", "function": {"name": "sub", "arguments": {"x": 5}}}
    _, learned = shown(HERMES, row(None, calls=[*CALLS, second]))
    other = '\n<tool_call>\n{"name": "sub", "arguments": {"x": 5}}\n</tool_call>'
    assert learned == f"\n<tool_call>\n{JSON_CALL}\n</tool_call>{other}<|im_end|>Yes.<|im_end|>"


def test_a_template_that_shows_the_call_in_place_of_the_content():
    text, learned = shown(CALL_ALONE, row(None))
    assert text.startswith("add;<|im_start|>user")
    assert learned == '{"name": "add", "parameters": {"a": 1, "b": 2}}<|im_end|>Yes.<|im_end|>'
    with pytest.raises(BadRowError, match="drops an assistant message"):
        shown(CALL_ALONE, row("I add."))


def test_calls_are_learned_from_their_beginning_where_the_template_has_no_generation_prompt():
    text, learned = shown(NO_HEADER, row(None))
    assert text.startswith("add;<|im_start|>Sum?<|im_sep|>[CALLS] [")
    assert learned == f"[CALLS] [{JSON_CALL}]<|im_end|>Yes.<|im_end|>"


def test_the_nulls_of_a_json_text_are_kept_and_calls_may_be_one():
    tools = [{"type": "function", "function": {"name": "add", "default": None}}]
    text, learned = shown(HERMES, row(None, json.dumps(tools), json.dumps(CALLS)))
    assert '"default": null' in text and JSON_CALL.replace("}}", ', "c": null}}') in learned
    assert '"default"' not in shown(HERMES, row(None, tools))[0], "control: those of a table are no part of the schema"


def test_what_shows_no_tools_refuses_them():
    raw, prompts = RawTextPacker("messages"), packer(HERMES, PromptPacker)
    for made in (raw, prompts):
        made.tokenizer, made.max_length = packer(HERMES).tokenizer, 1000
    with pytest.raises(BadRowError, match="raw text cannot represent tools"):
        raw.sample(row(None))
    with pytest.raises(BadRowError, match="raw text cannot represent tools"):
        raw.sample({"messages": [QUESTION, LAST], "tools": TOOLS})
    assert raw.sample({"messages": [QUESTION, LAST], "tools": None}).input_ids, "control"
    method = prompts.config.train.train_policy
    method.response_column_name = ""
    assert prompts.prompt({"prompt": "2+2?"}).input_ids, "control"
    with pytest.raises(BadRowError, match="cannot contain its column 'tools'"):
        prompts.prompt({"prompt": "2+2?", "tools": TOOLS})
    method.system_prompt = "Be brief."
    with pytest.raises(
        BadRowError, match="cannot contain train.train_policy.system_prompt; expected a list of messages"
    ):
        prompts.prompt({"prompt": "2+2?"})


def test_arguments_and_tools_may_be_json_texts():
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    assert shown(HERMES, row(None, json.dumps(TOOLS).replace(', "description": null', ""), calls)) == shown(
        HERMES, row(None)
    )


def test_the_tools_reach_a_prompt():
    made = packer(HERMES)
    made.config.train.train_policy.response_column_name = ""
    asked = {"messages": [QUESTION], "tools": TOOLS}
    assert SHOWN_TOOL in made.tokenizer.decode(made.prompt(asked).input_ids)
    assert SHOWN_TOOL not in made.tokenizer.decode(made.prompt({"messages": [QUESTION]}).input_ids)


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        (BLIND, row("I add.", None), "does not render its tool calls"),
        (BLIND, {"messages": [QUESTION, LAST], "tools": TOOLS}, "does not render its column 'tools'"),
        (HERMES, row(None, None, [{"function": {"arguments": {}}}]), "message 1 has the tool call .* a function with a name"),
        (HERMES, row(None, 3), "its column 'tools' is 3; expected a list of JSON schemas"),
        (HERMES, row(None, None, []), "message 1 has no 'content'"),
    ],
    ids=["blind to calls", "blind to tools", "no name", "no list", "neither"],
)  # fmt: skip
def test_calls_that_the_model_would_not_see_are_refused(template, given, message):
    with pytest.raises(BadRowError, match=message):
        shown(template, given)
