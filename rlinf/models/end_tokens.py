"""The tokens that end an answer: one list, in ``model.generation_config``, for training, generation, engines and exports."""

from __future__ import annotations

import logging
from typing import Any

from jinja2 import TemplateError

from rlinf.distributed.process_group import rank

logger = logging.getLogger("rlinf")

MARK = "\ufdd0"
"""Stands for an answer: a character that Unicode reserves for use inside a program."""


def end_tokens(model: Any, tokenizer: Any = None, given: int | list[int] | None = None) -> list[int]:
    """Return the ids that end a row: the given ones, else the model's, else the tokenizer's; an empty list ends none."""
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    candidates = (given, *(getattr(source, "eos_token_id", None) for source in sources))
    found = next((value for value in candidates if value is not None), [])
    return [found] if isinstance(found, int) else list(found)


def settle_end_tokens(model: Any, processor: Any) -> None:
    """Add the end tokens of a tokenizer (or of a processor's) and of its chat template to the model's, and say so; None adds none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    own, last, earlier = end_tokens(model), *template_ends(processor)
    # A model that knows the template leaves out what ends a part of its answers only.
    named = dict.fromkeys([getattr(tokenizer, "eos_token_id", None), last, None if last in own else earlier])
    vocab_size = model.config.get_text_config().vocab_size
    added = [token for token in named if token is not None and token not in own and token < vocab_size]
    if added:
        model.generation_config.eos_token_id = own + added
    if added and own and rank() == 0:
        texts = (" and ".join(repr(tokenizer.decode([token])) for token in tokens) for tokens in (own, added))
        logger.warning(
            "The model ends answers with %s, its tokenizer or chat template with %s: each ends one here", *texts
        )


def template_ends(processor: Any) -> tuple[int | None, int | None]:
    """Return the token that a chat template puts behind the last answer of a conversation, and behind an earlier one; None: none."""
    tokenizer, ends = getattr(processor, "tokenizer", processor), []
    texts = [
        [{"type": "text", "text": text}] if hasattr(processor, "image_processor") else text for text in ("a", MARK)
    ]
    turns = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    for messages in (turns, turns * 2) if getattr(processor, "chat_template", None) else ():
        try:
            text = processor.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError):  # which the packer reports, with the row
            text = ""
        ids = tokenizer(text.partition(MARK)[2], add_special_tokens=False)["input_ids"]
        first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
        ends.append(first if first in marked_tokens(tokenizer) else None)
    return (ends[0], ends[1]) if ends else (None, None)


def marked_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens that text is not split into: special ones, and others that were added to the vocabulary."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
