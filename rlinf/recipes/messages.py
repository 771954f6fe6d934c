"""Check the conversations in dataset rows (messages, tool calls, tools, images, videos) and convert them to one format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.recipes.row_files import WrittenMap, WrittenNumber, as_text, scalar_text, without_nulls
from rlinf.recipes.samples import BadRowError, Message, Row

ROLES = ("system", "user", "assistant", "tool", "developer")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Additional roles in messages with ``from`` and ``value``, as in ShareGPT files."""
LEARNED_IF = ("weight", "loss_weight", "loss", "train", "train_on_turn", "training", "trainable")
"""Fields that specify whether an assistant message is learned."""
MEANINGFUL = frozenset(
    "audio channel function_call image images loss_mask loss_scale mask masked prefill prefix reasoning reasoning_content recipient "
    "rejection thinking thoughts train_detail video videos".split()
)
"""Fields that change a message's meaning, so the row is rejected unless the chat template renders them."""
READ = {"role", "content", "tool_calls", "tool_call_id", "weight"}
"""Message fields that are handled here, or can be ignored unless the template renders them."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
UNREAD_COLUMNS = (
    "weight", "sample_weight", "loss_weight", "loss_mask", "train_on_turn", "history", "functions", "chat_template_kwargs", "input",
)  # fmt: skip
IMAGE_MARK = "<image>"
"""Placeholder for the row's next image within a text."""


def as_messages(prompt: Any) -> list[Message]:
    """Convert a prompt to messages; a text or number becomes a single user message."""
    prompt = scalar_text(prompt, "its prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)


def check_messages(messages: Any) -> list[Message]:
    """Return messages normalised to role and content; raise BadRowError if they are malformed."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not len(messages):
        raise BadRowError(f"its conversation is {_short(messages)}; expected messages with role and content.")
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: Any) -> Message:
    """Convert a message in either key convention to role and content."""
    if not isinstance(message, Mapping):
        raise BadRowError(f"message {number} is {_short(message)}; expected role and content.")
    # Parquet and Arrow fill in the keys of all rows with nulls.
    given = {key: value for key, value in message.items() if value is not None}
    role_key, content_key = ("from", "value") if "from" in given and "role" not in given else ("role", "content")
    if calls := given.get("tool_calls"):
        if isinstance(calls, str):
            calls = _from_json(calls, f"the tool calls of message {number}")
        if not isinstance(calls, (list, tuple)):
            raise BadRowError(f"message {number} has tool calls {_short(calls)}; expected a list.")
        given["tool_calls"] = [_checked_call(number, call) for call in calls]
        given.setdefault(content_key, "")
    for key in (role_key, content_key):
        if key not in given:
            raise BadRowError(
                f"message {number} has no '{key}', only {', '.join(sorted(given)) or 'nulls'}; expected role and content."
            )
    role, content = given.pop(role_key), given.pop(content_key)
    role = SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
    if role not in ROLES:
        known = [*SHAREGPT_ROLES, *ROLES] if role_key == "from" else ROLES
        raise BadRowError(f"message {number} has '{role_key}': {_short(role)}; expected one of {', '.join(known)}.")
    is_parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not is_parts:
        raise BadRowError(f"message {number} has '{content_key}': {_short(content)}; expected a text or parts.")
    if role == "assistant":
        text_of(content)
    flags = {key: given.pop(key) for key in LEARNED_IF if key in given}
    for key, flag in flags.items():
        if isinstance(flag, str) or flag not in (0, 1) or (flag and "weight" not in key and role != "assistant"):
            raise BadRowError(
                f"{role} message {number} has '{key}': {_short(flag)}; expected 0, or 1 of the assistant."
            )
    given |= {"weight": 0} if 0 in flags.values() else {}
    return {**given, "role": role, "content": content}


def meaningful(message: Message) -> list[str]:
    """Return a message's fields that have an effect only if the chat template renders them."""
    return sorted(key for key in message if key in MEANINGFUL and (message[key] or "mask" in key))


def system_of(row: Row) -> str:
    """Return the system message from a column of the row, or an empty string without one."""
    texts = (as_text(row[name], f"its column '{name}'") for name in SYSTEM_COLUMNS if row.get(name) is not None)
    return next((text for text in texts if text.strip()), "")


def with_system(messages: Any, row: Row, system: str = "") -> list[Message]:
    """Prepend the recipe's or the row's system message to checked messages; raise BadRowError if they differ."""
    messages = check_messages(messages)
    if column := system_of(row):
        first = text_of(messages[0]["content"]) if messages[0]["role"] == "system" else ""
        if (system or column) != column or column not in (first or column):
            raise BadRowError(f"it has two system messages, {_short(column)} in a column and {_short(system or first)}; expected one. "
                              "Remove the column, or set train.train_policy.system_prompt=''.")  # fmt: skip
        system = system or ("" if first else column)
    return [{"role": "system", "content": system}, *messages] if system else messages


def reject_unread(row: Row) -> None:
    """Raise BadRowError for a column that is meant to change the learned tokens but is not read."""
    unread = {name: row[name] for name in UNREAD_COLUMNS if row.get(name) not in (None, "", [], 1)}
    for name, value in unread.items():
        if name != "input" or "instruction" in row:
            raise BadRowError(f"its column '{name}' is not read: {_short(value)}; expected this content in messages or prompt. Remove "
                              "the column, or read it in a dataset script.")  # fmt: skip


def _checked_call(number: int, call: Any) -> Message:
    """Convert a tool call to the format that templates expect, with arguments parsed from JSON text."""
    # Leave the arguments unchanged, because their nulls may be actual values in the file.
    call = without_nulls(dict(call)) if isinstance(call, Mapping) else call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"message {number} has the tool call {_short(call)}; expected a function with a name.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"the arguments of a tool call of message {number}")
    return {**call, "function": {**without_nulls(dict(function)), "arguments": arguments}}


def tools_of(row: Row) -> list[Any] | None:
    """Return a row's column ``tools``, or None without tools."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _from_json(tools, "the column 'tools'") if tools.strip() else None
    if tools and not isinstance(tools, list):
        raise BadRowError(f"its column 'tools' is {_short(tools)}; expected a list of JSON schemas, or its JSON text.")
    return without_nulls(tools) or None


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_hook=WrittenMap, parse_float=WrittenNumber)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{where} is {_short(text)}; expected JSON ({error}).") from None


def text_of(content: Any) -> str:
    """Return the text in a message's content; raise BadRowError for images or videos."""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise BadRowError(f"an assistant message has parts {[part.get('type') for part in content]}; expected text.")
    return "".join(str(part.get("text") or "") for part in content)


def images_of(row: Row) -> list[Any]:
    """Return a row's images from the column ``images`` or, if it has none, ``image``."""
    return _media(row, "images", "image")[1]


def _media(row: Row, *keys: str) -> tuple[str, list[Any]]:
    """Return the first of ``keys`` with media, and its entries; without media, return "" and an empty list."""
    for key in keys:
        given = row.get(key)
        entries = list(given) if isinstance(given, (list, tuple)) else [given]
        if any(map(_is_medium, entries)):
            return key, entries
    return "", []


def _is_medium(entry: Any) -> bool:
    # A missing image is null or an empty text in a table, but a map with nulls (bytes, path) in ``datasets``.
    if isinstance(entry, Mapping):
        return any(map(_is_medium, entry.values()))
    return entry is not None and not (isinstance(entry, (str, bytes)) and not entry.strip())


def reject_media(
    row: Row,
    why: str = "a text-only model would not see",
    fix: str = "set policy.model_name_or_path=<vision-language model>",
) -> None:
    """Raise BadRowError if a row has images or videos, because they would be ignored."""
    key, images = _media(row, "images", "image")
    if images:
        raise BadRowError(
            f"its column '{key}' has {sum(map(_is_medium, images))}, which {why}. Remove the column, or {fix}."
        )
    reject_videos(row)


def reject_videos(row: Row) -> None:
    """Raise BadRowError if a row has videos in a column, because only videos in messages are read."""
    key, videos = _media(row, "videos", "video")
    if videos:
        raise BadRowError(
            f"its column '{key}' has {sum(map(_is_medium, videos))}, but videos in columns are not read. Remove the column, "
            "or, for a vision-language model, put the videos in message parts, {type: video, video: <file>}."
        )


def text_parts(text: str, has_images: bool) -> list[dict[str, Any]]:
    """Split a text into message parts; if the row has images, each ``IMAGE_MARK`` becomes the next image."""
    pieces = text.split(IMAGE_MARK) if has_images else [text]
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
    for piece in pieces[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""] or parts[:1]


def text_only(message: Message) -> Message:
    """Return a message in the format for text-only models; raise BadRowError if it has images or videos."""
    content = message["content"]
    if not isinstance(content, str) and any(part.get("type") != "text" for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        raise BadRowError(f"a message has parts of type {', '.join(kinds)}, but the model is text-only; expected text. "
                          "Set policy.model_name_or_path=<vision-language model>.")  # fmt: skip
    return message | {"content": text_of(content)}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
