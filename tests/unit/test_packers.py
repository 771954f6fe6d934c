"""Packers: which tokens are learned, token by token, against what each chat template writes by hand."""

from __future__ import annotations

import random
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from rlinf.recipes.packers import ChatPacker

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import PIECES, SPECIAL, chat_tokenizer

KINDS = ("bytes", "trimmed", "words")


def recipe(**settings) -> SimpleNamespace:
    """Return the keys of a recipe that packers read."""
    policy = SimpleNamespace(model_max_length=settings.pop("max_length", 1000))
    names = {"conversation_column_name": "messages", "prompt_column_name": "prompt", "response_column_name": "answer"}
    method = SimpleNamespace(**names | settings, dataset=SimpleNamespace(name="no folder"))
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
            written = written[1:]  # a text, and what follows a special token, begins with a space of its own
        after_special = written.decode(errors="ignore") in special
        mask.append(any(learned[position : position + len(written)]))
        position += len(written)
    assert position == len(learned), "the tokens are not the text that the template writes"
    return mask


WORDS = [
    "yes",
    "Paris",
    "It is",
    " 42",
    "1, 2",
    "\n",
    "  ",
    "é",
    "日本",
    "🙂",
    "x+1",
    ".",
    "no.\n\n",
    "user",
    "[INST]",
    "def f(x):",
    "</think>",
]


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
        assert sample.input_ids == tokenizer.apply_chat_template(messages, return_dict=False), (
            "the template's own tokens"
        )
        pieces = PIECES[family](messages)
        expected = slow_mask(tokenizer, sample.input_ids, pieces, kind, special)
        assert sample.token_mask == expected, messages
        assert sum(expected) < len(expected)
        control = slow_mask(
            tokenizer, sample.input_ids, [(text, not learned) for text, learned in pieces], kind, special
        )
        assert sample.token_mask != control
