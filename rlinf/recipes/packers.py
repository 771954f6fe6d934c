"""Convert dataset rows to tokens with chat templates, masks for the learned tokens, images and videos.

Learned spans are located in the text rather than in the tokens: marks are inserted into the assistant messages and rendered by the chat
template, and the tokenizer's offsets map the positions of the marks to tokens.
"""

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
from rlinf.llm.end_tokens import marked_tokens
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
from rlinf.recipes.row_files import as_reference, as_text, scalar_text
from rlinf.recipes.samples import BadRowError, Message, Prompt, Row, Sample
from rlinf.recipes.videos import find_video, read_frames

logger = logging.getLogger("rlinf")

START, END = "\ufdd0", "\ufdd1"
"""Marks placed around learned text: noncharacters, which Unicode reserves for internal use."""
RAW_TEXT_HINT = (
    "Use examples/reasoning/tools/dataset/raw_text_sft.py, which needs no chat template: "
    "rlinf launch --config <recipe> examples/reasoning/tools/dataset/raw_text_sft.py"
)
MAX_PREVIEWS = 4
"""Maximum number of images per prompt in the report."""


class Packer(Protocol):
    """Tokenizes rows. Call ``setup`` once, then ``sample``, ``pair`` or ``prompt`` per row, which raise BadRowError."""

    def setup(self, config: Any, processor: Any) -> None:
        """Store the configuration and the tokenizer, or a vision-language model's processor."""

    def sample(self, row: Row) -> Sample:
        """Return the tokens to learn (SFT)."""

    def pair(self, row: Row) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected completion of one prompt (DPO)."""

    def prompt(self, row: Row) -> Prompt:
        """Return the tokens to complete (GRPO)."""


def column(row: Row, name: str, setting: str = "") -> Any:
    """Return a column, with scalars as text; raise BadRowError, which suggests ``setting``, if it is missing or null."""
    if name not in row:
        fix = f" Set {setting}=<column>." if setting else ""
        raise BadRowError(f"it has no column '{name}'.{did_you_mean(name, row)}{fix}")
    if row[name] is None:
        raise BadRowError(f"its column '{name}' is null, but a value is required.")
    return scalar_text(row[name], f"its column '{name}'")


class RawTextPacker:
    """Packer that learns every token and uses no chat template, so that roles may appear in any order.

    Messages become lines ``role: content``; a string is used unchanged. ``column`` is the name of the conversation column; None uses
    ``train.train_policy.conversation_column_name``.
    """

    def __init__(self, column: str | None = None) -> None:
        self.column = column

    def setup(self, config: Any, processor: Any) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_length = config.policy.model_max_length
        self.column = self.column or config.train.train_policy.conversation_column_name

    def text(self, row: Row) -> str:
        """Convert a row to text."""
        reject_media(row, "are not text", "use the dataset script hf_vlm_sft.py")
        conversation = column(row, self.column, "train.train_policy.conversation_column_name")
        if isinstance(conversation, str):
            return conversation
        messages = [text_only(message) for message in with_system(conversation, row)]
        for field in (key for message in messages for key in (*meaningful(message), *(message.keys() & {"weight"}))):
            raise BadRowError(f"raw text cannot represent a message's '{field}'; expected messages without it.")
        if tools_of(row) or any(message.get("tool_calls") for message in messages):
            raise BadRowError("raw text cannot represent tools or tool calls. Use a chat template, or calls as text.")
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def sample(self, row: Row) -> Sample:
        """Return the text, truncated to the maximum length, with every token learned."""
        tokens = self.tokenizer(self.text(row), add_special_tokens=False)["input_ids"]
        ids = tokens[: self.max_length]
        if not ids:
            raise BadRowError(f"its column '{self.column}' is empty; expected text.")
        return Sample(ids, [True] * len(ids), is_truncated=len(tokens) > len(ids))

    def pair(self, row: Row) -> tuple[Sample, Sample]:
        """Raise ConfigError, because preferences need a prompt."""
        raise ConfigError("raw text has no prompt; DPO needs one. Use the dataset script dpo_pairs.py")

    def prompt(self, row: Row) -> Prompt:
        """Raise ConfigError, because raw text has no prompt."""
        raise ConfigError("raw text has no prompt; GRPO needs one. Use the dataset script gsm8k_grpo.py")


class ChatPacker:
    """Packer that renders conversations with the model's chat template; override ``messages`` or ``reference`` for a different row format.

    The loss covers each assistant message: its content, the template's text between generation prompt and content, and the end token.

    A message is ``{role, content}``, or ``{from, value}`` as in ShareGPT files. The content is a text or a list of parts:
    ``{type: text, text}``; ``{type: image, image}``, which without ``image`` uses the next image (or number ``index``) in the column
    ``images``; ``{type: video, video, fps, max_pixels}``, read as one image per frame. ``<image>`` in a text is the next image.

    ``tool_calls`` of assistant messages are also learned. They are passed to the template together with the column ``tools``, which is
    a list of JSON schemas or its JSON text.
    """

    end_tokens: Sequence[int] | None = None
    """Tokens at which generation stops, set by the run; None if unknown."""

    def setup(self, config: Any, processor: Any) -> None:
        """See ``Packer.setup``; raise ConfigError without a chat template or token offsets."""
        self.config, self.processor = config, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.takes_images = hasattr(processor, "image_processor")
        self.max_length = config.policy.model_max_length
        self.folder = local_folder(config.train.train_policy.dataset.name) or Path()
        if not getattr(processor, "chat_template", None):
            raise ConfigError(f"The model's {type(processor).__name__} has no chat template. {RAW_TEXT_HINT}")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(f"The {type(self.tokenizer).__name__} has no token offsets; expected a fast tokenizer.")
        self._special = marked_tokens(self.tokenizer)
        self._header = self._generation_prompt()
        self._has_warned = False
        self._fields: set[str] = set()

    def messages(self, row: Row) -> list[Message]:
        """Return a row's conversation, built from prompt and response if necessary; override it for a different format."""
        method = self.config.train.train_policy
        name, prompt, response = method.conversation_column_name, method.prompt_column_name, method.response_column_name
        reject_unread(row)
        if name not in row and prompt in row and response in row:
            reply = {"role": "assistant", "content": as_text(column(row, response), f"its column '{response}'")}
            return [*as_messages(column(row, prompt)), reply]
        return column(row, name, "train.train_policy.conversation_column_name")

    def reference(self, row: Row) -> Any:
        """Return the reference (or references) for the rewards, or None if the recipe has no column for it."""
        name = self.config.train.train_policy.response_column_name
        return column(row, name, "train.train_policy.response_column_name") if name else None

    def sample(self, row: Row) -> Sample:
        """Return a conversation, truncated to the maximum length."""
        return self._pack(*self._resolved(self.messages(row), row), tools_of(row))

    def pair(self, row: Row) -> tuple[Sample, Sample]:
        """Return two conversations that differ only in the last message, which is the only learned one.

        ``chosen`` and ``rejected`` are completions of ``prompt`` (a text or messages), or complete conversations.
        """
        reject_unread(row)
        chosen, rejected = (self._candidate(row, name) for name in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1] or {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
            raise BadRowError("its columns 'chosen' and 'rejected' are not two completions of the same prompt; expected identical messages, "
                              "then one assistant message each.")  # fmt: skip
        first, second = (
            self._pack(*self._resolved(messages, row), tools_of(row), last_only=True) for messages in (chosen, rejected)
        )
        return first, second

    def _candidate(self, row: Row, name: str) -> list[Message]:
        """Return the conversation ending with the completion in the column ``chosen`` or ``rejected``."""
        value = column(row, name)
        completion = check_messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value)
        if completion[0]["role"] != "assistant":
            return completion
        name = self.config.train.train_policy.prompt_column_name or "prompt"
        return [*as_messages(column(row, name, "train.train_policy.prompt_column_name")), *completion]

    def prompt(self, row: Row) -> Prompt:
        """Return a conversation up to the generation prompt."""
        messages, images = self._resolved(self.messages(row), row)
        if messages[-1]["role"] == "assistant":
            raise BadRowError("its last message is from the assistant; required of a prompt: from the user.")
        ids, _, inputs = self._encode(self._render(messages, tools_of(row), add_generation_prompt=True), images)
        self._check_length(len(ids))
        previews = [preview(image) for image in images[:MAX_PREVIEWS]]
        return Prompt(ids, inputs, as_reference(self.reference(row), "its reference"), row, previews)

    def _check_length(self, length: int) -> None:
        if length >= self.max_length:
            raise BadRowError(f"its prompt has {length} tokens; expected fewer than policy.model_max_length={self.max_length}. "
                              f"Set policy.model_max_length={2 * length} if the model supports it.")  # fmt: skip

    def _generation_prompt(self) -> str:
        """Return the generation prompt that the template appends, which may be empty."""
        question = [{"role": "user", "content": self._content("a")}]
        text = self._render(question)
        prompt = self._render(question, add_generation_prompt=True)
        return prompt[len(text) :] if prompt.startswith(text) else ""

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.takes_images else text

    def _render(
        self, messages: list[Message], tools: list[Any] | None = None, add_generation_prompt: bool = False
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
            raise BadRowError("the chat template does not render its column 'tools'. Remove the column.")
        return rendered

    def _resolved(self, messages: Any, row: Row) -> tuple[list[Message], list[Any]]:
        """Convert messages to the template's format; also return their images in order of appearance."""
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
                            raise BadRowError(
                                f"its messages refer to image {index} (from 0), but its column 'images' has {len(given)}; expected one per reference."
                            )
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
                    raise BadRowError(f"a part of its content has type {kind!r}; expected text, image or video.")
            # Keep empty content, because templates use it to recognise tool calls without text.
            if content or not message.get("tool_calls"):
                message["content"] = parts
        if not has_videos:
            reject_videos(row)
        if num_taken < len(given):
            raise BadRowError(
                f"its column 'images' has {len(given)} images, but its messages refer to {num_taken}; expected a reference to each image."
            )
        return messages, images

    def _check_fields(self, message: Message) -> None:
        """Raise BadRowError if the template does not render a meaningful field; warn once about all remaining unread fields."""
        plain = {"role": message["role"], "content": self._content("a")}
        before = [{**plain, "role": "user"}] if message["role"] in ("assistant", "tool") else []
        for key in sorted({*meaningful(message), *(message.keys() - READ - MEANINGFUL - self._fields)}):
            is_rendered = self._render([*before, plain]) != self._render([*before, plain | {key: message[key]}])
            if not is_rendered and key in MEANINGFUL:
                raise BadRowError(f"the chat template does not render '{key}' of a message from the {plain['role']}; expected a template that "
                                  "does, or the text in its content.")  # fmt: skip
            if not is_rendered:
                logger.warning("Messages have '%s', which is not read", key)
            self._fields.add(key)

    def video_path(self, name: str) -> Path:
        """Return a video's path; override it for a different folder layout."""
        dataset = self.config.train.train_policy.dataset
        return find_video(name, dataset.name, dataset.subset)

    def _pack(
        self, messages: list[Message], images: list[Any], tools: list[Any] | None, last_only: bool = False
    ) -> Sample:
        text, spans = self._learned_spans(messages, tools)
        ids, token_spans, inputs = self._encode(text, images, spans)
        mask = [False] * len(ids)
        learned = ["weight" not in message for message in messages if message["role"] == "assistant"]
        learned[:-1] = [False] * (len(learned) - 1) if last_only else learned[:-1]
        if not any(learned):
            raise BadRowError("no assistant message is learned ('weight' or 'train' may exclude it); expected one.")
        for (start, end), is_learned in zip(token_spans, learned, strict=True):
            mask[start:end] = [is_learned] * (end - start)
        is_truncated = len(ids) > self.max_length
        if is_truncated:
            if images:
                raise BadRowError(f"it has {len(ids)} tokens, more than policy.model_max_length={self.max_length}, and truncation "
                                  f"may split an image. Set policy.model_max_length={len(ids)} or more.")  # fmt: skip
            ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(mask):
            raise BadRowError(f"none of its first {len(ids)} tokens is learned. Raise policy.model_max_length.")
        return Sample(ids, mask, inputs, is_truncated)

    def _learned_spans(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and start and end of each assistant message in characters."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise BadRowError("it has no assistant message; expected at least one, which is learned.")
        rendered = self._render(messages, tools)
        if START in rendered or END in rendered:
            raise BadRowError("its text has the characters U+FDD0 or U+FDD1, which are reserved.")
        # Many templates strip contents, which they cannot do inside the marks, so try again with stripped contents.
        for strip in (False, True):
            marked = [self._marked(m, strip) if m["role"] == "assistant" else m for m in messages]
            text = self._render(marked, tools)
            if text.replace(START, "").replace(END, "") == rendered:
                calls = [self._calls(marked[: turn + 1], tools) for turn in turns]
                return rendered, self._spans(
                    text, calls, [self._call_start(marked[: turn + 1], tools) for turn in turns]
                )
        raise BadRowError(f"the chat template changes its assistant messages. {RAW_TEXT_HINT}.")

    def _marked(self, message: Message, strip: bool = False) -> Message:
        """Mark the content of an assistant message, or without content the name of its first tool call."""
        text = text_of(message["content"])
        calls = message.get("tool_calls")
        if calls and not text.strip():
            function = calls[0]["function"]
            function = function | {"name": f"{START}{function['name']}{END}"}
            return message | {"tool_calls": [calls[0] | {"function": function}, *calls[1:]]}
        return message | {"content": self._content(f"{START}{text.strip() if strip else text}{END}")}

    def _calls(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the rendered text between the mark ``END`` of the last message and the end of its tool calls."""
        if not messages[-1].get("tool_calls"):
            return ""
        # A message without calls shows how the template closes a message; the text before it renders the calls.
        plain = self._marked({"role": "assistant", "content": "a"})
        rest, closing = (
            self._render([*messages[:-1], last], tools).rpartition(END)[2] for last in (messages[-1], plain)
        )
        if not rest.endswith(closing) or rest == closing:
            raise BadRowError("the chat template does not render its tool calls. Write the calls as text.")
        return rest.removesuffix(closing)

    def _call_start(self, messages: list[Message], tools: list[Any] | None) -> int | None:
        """Return the start of the last message in the unmarked text if its mark is at a tool call; else None."""
        if START in text_of(messages[-1]["content"]):
            return None
        before, rendered = (
            self._render(part, tools).replace(START, "").replace(END, "") if part else ""
            for part in (messages[:-1], messages)
        )
        return len(os.path.commonprefix([before, rendered]))

    def _spans(self, marked: str, calls: Sequence[str], starts: Sequence[int | None]) -> list[tuple[int, int]]:
        """Return start and end of each assistant message in the unmarked text.

        ``calls`` are the rendered tool calls behind each mark, ``starts`` the starts of messages without content.
        """
        if marked.count(END) != len(calls):
            raise BadRowError("the chat template drops an assistant message; expected all are rendered.")
        spans, position, clean = [], 0, 0
        for call, message in zip(calls, starts, strict=True):
            end = marked.find(END, position)
            piece = marked[position:end]
            start = piece.find(START)
            # A template may drop the start of a message (its thoughts), and the start mark with it.
            before = piece if start < 0 else piece[:start]
            header = start if message is None else message - clean
            if self._header and self._header in before:
                header = before.rfind(self._header) + len(self._header)
            if header < 0:
                raise BadRowError(
                    "the chat template drops the start of an assistant message; expected the complete message."
                )
            if not marked.startswith(call, end + 1):
                raise BadRowError("the chat template changes its tool calls when the conversation continues.")
            spans.append((clean + header, clean + len(piece.replace(START, "")) + len(call)))
            clean += len(piece.replace(START, ""))
            position = end + 1
        return spans

    def _encode(
        self, text: str, images: list[Any], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int, int]], dict[str, Any]]:
        """Tokenize a rendered text; return ids, token range of each span, and additional model inputs."""
        if not self.takes_images:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return encoded["input_ids"], self._tokens(text, encoded["offset_mapping"], spans, encoded["input_ids"]), {}
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
        try:
            encoded = self.processor(text=[text], images=images or None, return_tensors="pt", **options)
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError, StopIteration) as error:
            raise BadRowError(f"{type(self.processor).__name__} rejects it: {error!r}.") from error
        inputs = dict(encoded)
        ids, offsets = inputs.pop("input_ids")[0].tolist(), inputs.pop("offset_mapping")[0].tolist()
        replaced = inputs.pop("text_replacement_offsets", None)
        inputs.pop("attention_mask", None)
        if images and not replaced:
            raise ConfigError(f"{type(self.processor).__name__} does not report where it inserts images into a text "
                              "(return_text_replacement_offsets); expected a processor of transformers that does.")  # fmt: skip
        changes, expanded = list(replaced[0]) if images else [], text
        # Backwards, so that earlier spans stay valid.
        for change in reversed(changes):
            start, end = change["span"]
            expanded = expanded[:start] + change["replacement"] + expanded[end:]
        moved = [(_moved(start, changes), _moved(end, changes)) for start, end in spans]
        return ids, self._tokens(expanded, offsets, moved, ids), inputs

    def _tokens(
        self, text: str, offsets: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the token range of each character span, including the end token behind it."""
        ranges, token, special = [], 0, self._special
        for start, end in spans:
            while token < len(ids) and offsets[token][1] <= start:
                token += 1
            first = token
            while token < len(ids) and offsets[token][0] < end:
                token += 1
            # A token on both sides of a boundary would train the template's text; white space is harmless.
            edges = [text[offsets[first][0] : start], text[end : offsets[token - 1][1]]] if first < token else []
            for joined in edges:
                if joined.strip():
                    raise BadRowError(f"a token joins {joined!r} of the chat template with an assistant message; expected a template "
                                      f"that separates them. {RAW_TEXT_HINT}.")  # fmt: skip
            # Some templates insert white space between the content and the end token.
            last = token
            while last < len(ids) and ids[last] not in special and not text[slice(*offsets[last])].strip():
                last += 1
            has_end = last < len(ids) and ids[last] in special
            token = last + 1 if has_end else token
            if not self._has_warned and not (has_end and ids[last] in (self.end_tokens or ids)):
                self._has_warned = True
                problem = "puts no end token after an assistant message, so the model does not learn where to stop"
                if has_end:
                    problem = f"ends an assistant message with {text[slice(*offsets[last])]!r}, at which generation does not stop"
                logger.warning("The chat template %s", problem)
            ranges.append((first, token))
        return ranges


class PromptPacker(ChatPacker):
    """Packer for prompts in one column: text is used unchanged, messages are rendered with the chat template. The default for GRPO."""

    def setup(self, config: Any, processor: Any) -> None:
        """See ``Packer.setup``; only messages need a chat template."""
        self.column = config.train.train_policy.prompt_column_name
        if getattr(processor, "chat_template", None):
            super().setup(config, processor)
        else:
            self.config, self.processor, self.takes_images = config, processor, False
            self.tokenizer, self.max_length = getattr(processor, "tokenizer", processor), config.policy.model_max_length

    def messages(self, row: Row) -> Any:
        """Return the prompt as text or messages. A text with images becomes a message, with images at their marks or before the text."""
        prompt = column(row, self.column, "train.train_policy.prompt_column_name")
        reject_unread(row)
        images = images_of(row)
        if isinstance(prompt, str) and images and self.takes_images:
            parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": prompt}]
            prompt = [{"role": "user", "content": prompt if IMAGE_MARK in prompt else parts}]
        return prompt

    def prompt(self, row: Row) -> Prompt:
        """Tokenize the prompt: a text with the tokenizer's special tokens, or messages."""
        text = self.messages(row)
        if not isinstance(text, str):
            return super().prompt(row)
        # messages() converts a text with images unless the model is text-only.
        reject_media(row)
        system = "train.train_policy.system_prompt" if self.config.train.train_policy.system_prompt else ""
        unread = system or ("its column 'tools'" if tools_of(row) else "its system message" if system_of(row) else "")
        if unread:
            raise BadRowError(f"its prompt is plain text, which cannot contain {unread}; expected a list of messages.")
        ids = text_tokens(self.tokenizer, text)
        if not ids:
            raise BadRowError(f"its column '{self.column}' is empty; expected text.")
        self._check_length(len(ids))
        return Prompt(ids, {}, as_reference(self.reference(row), "its reference"), row)


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return a text prompt's tokens, starting with the tokenizer's special tokens unless the text already has them."""
    plain, full = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    num_first = next((n for n in range(len(full)) if full[n : n + len(plain)] == plain), len(full))
    return plain if plain[:num_first] == full[:num_first] else full[: num_first + len(plain)]


def _moved(index: int, changes: Sequence[Mapping[str, Any]]) -> int:
    """Return a character's index after the image tokens are expanded."""
    spans = [(change["span"], len(change["replacement"])) for change in changes]
    return index + sum(length - (end - start) for (start, end), length in spans if end <= index)


PREVIEW_PIXELS = 128
"""Length of a preview's longer side in pixels."""


def open_image(image: Any, folder: Path) -> Image.Image:
    """Open an image with ``rlinf.images``; raise BadRowError if it cannot be read."""
    try:
        return open_rgb(image, folder)
    except ImageError as error:
        raise BadRowError(str(error)) from error


def preview(image: Image.Image) -> bytes:
    """Return an image as a small JPEG for the report."""
    small = image.copy()
    small.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS))
    stored = io.BytesIO()
    small.save(stored, "JPEG", quality=90)
    return stored.getvalue()
