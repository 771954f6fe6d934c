"""Collect the end-of-sequence tokens of a model, its tokenizer and its chat template in ``model.generation_config``."""

import logging
import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlinf.distributed.process_group import rank

logger = logging.getLogger("rlinf")

FOLLOWED = re.compile(
    r"(bos|eos|pad)_token_id|do_sample|max_\w+|use_cache|cache_\w+|output_\w+|transformers_version|_\w+"
)
"""Settings in ``generation_config.json`` that commands override, or that do not affect the sampled tokens."""


def end_tokens(
    model: Any, tokenizer: PreTrainedTokenizerBase | None = None, given: int | list[int] | None = None
) -> list[int]:
    """Return the ids that end a sequence: ``given`` or, if None, the model's or else the tokenizer's; the list may be empty."""
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
    """Add the end tokens of the tokenizer (or processor) and its chat template to the model's, and warn if any are new."""
    tokenizer, model_ends = getattr(processor, "tokenizer", processor), end_tokens(model)
    last, earlier = (template_end(processor, num_turns) for num_turns in (1, 2))
    # If the model's end tokens include the one after the final turn, a token that only ends earlier turns is left out on purpose.
    named = dict.fromkeys([getattr(tokenizer, "eos_token_id", None), last, None if last in model_ends else earlier])
    vocab_size = model.config.get_text_config().vocab_size
    if added := [token for token in named if token is not None and token not in model_ends and token < vocab_size]:
        model.generation_config.eos_token_id = model_ends + added
    if added and model_ends and rank() == 0:
        texts = (" and ".join(repr(tokenizer.decode([token])) for token in tokens) for tokens in (model_ends, added))
        logger.warning("The model ends completions with %s, its tokenizer or template with %s; all are used", *texts)
    values = model.generation_config.to_diff_dict()
    ignored = {key: value for key, value in values.items() if not FOLLOWED.fullmatch(key)}
    if ignored and rank() == 0:
        logger.warning("generation_config.json sets %s, which is ignored", ignored)


def template_end(processor: Any, num_turns: int) -> int | None:
    """Return the token that the chat template puts after the first of ``num_turns`` completions, or None."""
    if not getattr(processor, "chat_template", None):
        return None
    tokenizer, mark = getattr(processor, "tokenizer", processor), "\ufdd0"  # never occurs in text
    texts = {"user": "a", "assistant": mark}
    if hasattr(processor, "image_processor"):
        texts = {role: [{"type": "text", "text": text}] for role, text in texts.items()}
    turns = [{"role": role, "content": content} for role, content in texts.items()] * num_turns
    try:
        rest = processor.apply_chat_template(turns, tokenize=False).partition(mark)[2]
    except (TemplateError, ValueError, TypeError, KeyError):  # the packer reports this error together with the row
        return None
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
    return first if first in marked_tokens(tokenizer) else None


def marked_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special and added tokens, into which ordinary text is never split."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
