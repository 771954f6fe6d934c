"""Rewards by rules: each rule by hand, its traps, and the sum."""

import math

import pytest

from rlinf.errors import ConfigError
from rlinf.recipes.config import OverlongRewardConfig
from rlinf.recipes.rewards import REWARDS, make_rewards
from rlinf.recipes.samples import Prompt


def score(name: str, completion: str, reference: str | None = None, **row) -> float:
    return REWARDS.get(name)(completion, reference, **row)


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("6 * 7 = 42\n#### 42", "#### 42", 1),
        ("#### 1,234", "so it is\n#### 1234", 1),
        ("#### -5", "#### -5", 1),
        ("#### 5", "#### -5", 0),
        ("#### 42.", "#### 42", 0),
        ("#### 42.0", "#### 42", 0),
        ("#### 42 #### 43", "#### 42", 1),  # the first one counts
        ("#### 43 #### 42", "#### 42", 0),
        ("42", "#### 42", 0),
        ("####42", "#### 42", 0),  # one space is required
        ("42", "42", 0),  # neither has an answer: equal, and still wrong
        ("", "", 0),
    ],
)
def test_gsm8k(completion, reference, expected):
    assert score("gsm8k", completion, reference) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("it is 41, no, 42.", "#### 42", 1),
        ("$1,234.50", "#### 1234.5", 1),
        ("42.0", "#### 42", 1),
        ("42 or 43", "#### 42", 0),
        ("none", "none", 0),
        ("1.2.3", "#### 3", 0),
        ("3-5", "#### -5", 1),
    ],
)
def test_gsm8k_loose(completion, reference, expected):
    assert score("gsm8k_loose", completion, reference) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("<think>b?</think>\n\n<answer>A</answer>", "A", 1),
        ("<answer>\n a \n</answer>", "<answer>A</answer>", 1),
        (" a ", "A", 1),
        ("The answer is A", "A", 0),
        ("<answer>A</answer><answer>B</answer>", "B", 0),  # the first one counts
        ("<answer>B</answer>", "A", 0),
        ("<answer>A", "A", 0),
    ],
)
def test_single_choice(completion, reference, expected):
    assert score("single_choice", completion, reference) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>so\nso</think>\n\n<answer>A</answer>", 1),
        ("<think></think>\n\n<answer></answer>", 1),
        ("<think>so</think>\n\n<answer>A</answer>\n", 1),
        ("<think>so</think>\n\n<answer>A</answer>\n\n", 0),
        ("<think>so</think>\n<answer>A</answer>", 0),
        ("<think>so</think> <answer>A</answer>", 0),  # as the prompt of Cosmos-Reason1 shows it
        ("<think>so</think>\n\n\n<answer>A</answer>", 0),
        (" <think>so</think>\n\n<answer>A</answer>", 0),
        ("<think>a<think>b</think>\n\n<answer>A</answer>", 0),
        ("<think>a</think>b</think>\n\n<answer>A</answer>", 0),
        ("<answer>A</answer>", 0),
    ],
)
def test_format(completion, expected):
    assert score("format", completion) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("thus \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{x^2 + 2x + 1}", "\\boxed{(x+1)^2}", 1),
        ("\\boxed{3}", "4", 0),
        ("0.5", "0.5", 0),  # nothing is boxed
        ("\\boxed{", "0.5", 0),
    ],
)
def test_boxed_math(completion, reference, expected):
    pytest.importorskip("math_verify")
    assert score("boxed_math", completion, reference) == expected


def test_a_mathematical_question_without_end_scores_nothing(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("rlinf.recipes.rewards.MATH_SECONDS", 1)
    assert score("boxed_math", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{8^{8^{8^{8}}}}") == 0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("so\nAnswer: 42", 1),
        ("answer: $42$\n", 1),
        ("Answer: 42\nI think", -1),
        ("Answer: 43", -1),
        ("42", -1),
        ("", -1),
    ],
)
def test_direct_math(completion, expected):
    assert score("direct_math", completion, "42") == expected


def test_overlong_is_linear_over_the_buffer():
    found = [score("overlong", "", num_tokens=n, max_tokens=100) for n in (0, 75, 80, 100)]
    assert found == pytest.approx([0, 0, -0.2, -1])
    assert score("overlong", "", num_tokens=95, max_tokens=100, overlong_buffer=10) == pytest.approx(-0.5)
    with pytest.raises(ConfigError, match="overlong needs num_tokens and max_tokens"):
        score("overlong", "")


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_loose", "single_choice", "boxed_math", "direct_math"])
def test_a_missing_reference_is_an_error_with_the_setting(name):
    if name == "boxed_math":
        pytest.importorskip("math_verify")
    with pytest.raises(ConfigError, match="response_column_name"):
        score(name, "\\boxed{1}\nAnswer: 1")


def test_rewards_are_summed_with_their_weights_and_keep_their_parts():
    text = "<think>x</think>\n\n<answer>A</answer>"
    assert make_rewards(["single_choice", "format"])(text, Prompt([], reference="A")) == (
        2,
        {"single_choice": 1, "format": 1},
    )
    assert make_rewards({"single_choice": 2.0, "format": 0.5})(text, Prompt([], reference="B")) == (
        0.5,
        {"single_choice": 0, "format": 1},
    )
    assert make_rewards("gsm8k")("#### 1", Prompt([], reference="#### 1"))[0] == 1


def test_a_reward_of_ones_own_gets_the_row_and_the_length():
    def short(completion, reference, level, num_tokens, **row):
        return level - num_tokens

    prompt = Prompt([], reference="r", row={"level": 5, "reference": "column", "completion": "column"})
    assert make_rewards([short, "format"])("x", prompt, num_tokens=2) == (3, {"short": 3, "format": 0})
    REWARDS.register("short", short)
    try:
        assert make_rewards({"short": 2.0})("x", prompt, num_tokens=2)[0] == 6
    finally:
        del REWARDS.entries()["short"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gsm9k", "Unknown reward 'gsm9k'. Did you mean 'gsm8k'"),
        ([], "reward_function is empty"),
        ({"gsm8k": math.nan}, "weight of the reward 'gsm8k' is nan"),
        ({"gsm8k": "1"}, "weight of the reward 'gsm8k' is '1'"),
        ([lambda *a, **k: 0, lambda *a, **k: 1], "Two rewards are called '<lambda>'"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        make_rewards(setting)


def test_a_reward_that_fails_is_named():
    def broken(completion, reference, **row):
        return math.inf

    def missing(completion, reference, **row):
        return row["no such column"]

    with pytest.raises(ConfigError, match="The reward 'broken' returned inf for 'text'"):
        make_rewards(broken)("text", Prompt([]))
    with pytest.raises(KeyError) as caught:
        make_rewards(missing)("text", Prompt([], reference="r"))
    assert "raised by the reward 'missing' for 'text', reference 'r'" in caught.value.__notes__[0]


def test_the_penalty_of_long_answers_is_added_with_its_buffer_and_factor():
    setting = OverlongRewardConfig(enable_overlong_penalty=True, buffer_length=10, penalty_factor=3.0)
    found = make_rewards("gsm8k", setting)("#### 1", Prompt([], reference="#### 1"), num_tokens=95, max_tokens=100)
    assert found == (1 - 3 * 0.5, {"gsm8k": 1, "overlong": -0.5})
    setting.enable_overlong_penalty = False
    assert (
        make_rewards("gsm8k", setting)("#### 1", Prompt([], reference="#### 1"), num_tokens=95, max_tokens=100)[0] == 1
    )
    given = make_rewards(
        {"overlong": 2.0}, OverlongRewardConfig(enable_overlong_penalty=True, buffer_length=10, penalty_factor=3.0)
    )
    assert given("", Prompt([]), num_tokens=95, max_tokens=100)[0] == -1, "a weight that is given stays"
