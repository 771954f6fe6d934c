"""Which tokens end an answer, where model, tokenizer and chat template disagree."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig

from rlinf.llm.end_tokens import end_tokens, settle_end_tokens, template_end

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from chat_models import chat_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model(eos, vocab_size=10_000, generation=True):
    """Stand for a model whose configuration names ``eos``; ``generation``: its ``generation_config`` names them too."""
    text = SimpleNamespace(eos_token_id=eos, vocab_size=vocab_size)
    config = SimpleNamespace(get_text_config=lambda: text)
    return SimpleNamespace(generation_config=GenerationConfig(eos_token_id=eos if generation else None), config=config)


def settled(eos, tokenizer, **options):
    made = model(eos, **options)
    settle_end_tokens(made, tokenizer)
    return tokenizer.convert_ids_to_tokens(end_tokens(made))


@pytest.mark.parametrize(
    ("family", "last", "earlier"),
    [
        ("mistral", "</s>", "</s>"), ("gemma", "<end_of_turn>", "<end_of_turn>"), ("phi", "<|im_end|>", "<|im_end|>"),
        ("llama", "<|eot_id|>", "<|eot_id|>"), ("qwen", "<|im_end|>", "<|im_end|>"), ("gpt_oss", "<|return|>", "<|end|>"),
        ("plain", None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_template_ends_its_answers_as_by_hand(family, last, earlier, kind):
    tokenizer = chat_tokenizer(family, kind)
    ends = [
        None if token is None else tokenizer.convert_ids_to_tokens(token)
        for token in (template_end(tokenizer, n) for n in (1, 2))
    ]
    assert ends == [last, earlier]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] | trim }} \n <|im_end|>\n\n{% endfor %}", ["<|im_end|>"] * 2),
        ("{% for m in messages %}<|im_start|>{{ m['content'] }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}", [None, "<|im_end|>"]),
        ("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}", [None, "<|im_start|>"]),  # the next turn ends it
        ("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}", ["</s>"] * 2),
        ("{% for m in messages %}{{ m['content'] }} that is all{% endfor %}", [None, None]),
        ("{{ raise_exception('no') }}", [None, None]),
        (None, [None, None]),
    ],
)  # fmt: skip
def test_ends_of_other_shapes(template, ends):
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = template
    found = [
        None if token is None else tokenizer.convert_ids_to_tokens(token)
        for token in (template_end(tokenizer, n) for n in (1, 2))
    ]
    assert found == ends


def test_a_base_model_ends_with_its_own_token_and_the_templates(caplog):
    tokenizer = chat_tokenizer("qwen")
    assert settled(tokenizer.eos_token_id, tokenizer) == ["</s>", "<|im_end|>"]
    assert caplog.text.count("</s>") == caplog.text.count("<|im_end|>") == 1
    caplog.clear()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert settled([end, tokenizer.eos_token_id], tokenizer) == ["<|im_end|>", "</s>"] and not caplog.text
    assert settled(tokenizer.eos_token_id, tokenizer, vocab_size=end) == ["</s>"], "without an embedding"


def test_settings_that_would_change_answers_are_named(caplog):
    made = model(2)
    made.generation_config.update(temperature=0.7, do_sample=True, max_new_tokens=9, stop_strings=["x"], pad_token_id=0)
    settle_end_tokens(made, None)
    assert "temperature" in caplog.text and "stop_strings" in caplog.text
    assert not any(name in caplog.text for name in ("do_sample", "max_new_tokens", "pad_token_id", "eos_token_id"))


def test_a_model_that_knows_its_template_keeps_out_what_ends_a_part_of_an_answer():
    tokenizer = chat_tokenizer("gpt_oss")
    last = tokenizer.convert_tokens_to_ids("<|return|>")
    assert settled([last, tokenizer.eos_token_id], tokenizer) == ["<|return|>", "</s>"]
    assert settled(tokenizer.eos_token_id, tokenizer) == ["</s>", "<|return|>", "<|end|>"]


def test_the_tokenizer_and_the_configuration_count_too():
    tokenizer = chat_tokenizer("plain")
    assert settled(9, tokenizer)[1:] == ["</s>"]
    assert settled(9, tokenizer, generation=False)[1:] == ["</s>"], "config.json names it alone"
    assert settled(None, tokenizer) == ["</s>"]
    tokenizer.eos_token = None
    assert settled(None, tokenizer) == []
    made = model([4, 5])
    settle_end_tokens(made, None)
    assert made.generation_config.eos_token_id == [4, 5] and end_tokens(made, given=[]) == []


def test_an_added_token_that_is_not_special_ends_an_answer_and_pieces_of_text_do_not():
    plain = chat_tokenizer("plain")
    plain.chat_template = CHATML
    assert template_end(plain, 1) is None
    plain.add_tokens([AddedToken("<|im_end|>", special=False, rstrip=True)])
    assert plain.convert_ids_to_tokens(template_end(plain, 1)) == "<|im_end|>"


@pytest.mark.parametrize("eos", [-1, [-1, 99_999], "</s>", 2.0])
def test_end_tokens_that_the_model_does_not_have_are_left_out(eos):
    assert settled(eos, chat_tokenizer("qwen")) == ["</s>", "<|im_end|>"]
    assert end_tokens(model([7, 99_999])) == [7]
