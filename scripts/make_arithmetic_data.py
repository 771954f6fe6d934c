"""Creates an arithmetic task and a tiny, untrained language model for trying recipes on a laptop.

    python scripts/make_arithmetic_data.py arithmetic
    rlinf launch --config arithmetic_sft

The task is to add two-digit numbers, starting with the ones: the completion of `What is 37 + 48?` is `7+8=15 3+4+1=8 #### 85`. Half
of the training rows contain a carry error: a missing or unnecessary carry. A model that clones them is correct about half of the
time. Because it has seen both continuations, a reward for correct results teaches it when to carry. test.jsonl contains pairs of
numbers that are not in train.jsonl, all with correct results.

The folder contains `train.jsonl` and `test.jsonl` (columns question, answer, prompt, messages, and for DPO, the correct completion
as chosen and the incorrect one as rejected), and `model`, which transformers can load.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REQUEST = 'Think step by step, and write the final answer after "#### ".'  # from gsm8k_grpo.py, so few tokens


def worked_answer(first: int, second: int, carry_wrong: bool = False) -> str:
    """Write out the addition of two numbers below 100. With ``carry_wrong``, 1 is carried exactly when it should not be."""
    ones = first % 10 + second % 10
    carry = (ones >= 10) != carry_wrong
    tens = first // 10 + second // 10 + carry
    carried = "+1" if carry else ""
    total = 10 * tens + ones % 10
    return f"{first % 10}+{second % 10}={ones} {first // 10}+{second // 10}{carried}={tens} #### {total}"


def make_rows(num_train: int, num_test: int, wrong_fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Return training and test rows, which have no pairs of numbers in common."""
    generator = random.Random(seed)
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    if num_train + num_test > len(pairs):
        raise SystemExit(f"There are {len(pairs)} pairs of numbers; --train and --test need {num_train + num_test}.")
    generator.shuffle(pairs)
    rows = []
    for number, (first, second) in enumerate(pairs[: num_test + num_train]):
        is_wrong = number >= num_test and generator.random() < wrong_fraction
        question, demonstration = f"What is {first} + {second}?", worked_answer(first, second, is_wrong)
        prompt = [{"role": "user", "content": question}]
        rows.append({
            "question": question,
            "answer": f"#### {first + second}",
            "prompt": prompt,
            "messages": [*prompt, {"role": "assistant", "content": demonstration}],
            "chosen": worked_answer(first, second),
            "rejected": worked_answer(first, second, carry_wrong=True),
        })  # fmt: skip
    return rows[num_test:], rows[:num_test]


def make_tokenizer(
    texts: list[str],
    chat_template: str = CHAT_TEMPLATE,
    extra_special_tokens: tuple[str, ...] = (),
    vocab_size: int = 384,
) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer in which each digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\d|[^\d\s]+| ?[A-Za-z]+|\s"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *extra_special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[*SPECIAL_TOKENS[3:], *extra_special_tokens],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, hidden_size: int, num_layers: int) -> int:
    """Write a randomly initialised Llama and its tokenizer; return the number of parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32, num_key_value_heads=hidden_size // 32, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(
    folder: str | Path,
    num_train: int = 4000,
    num_test: int = 300,
    wrong_fraction: float = 0.5,
    seed: int = 0,
    hidden_size: int = 192,
    num_layers: int = 4,
) -> Path:
    """Write the data and model to ``folder``, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = make_rows(num_train, num_test, wrong_fraction, seed)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", test)
    texts = [message["content"] for row in train for message in row["messages"]]
    num_parameters = make_model(folder / "model", make_tokenizer([*texts, REQUEST]), seed, hidden_size, num_layers)
    print(
        f"{len(train)} training rows, {len(test)} test rows and a model with {num_parameters / 1e6:.1f} million parameters in {folder}"
    )
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=4000, help="number of rows in train.jsonl")
    parser.add_argument("--test", type=int, default=300, help="number of rows in test.jsonl")
    parser.add_argument("--wrong-fraction", type=float, default=0.5, help="fraction of training rows with carry errors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=192, help="a multiple of 32")
    parser.add_argument("--num-layers", type=int, default=4)
    given = parser.parse_args()
    make(given.folder, given.train, given.test, given.wrong_fraction, given.seed, given.hidden_size, given.num_layers)
