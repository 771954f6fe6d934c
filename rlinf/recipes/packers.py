"""Rows of a dataset to tokens: chat templates, masks of the learned tokens, images and videos.

Learned parts are found in the text, not among tokens. The answers are marked in the messages, the chat template renders them, and
the marks in the result say where each answer is. The offsets of the tokenizer then give its tokens.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from PIL import Image

from rlinf.errors import ConfigError, did_you_mean
from rlinf.images import ImageError
from rlinf.images import open_image as open_rgb
from rlinf.models.end_tokens import marked_tokens
from rlinf.recipes.datasets import local_folder
from rlinf.recipes.messages import (
    IMAGE_MARK,
    MEANINGFUL,
    READ,
    as_messages,
    check_messages,
    images_of,
    meaningful,
    reject_media,
    reject_unread,
    reject_videos,
    system_of,
    text_of,
    text_only,
    text_parts,
    tools_of,
    with_system,
)
from rlinf.recipes.row_files import as_answer, as_text, scalar_text
from rlinf.recipes.samples import BadRowError, Prompt, Sample
from rlinf.recipes.videos import find_video, read_frames

logger = logging.getLogger("rlinf")

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around an answer: characters that Unicode reserves for use inside a program."""
RAW_TEXT_HINT = (
    "Use examples/reasoning/tools/dataset/raw_text_sft.py, which needs no chat template: "
    "rlinf launch --config <recipe> examples/reasoning/tools/dataset/raw_text_sft.py"
)
MAX_PREVIEWS = 4
"""Images of a prompt that the report shows."""


class Packer(Protocol):
    """Turns rows into tokens. A recipe calls ``setup`` once, and then one of the others for each row.

    The three raise BadRowError for a row that cannot be used.
    """

    def setup(self, config: Any, processor: Any) -> None:
        """Take the configuration and the tokenizer, or for a vision-language model its processor."""

    def sample(self, row: dict[str, Any]) -> Sample:
        """Return the tokens to learn from (SFT)."""

    def pair(self, row: dict[str, Any]) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected answer to one prompt (DPO)."""

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Return the tokens to continue (GRPO)."""


def column(row: Mapping[str, Any], name: str, setting: str = "") -> Any:
    """Return a column of a row, with its file's text for all but lists and maps; BadRowError if it is missing or null.

    ``setting`` is the key that names the column, if one does.
    """
    if name not in row:
        fix = f" Set {setting}=<column>." if setting else ""
        raise BadRowError(f"it has no column '{name}'.{did_you_mean(name, row)}{fix}")
    if row[name] is None:
        raise BadRowError(f"its column '{name}' is null; required: a value.")
    return scalar_text(row[name], f"its column '{name}'")


class RawTextPacker:
    """Learns every token of a text, without a chat template, so the roles may come in any order.

    A list of messages becomes one line ``role: content`` for each, joined by newlines. A string stays as it is.
    ``column`` holds the conversation; None: ``train.train_policy.conversation_column_name``.
    """

    def __init__(self, column: str | None = None) -> None:
        self.column = column

    def setup(self, config: Any, processor: Any) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_length = config.policy.model_max_length
        self.column = self.column or config.train.train_policy.conversation_column_name

    def text(self, row: dict[str, Any]) -> str:
        """Return the text of a row."""
        reject_media(row, "are no text", "use the dataset script hf_vlm_sft.py")
        conversation = column(row, self.column, "train.train_policy.conversation_column_name")
        if isinstance(conversation, str):
            return conversation
        messages = [text_only(message) for message in with_system(conversation, row)]
        for field in (key for message in messages for key in (*meaningful(message), *(message.keys() & {"weight"}))):
            raise BadRowError(f"raw text has no place for '{field}' of a message; required: no such field.")
        if tools_of(row) or any(message.get("tool_calls") for message in messages):
            raise BadRowError(
                "raw text shows no tools and no tool calls; required: a chat template that does, or the calls as text."
            )
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def sample(self, row: dict[str, Any]) -> Sample:
        """Return the text, cut at the longest row; every token is learned."""
        every = self.tokenizer(self.text(row), add_special_tokens=False)["input_ids"]
        ids = every[: self.max_length]
        if not ids:
            raise BadRowError(f"its column '{self.column}' is empty; required: text.")
        return Sample(ids, [True] * len(ids), is_cut=len(every) > len(ids))

    def pair(self, row: dict[str, Any]) -> tuple[Sample, Sample]:
        """Reject: preferences need a prompt."""
        raise ConfigError("raw text has no prompt and no answers; DPO needs both. Use the dataset script dpo_pairs.py")

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Reject: text that is learned whole leaves nothing to generate."""
        raise ConfigError("raw text has no prompt; GRPO needs one. Use the dataset script gsm8k_grpo.py")


class ChatPacker:
    """Conversations by the chat template of the model.

    The loss covers what the model writes: the content of each assistant message, what the template puts between the generation
    prompt and this content, and the end token after it.

    Subclass it and replace ``messages`` (or ``reference``) to read rows of another shape.

    A message is ``{role, content}``, or ``{from, value}`` as in ShareGPT's files. The content is a text, or a list of parts: ``{type: text, text}``; ``{type: image, image}``,
    or without ``image`` the next one (or number ``index``) of the column ``images``; ``{type: video, video, fps, max_pixels}``,
    whose frames the model reads as images. In a text, ``<image>`` is the next one of the column ``images``, if the row has any.

    An assistant message may have ``tool_calls``, with or without content; they are learned too. The template gets them, and the
    column ``tools``: a list of JSON schemas, or its JSON text.
    """

    end_tokens: Sequence[int] | None = None
    """At which generation stops, as the run sets it; None: not known."""

    def setup(self, config: Any, processor: Any) -> None:
        """See ``Packer``. Raise ConfigError if the tokenizer has no chat template, or gives no offsets."""
        self.config, self.processor = config, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.takes_images = hasattr(processor, "image_processor")
        self.max_length = config.policy.model_max_length
        self.folder = local_folder(config.train.train_policy.dataset.name) or Path()
        if not getattr(processor, "chat_template", None):
            raise ConfigError(f"The {type(processor).__name__} of the model has no chat template. {RAW_TEXT_HINT}")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"The {type(self.tokenizer).__name__} gives no offsets of its tokens; required: a fast tokenizer."
            )
        self._special = marked_tokens(self.tokenizer)
        self._header = self._generation_prompt()
        self._has_warned = False
        self._fields: set[str] = set()

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the conversation of a row; override it for another kind of row.

        A row without the column of conversations may have a prompt and a response.
        """
        method = self.config.train.train_policy
        name, prompt, response = method.conversation_column_name, method.prompt_column_name, method.response_column_name
        reject_unread(row)
        if name not in row and prompt in row and response in row:
            answer = {"role": "assistant", "content": as_text(column(row, response), f"its column '{response}'")}
            return [*as_messages(column(row, prompt)), answer]
        return column(row, name, "train.train_policy.conversation_column_name")

    def reference(self, row: dict[str, Any]) -> Any:
        """Return the right answer of a row, or a list of them, which the rewards get; None if the recipe names no column for it."""
        name = self.config.train.train_policy.response_column_name
        return column(row, name, "train.train_policy.response_column_name") if name else None

    def sample(self, row: dict[str, Any]) -> Sample:
        """Return a conversation; of a text that is too long, the start."""
        return self._pack(*self._resolved(self.messages(row), row), tools_of(row))

    def pair(self, row: dict[str, Any]) -> tuple[Sample, Sample]:
        """Return two conversations that differ in their last answer, which alone is learned.

        ``chosen`` and ``rejected`` are answers to ``prompt`` (a text or messages), or whole conversations.
        """
        reject_unread(row)
        chosen, rejected = (self._candidate(row, name) for name in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1] or {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
            raise BadRowError("its columns 'chosen' and 'rejected' are not two answers to the same prompt; required: equal messages, and "
                              "then one answer of the assistant each.")  # fmt: skip
        first, second = (
            self._pack(*self._resolved(messages, row), tools_of(row), last_only=True) for messages in (chosen, rejected)
        )
        return first, second

    def _candidate(self, row: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """Return the conversation that ends with the answer ``chosen`` or ``rejected``."""
        answer = column(row, name)
        answer = check_messages([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)
        if answer[0]["role"] != "assistant":
            return answer
        name = self.config.train.train_policy.prompt_column_name or "prompt"
        return [*as_messages(column(row, name, "train.train_policy.prompt_column_name")), *answer]

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Return a conversation up to the place where the model answers."""
        messages, images = self._resolved(self.messages(row), row)
        if messages[-1]["role"] == "assistant":
            raise BadRowError("its last message is of the assistant; required of a prompt: of the user.")
        ids, _, inputs = self._encode(self._render(messages, tools_of(row), add_generation_prompt=True), images)
        self._check_length(len(ids))
        previews = [preview(image) for image in images[:MAX_PREVIEWS]]
        return Prompt(ids, inputs, as_answer(self.reference(row), "its right answer"), row, previews)

    def _check_length(self, length: int) -> None:
        if length >= self.max_length:
            raise BadRowError(f"its prompt has {length} tokens; required: fewer than policy.model_max_length={self.max_length}. "
                              f"Set policy.model_max_length={2 * length} if the model has that context.")  # fmt: skip

    def _generation_prompt(self) -> str:
        """Return what the template appends to have the model answer; empty if it appends nothing."""
        question = [{"role": "user", "content": self._content("a")}]
        text = self._render(question)
        prompt = self._render(question, add_generation_prompt=True)
        return prompt[len(text) :] if prompt.startswith(text) else ""

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.takes_images else text

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        def text(tools: list[Any] | None) -> str:
            return self.processor.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )

        try:
            rendered = text(tools)
            shows_tools = not tools or rendered != text(None)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRowError(f"the chat template rejects it: {error}. {RAW_TEXT_HINT}.") from error
        if not shows_tools:
            raise BadRowError(
                "the chat template does not show its column 'tools'; required: a template that does, or no such column."
            )
        return rendered

    def _resolved(self, messages: Any, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return messages as the template takes them, and the images in the order of their places."""
        messages = with_system(messages, row, self.config.train.train_policy.system_prompt)
        for message in messages:
            self._check_fields(message)
        if not self.takes_images:
            reject_media(row)
            return [text_only(message) for message in messages], []
        given, images = images_of(row), []
        num_taken, has_videos = 0, False
        for message in messages:
            content, parts = message["content"], []
            for part in text_parts(content, bool(given)) if isinstance(content, str) else content:
                part = {key: value for key, value in part.items() if value is not None}
                kind = part.get("type")
                if kind == "text":
                    parts.append({"type": "text", "text": str(part.get("text", ""))})
                elif kind == "image":
                    if "image" in part:
                        image = part["image"]
                    else:
                        index = int(part.get("index", num_taken))
                        if not 0 <= index < len(given):
                            raise BadRowError(f"its messages name image {index}, counted from 0, and its column 'images' has "
                                              f"{len(given)}; required: an image for each.")  # fmt: skip
                        image, num_taken = given[index], num_taken + 1
                    images.append(open_image(image, self.folder))
                    parts.append({"type": "image"})
                elif kind == "video":
                    has_videos = True
                    frames = read_frames(
                        self.video_path(str(part.get("video"))), part.get("fps", 1.0), part.get("max_pixels")
                    )
                    images += frames
                    parts += [{"type": "image"}] * len(frames)
                else:
                    raise BadRowError(f"a part of its content has the type {kind!r}; required: text, image or video.")
            if content or not message.get("tool_calls"):  # templates tell calls without content by an empty one
                message["content"] = parts
        if not has_videos:
            reject_videos(row)
        if num_taken < len(given):
            raise BadRowError(
                f"its column 'images' has {len(given)}, and its messages name {num_taken} of them; required: each."
            )
        return messages, images

    def _check_fields(self, message: dict[str, Any]) -> None:
        """Raise BadRowError if a field of a message has a meaning that the chat template does not show; say once what else it has."""
        plain = {"role": message["role"], "content": self._content("a")}
        before = [{**plain, "role": "user"}] if message["role"] in ("assistant", "tool") else []
        for key in sorted({*meaningful(message), *(message.keys() - READ - MEANINGFUL - self._fields)}):
            is_shown = self._render([*before, plain]) != self._render([*before, plain | {key: message[key]}])
            if not is_shown and key in MEANINGFUL:
                raise BadRowError(f"the chat template does not show '{key}' of a message of the {plain['role']}; required: a template that "
                                  "does, or the text in its content.")  # fmt: skip
            if not is_shown:
                logger.warning("Messages have '%s', which nothing reads", key)
            self._fields.add(key)

    def video_path(self, name: str) -> Path:
        """Return the file of a video; override it for another layout of the folder."""
        dataset = self.config.train.train_policy.dataset
        return find_video(name, dataset.name, dataset.subset)

    def _pack(
        self, messages: list[dict[str, Any]], images: list[Any], tools: list[Any] | None, last_only: bool = False
    ) -> Sample:
        text, answers = self._answers(messages, tools)
        ids, offsets, inputs = self._encode(text, images, answers)
        mask = [False] * len(ids)
        learned = ["weight" not in message for message in messages if message["role"] == "assistant"]
        learned[:-1] = [False] * (len(learned) - 1) if last_only else learned[:-1]
        if not any(learned):
            raise BadRowError("no answer in it is learned, by 'weight' or 'train'; required: at least one.")
        for (begin, end), counts in zip(offsets, learned, strict=True):
            mask[begin:end] = [counts] * (end - begin)
        is_cut = len(ids) > self.max_length
        if is_cut:
            if images:
                raise BadRowError(f"it has {len(ids)} tokens, more than policy.model_max_length={self.max_length}, and a cut may go "
                                  f"through an image. Set policy.model_max_length={len(ids)} or more.")  # fmt: skip
            ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(mask):
            raise BadRowError(f"no token of an answer is among its first {len(ids)}; required: at least one. "
                              "Set a larger policy.model_max_length.")  # fmt: skip
        return Sample(ids, mask, inputs, is_cut)

    def _answers(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and where in it each answer starts and ends, in characters."""
        speaks = [message["role"] == "assistant" for message in messages]
        if not any(speaks):
            raise BadRowError("it has no message of the assistant; required: at least one, which is learned.")
        rendered = self._render(messages, tools)
        if BEGIN in rendered or END in rendered:
            raise BadRowError(
                "its text has the characters U+FDD0 or U+FDD1, which mark answers here; required: others."
            )
        for strip in (False, True):  # many templates strip contents, which they cannot do inside the marks
            marked = [
                self._marked(message, strip) if own else message for message, own in zip(messages, speaks, strict=True)
            ]
            text = self._render(marked, tools)
            if text.replace(BEGIN, "").replace(END, "") == rendered:
                own = [n for n, speaks_here in enumerate(speaks) if speaks_here]
                calls = [self._calls(marked[: n + 1], tools) for n in own]
                return rendered, self._spans(text, calls, [self._begin_of_call(marked[: n + 1], tools) for n in own])
        raise BadRowError(
            f"the chat template changes its answers, so they cannot be found in its text. {RAW_TEXT_HINT}."
        )

    def _marked(self, message: dict[str, Any], strip: bool = False) -> dict[str, Any]:
        """Return a message of the assistant with marks around its content, or without content around the name of its first call."""
        text = text_of(message["content"])
        calls = message.get("tool_calls")
        if calls and not text.strip():
            function = calls[0]["function"]
            function = function | {"name": f"{BEGIN}{function['name']}{END}"}
            return message | {"tool_calls": [calls[0] | {"function": function}, *calls[1:]]}
        return message | {"content": self._content(f"{BEGIN}{text.strip() if strip else text}{END}")}

    def _calls(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return how the template continues from the mark ``END`` in the last message to the end of its tool calls."""
        if not messages[-1].get("tool_calls"):
            return ""
        plain = self._marked({"role": "assistant", "content": "a"})
        rest, closing = (
            self._render([*messages[:-1], last], tools).rpartition(END)[2] for last in (messages[-1], plain)
        )
        if not rest.endswith(closing) or rest == closing:
            raise BadRowError(
                "the chat template does not show its tool calls; required: a template that does, or the calls as text."
            )
        return rest.removesuffix(closing)

    def _begin_of_call(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> int | None:
        """Return where the last message starts, in a text without marks, if it is marked at the name of a call; else None."""
        if BEGIN in text_of(messages[-1]["content"]):
            return None
        before, whole = (
            self._render(part, tools).replace(BEGIN, "").replace(END, "") if part else ""
            for part in (messages[:-1], messages)
        )
        return len(os.path.commonprefix([before, whole]))

    def _spans(self, marked: str, calls: Sequence[str], begins: Sequence[int | None]) -> list[tuple[int, int]]:
        """Return start and end of each answer in a text without its marks.

        Args:
            calls: The tool calls that follow each mark.
            starts: Where a message without content starts, which counts where the template has no generation prompt.
        """
        if marked.count(END) != len(calls):
            raise BadRowError("the chat template drops one of its answers; required: all are shown.")
        spans, position, clean = [], 0, 0
        for call, message in zip(calls, begins, strict=True):
            end = marked.find(END, position)
            piece = marked[position:end]
            begin = piece.find(BEGIN)
            before = piece if begin < 0 else piece[:begin]  # a template may drop the start of an answer: its thoughts
            header = begin if message is None else message - clean
            if self._header and self._header in before:
                header = before.rfind(self._header) + len(self._header)
            if header < 0:
                raise BadRowError("the chat template drops the start of an answer; required: all of it is shown.")
            if not marked.startswith(call, end + 1):
                raise BadRowError("the chat template changes its tool calls when the conversation continues.")
            spans.append((clean + header, clean + len(piece.replace(BEGIN, "")) + len(call)))
            clean += len(piece.replace(BEGIN, ""))
            position = end + 1
        return spans

    def _encode(
        self, text: str, images: list[Any], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int, int]], dict[str, Any]]:
        """Return the tokens of a rendered text, the first and the last + 1 token of each span, and the model's further inputs."""
        if not self.takes_images:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return encoded["input_ids"], self._tokens(text, encoded["offset_mapping"], spans, encoded["input_ids"]), {}
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
        try:
            encoded = self.processor(text=[text], images=images or None, return_tensors="pt", **options)
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError, StopIteration) as error:
            raise BadRowError(
                f"the {type(self.processor).__name__} rejects it: {type(error).__name__}: {error}."
            ) from error
        inputs = dict(encoded)
        ids, offsets = inputs.pop("input_ids")[0].tolist(), inputs.pop("offset_mapping")[0].tolist()
        replaced = inputs.pop("text_replacement_offsets", None)
        inputs.pop("attention_mask", None)
        if images and not replaced:
            raise ConfigError(f"{type(self.processor).__name__} does not say where it puts images in a text "
                              "(return_text_replacement_offsets); required: a processor of transformers that does.")  # fmt: skip
        changes, expanded = list(replaced[0]) if images else [], text
        for change in reversed(changes):
            begin, end = change["span"]
            expanded = expanded[:begin] + change["replacement"] + expanded[end:]
        moved = [(_moved(begin, changes), _moved(end, changes)) for begin, end in spans]
        return ids, self._tokens(expanded, offsets, moved, ids), inputs

    def _tokens(
        self, text: str, offsets: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the tokens of each span of characters, and of the end token behind it."""
        found, token, special = [], 0, self._special
        for begin, end in spans:
            while token < len(ids) and offsets[token][1] <= begin:
                token += 1
            first = token
            while token < len(ids) and offsets[token][0] < end:
                token += 1
            for shared, inside in (
                (text[offsets[first][0] : begin], first < token),
                (text[end : offsets[token - 1][1]], first < token),
            ):
                if inside and shared.strip():
                    raise BadRowError(f"a token joins {shared!r} of the chat template with an answer; required: a template that "
                                      f"separates them. {RAW_TEXT_HINT}.")  # fmt: skip
            last = token
            while (
                last < len(ids) and ids[last] not in special and not text[offsets[last][0] : offsets[last][1]].strip()
            ):
                last += 1
            has_end = last < len(ids) and ids[last] in special
            token = last + 1 if has_end else token
            if not self._has_warned and not (has_end and ids[last] in (self.end_tokens or ids)):
                self._has_warned = True
                other = f"ends an answer with {text[slice(*offsets[last])]!r}, at which none stops" if has_end else None
                none = "puts no end token after an answer, so the model does not learn where to stop"
                logger.warning("The chat template %s", other or none)
            found.append((first, token))
        return found


class PromptPacker(ChatPacker):
    """Prompts of one column: a text as it is, or messages by the chat template. What GRPO uses without a dataset script."""

    def setup(self, config: Any, processor: Any) -> None:
        """See ``Packer``; a chat template is needed for messages only."""
        self.column = config.train.train_policy.prompt_column_name
        if getattr(processor, "chat_template", None):
            super().setup(config, processor)
        else:
            self.config, self.processor, self.takes_images = config, processor, False
            self.tokenizer, self.max_length = getattr(processor, "tokenizer", processor), config.policy.model_max_length

    def messages(self, row: dict[str, Any]) -> Any:
        """Return the prompt: a text, or messages. A text with images becomes a message with the images at their marks, or before it."""
        prompt = column(row, self.column, "train.train_policy.prompt_column_name")
        reject_unread(row)
        images = images_of(row)
        if isinstance(prompt, str) and images and self.takes_images:
            parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": prompt}]
            prompt = [{"role": "user", "content": prompt if IMAGE_MARK in prompt else parts}]
        return prompt

    def prompt(self, row: dict[str, Any]) -> Prompt:
        """Return the tokens of a text, with the special tokens that the tokenizer adds, or of messages."""
        text = self.messages(row)
        if not isinstance(text, str):
            return super().prompt(row)
        reject_media(row)  # a text with images would be messages, if the model took them
        system = "train.train_policy.system_prompt" if self.config.train.train_policy.system_prompt else ""
        unread = system or ("its column 'tools'" if tools_of(row) else "its system message" if system_of(row) else "")
        if unread:
            raise BadRowError(
                f"its prompt is a text, which is taken as it is, without {unread}; required: a list of messages."
            )
        ids = text_tokens(self.tokenizer, text)
        if not ids:
            raise BadRowError(f"its column '{self.column}' is empty; required: text.")
        self._check_length(len(ids))
        return Prompt(ids, {}, as_answer(self.reference(row), "its right answer"), row)


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt that is a text, behind those that the tokenizer puts first, unless it starts with them already."""
    plain, whole = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    num_first = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), len(whole))
    return plain if plain[:num_first] == whole[:num_first] else whole[: num_first + len(plain)]


def _moved(place: int, changes: Sequence[Mapping[str, Any]]) -> int:
    """Return where a character of a text is after its image tokens were expanded."""
    grown = [
        len(each["replacement"]) - (each["span"][1] - each["span"][0]) for each in changes if each["span"][1] <= place
    ]
    return place + sum(grown)


PREVIEW_PIXELS = 128
"""Longer side of a preview."""


def open_image(image: Any, folder: Path) -> Image.Image:
    """Return an image as ``rlinf.images`` opens it; raise BadRowError for what it rejects."""
    try:
        return open_rgb(image, folder)
    except ImageError as error:
        raise BadRowError(str(error)) from error


def preview(image: Image.Image) -> bytes:
    """Return a small copy of an image for the report, as JPEG."""
    small = image.copy()
    small.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS))
    stored = io.BytesIO()
    small.save(stored, "JPEG", quality=90)
    return stored.getvalue()
