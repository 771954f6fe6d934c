"""The tokens that end an answer, all of them in ``model.generation_config``: the model's, its tokenizer's and its chat template's."""

from __future__ import annotations

import logging
import re
from typing import Any

from jinja2 import TemplateError

from rlinf.distributed.process_group import rank

logger = logging.getLogger("rlinf")

FOLLOWED = re.compile(
    r"(bos|eos|pad)_token_id|do_sample|max_\w+|use_cache|cache_\w+|output_\w+|transformers_version|_\w+"
)
"""Settings of a ``generation_config.json`` that a command replaces, or that change no token."""


def end_tokens(model: Any, tokenizer: Any = None, given: int | list[int] | None = None) -> list[int]:
    """Return the ids that end a row: the given ones, else the model's, else the tokenizer's; an empty list ends none.

    Ids without an embedding, which some published models name (-1), are skipped.
    """
    if given is not None:
        return [given] if isinstance(given, int) else list(given)
    text_config = model.config.get_text_config()
    known = range(text_config.vocab_size)
    for source in (model.generation_config, text_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ends := [
            token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int and token in known
        ]:
            return ends
    return []


def settle_end_tokens(model: Any, processor: Any) -> None:
    """Add the end tokens of a tokenizer (or of a processor's) and of its chat template to the model's, and say so; None adds none."""
    tokenizer, own = getattr(processor, "tokenizer", processor), end_tokens(model)
    last, earlier = (template_end(processor, num_turns) for num_turns in (1, 2))
    # A model that knows the template leaves out what ends a part of its answers only.
    named = dict.fromkeys([getattr(tokenizer, "eos_token_id", None), last, None if last in own else earlier])
    vocab_size = model.config.get_text_config().vocab_size
    if added := [token for token in named if token is not None and token not in own and token < vocab_size]:
        model.generation_config.eos_token_id = own + added
    if added and own and rank() == 0:
        texts = (" and ".join(repr(tokenizer.decode([token])) for token in tokens) for tokens in (own, added))
        logger.warning("The model ends answers with %s, its tokenizer or template with %s: each ends one here", *texts)
    other = {key: value for key, value in model.generation_config.to_diff_dict().items() if not FOLLOWED.fullmatch(key)}
    if other and rank() == 0:
        logger.warning("generation_config.json sets %s, which is not followed here", other)


def template_end(processor: Any, num_turns: int) -> int | None:
    """Return the token that a chat template puts behind the first of so many answers; None: none."""
    if not getattr(processor, "chat_template", None):
        return None
    tokenizer, mark = getattr(processor, "tokenizer", processor), "\ufdd0"  # a character that no text has
    texts = {"user": "a", "assistant": mark}
    if hasattr(processor, "image_processor"):
        texts = {role: [{"type": "text", "text": text}] for role, text in texts.items()}
    turns = [{"role": role, "content": content} for role, content in texts.items()] * num_turns
    try:
        rest = processor.apply_chat_template(turns, tokenize=False).partition(mark)[2]
    except (TemplateError, ValueError, TypeError, KeyError):  # which the packer reports, with the row
        return None
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
    return first if first in marked_tokens(tokenizer) else None


def marked_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens that text is not split into: special ones, and others that were added to the vocabulary."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
