"""Conversations of rows: their messages, tool calls, tools, images and videos, checked and in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.recipes.samples import BadRowError

ROLES = ("system", "user", "assistant", "tool", "developer")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of messages with ``from`` and ``value``; ``ROLES`` has the other names."""
IMAGE_MARK = "<image>"
"""Stands for the next image of a row in a text."""


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt as messages: a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages with role and content; raise BadRowError for others."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not len(messages):
        raise BadRowError(
            f"its conversation is {_short(messages)}; required: a list of messages with role and content."
        )
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: Any) -> dict[str, Any]:
    """Return a message with role and content, whichever keys it has."""
    if not isinstance(message, Mapping):
        raise BadRowError(f"message {number} is {_short(message)}; required: role and content.")
    given = {key: value for key, value in message.items() if value is not None}  # files give each row the keys of all
    role_key, content_key = ("from", "value") if "from" in given and "role" not in given else ("role", "content")
    if calls := given.get("tool_calls"):
        if isinstance(calls, str):
            calls = _from_json(calls, f"the tool calls of message {number}")
        if not isinstance(calls, (list, tuple)):
            raise BadRowError(f"message {number} has the tool calls {_short(calls)}; required: a list of them.")
        given["tool_calls"] = [_checked_call(number, call) for call in calls]
        given.setdefault(content_key, "")
    for key in (role_key, content_key):
        if key not in given:
            raise BadRowError(f"message {number} has no '{key}', only {', '.join(sorted(given)) or 'nulls'}; required: role and "
                              "content, or from and value.")  # fmt: skip
    role, content = given.pop(role_key), given.pop(content_key)
    role = SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
    if role not in ROLES:
        known = [*SHAREGPT_ROLES, *ROLES] if role_key == "from" else ROLES
        raise BadRowError(f"message {number} has '{role_key}': {_short(role)}; required: one of {', '.join(known)}.")
    is_parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not is_parts:
        raise BadRowError(
            f"message {number} has '{content_key}': {_short(content)}; required: a text, or a list of parts."
        )
    if role == "assistant":
        text_of(content)
    return {**given, "role": role, "content": content}


def _checked_call(number: int, call: Any) -> dict[str, Any]:
    """Return a tool call as templates read it: with arguments as a mapping, where the row has their JSON text."""
    call = without_nulls(call)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(
            f"message {number} has the tool call {_short(call)}; required: a function with name and arguments."
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"the arguments of a tool call of message {number}")
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the column ``tools`` of a row; None if it has none."""
    tools = row.get("tools")
    is_text = isinstance(tools, str)
    if is_text:
        tools = _from_json(tools, "the column 'tools'") if tools.strip() else None
    if tools and not isinstance(tools, list):
        raise BadRowError(f"its column 'tools' is {_short(tools)}; required: a list of JSON schemas, or its JSON text.")
    return (tools if is_text else without_nulls(tools)) or None  # the nulls of a text are its own: "default": null


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRowError(f"{where} is {_short(text)}; required: JSON ({error}).") from None


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls that ``datasets`` adds, so that all rows have the same keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value


def text_of(content: Any) -> str:
    """Return the text of a content; raise BadRowError for other parts than text."""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise BadRowError(f"an answer has the parts {[part.get('type') for part in content]}; required: text only.")
    return "".join(str(part.get("text") or "") for part in content)


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row: its ``images``, else its ``image``."""
    return _media(row, "images", "image")[1]


def _media(row: Mapping[str, Any], *keys: str) -> tuple[str, list[Any]]:
    """Return the first of some columns that has media, with them; else "" and none.

    Files of tables hold null or an empty text where a row has none; ``datasets`` writes it with the keys ``bytes`` and ``path``.
    """
    for key in keys:
        given = row.get(key)
        entries = list(given) if isinstance(given, (list, tuple)) else [given]
        if any(map(_is_medium, entries)):
            return key, entries
    return "", []


def _is_medium(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        return any(map(_is_medium, entry.values()))
    return entry is not None and not (isinstance(entry, (str, bytes)) and not entry.strip())


def refuse_media(
    row: Mapping[str, Any],
    why: str = "the model, which reads text only, would not see",
    cure: str = "set policy.model_name_or_path=<vision-language model>",
) -> None:
    """Raise BadRowError if a row has images or videos that nothing would read."""
    key, images = _media(row, "images", "image")
    if images:
        raise BadRowError(
            f"its column '{key}' has {sum(map(_is_medium, images))}, which {why}; required: none. Remove the column, or {cure}."
        )
    refuse_videos(row)


def refuse_videos(row: Mapping[str, Any]) -> None:
    """Raise BadRowError if a row has videos in a column; only those in messages are read."""
    key, videos = _media(row, "videos", "video")
    if videos:
        raise BadRowError(
            f"its column '{key}' has {sum(map(_is_medium, videos))}, which nothing reads; required: none. Remove the column, or name its "
            "videos in parts of messages, {type: video, video: <file>}, for a vision-language model."
        )


def text_parts(text: str, has_images: bool) -> list[dict[str, Any]]:
    """Return a text as parts of a message; in a row with images, ``IMAGE_MARK`` is the next one."""
    pieces = text.split(IMAGE_MARK) if has_images else [text]
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
    for piece in pieces[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""] or parts[:1]


def text_only(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for a model that reads text only."""
    content = message["content"]
    if not isinstance(content, str) and any(part.get("type") != "text" for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        raise BadRowError(f"a message has parts of the type {', '.join(kinds)}, and the model reads text only; required: text. "
                          "Set policy.model_name_or_path=<vision-language model>.")  # fmt: skip
    return message | {"content": text_of(content)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
