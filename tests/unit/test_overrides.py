"""Overrides as users type them: what is text arrives letter by letter, and what Hydra reads stays what it was."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rlinf.config.compose import compose_config, normalize_overrides
from rlinf.config.overrides import parse_overrides, quoted, values_of
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError

TEXTS = [
    "o/José", "日本/models", "You are helpful, honest and brief.", "a=b", "Note: be brief", "costs $5", "${}", "Put it in ${}$, é",
    r"\frac{1}{2} or \(x\)", "C:\\runs\\", "it's", '"so" he said', " both ends ", "~/runs", "#1", "(a)", "f(x) = 2", "a)b", "you & me!",
    "two\nlines", "x;y|z", "007", "2024-01-02", "a, b\\", "100% [sure]", "'a', 'b'", "-x", "'"
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_letter_by_letter(text):
    assert values_of([f"key={text}"]) == {"key": text}


def test_text_arrives_letter_by_letter_through_a_configuration():
    texts = [
        text for text in TEXTS if "," not in text
    ]  # a comma in a key that takes anything may be a list: the next test
    words = [f"model.init_config.k{number}={text}" for number, text in enumerate(texts)]
    assert list(build_config(compose_config(words)).model.init_config.values()) == texts


@pytest.mark.parametrize(
    ("word", "value"),
    [("k=1e3", 1000.0), ("k=3", 3), ("k=null", None), ("k=true", True), ("k=", ""), ("k='3'", "3"), ('k="a, b"', "a, b"), ("k=[a,2]", ["a", 2]),
     ("k={a: 1}", {"a": 1}), ("k=str(5)", "5"), ("k=[/José/x.py, 5, null, 'q, é']", ["/José/x.py", 5, None, "q, é"]),
     ("k={a: José}", {"a": "José"})],
)  # fmt: skip
def test_what_is_no_text_stays_what_it_is(word, value):
    assert values_of([word]) == {"k": value}


def test_a_sweep_has_one_value_for_each_item_and_text_with_commas_is_none():
    (swept,) = parse_overrides(normalize_overrides(["experiment_name=José,b"], sweeps=True))
    assert (
        swept.is_sweep_override()
        and list(swept.sweep_iterator()) == ["José", "b"]
        or [getattr(item, "text", item) for item in swept.sweep_iterator()] == ["José", "b"]
    )
    (text,) = parse_overrides(normalize_overrides(["experiment_name=José,b"]))
    assert text.value() == "José,b"
    (number,) = parse_overrides(normalize_overrides(["seed=0,1"]))
    assert number.is_sweep_override()  # an integer cannot be meant as text; composing it names the sweep and the list
    with pytest.raises(ConfigError, match="-m seed=0,1"):
        compose_config(["seed=0,1"])


def test_an_interpolation_stays_one_and_other_dollars_are_text():
    assert (
        build_config(compose_config(["tracking.wandb_name=${tracking.wandb_project}"])).tracking.wandb_name == "rlinf"
    )
    assert quoted("k=${}", interpolates=True) == 'k="\\${}"' and quoted("k=${}") == 'k="${}"'
    with pytest.raises(ConfigError, match="tracking.wandb_name.*nowhere"):
        build_config(compose_config(["tracking.wandb_name=${nowhere}"]))
    literal = build_config(compose_config([r"tracking.wandb_name=\${nowhere}"]))
    assert literal.tracking.wandb_name == "${nowhere}", "what the message says to write"


def test_quotes_are_added_once():
    for text in TEXTS:
        once = normalize_overrides([f"tracking.wandb_name={text}"])
        assert normalize_overrides(once) == once


@pytest.mark.parametrize("word", ["k=[draft] be brief", "k={x", "k=[a"])
def test_the_error_of_a_half_list_gives_the_words_to_type(word):
    with pytest.raises(ConfigError) as error:
        values_of([word])
    (typed,) = shlex.split(str(error.value).rpartition("twice: ")[2])
    assert values_of([typed]) == {"k": word.partition("=")[2]}
    with pytest.raises(ConfigError, match="deletes a key"):
        values_of(["~k=1"])


def test_hydra_alone_would_change_or_refuse_most_of_these_texts():
    """The control: without quotes, most of the texts above are errors, sweeps or other texts."""
    parser, changed = OverridesParser.create(), 0
    for text in TEXTS:
        try:
            changed += parser.parse_override(f"k={text}").value() != text
        except HydraException:
            changed += 1
    assert changed >= 20 and OmegaConf.create({"k": r"\${x}"}).k == "${x}"
