"""Rule-based rewards for completions, and their weighted sum.

A reward is a function ``reward(completion, reference, **row) -> float``. ``completion`` is the generated text without special tokens.
``reference`` is the row's reference, or None without a column for it; with several references, the highest reward is used. ``row``
contains the remaining columns, ``num_tokens`` (the completion's length) and ``max_tokens`` (its limit).

Register your own reward with ``REWARDS.register("name", function)`` in a dataset script or a plugin, or through a package's
``rlinf.rewards`` entry point.
"""

import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from rlinf.errors import ConfigError, import_extra
from rlinf.recipes.config import OverlongRewardConfig
from rlinf.recipes.samples import Prompt
from rlinf.registry import Registry

Reward = Callable[..., float]

_HERE = "rlinf.recipes.rewards"
REWARDS: Registry[Reward] = Registry(
    "reward",
    "rlinf.rewards",
    {
        "boxed_math": f"{_HERE}:boxed_math",
        "direct_math": f"{_HERE}:direct_math",
        "format": f"{_HERE}:think_format",
        "gsm8k": f"{_HERE}:gsm8k",
        "gsm8k_loose": f"{_HERE}:gsm8k_loose",
        "overlong": f"{_HERE}:overlong",
        "single_choice": f"{_HERE}:single_choice",
    },
)
SETTING = "train.train_policy.reward_function"
MATH_SECONDS = 5
OVERLONG_BUFFER = 0.25

_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9][0-9.,]*")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK_ANSWER = re.compile(r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*?</answer>\n?", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


@dataclass
class Rewards:
    """Weighted sum of rewards, built by ``make_rewards``; ``facts`` are passed to every reward as additional arguments."""

    functions: dict[str, Reward]
    weights: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, completion: str, prompt: Prompt, **facts: Any) -> tuple[float, dict[str, float]]:
        """Return a completion's weighted sum of rewards, and the unweighted rewards by name.

        Raise ConfigError if a reward is not finite, or needs a reference that the row lacks. ``facts`` are the completion's
        ``num_tokens`` and ``max_tokens``.
        """
        # A column with either name would clash with the positional arguments.
        columns = {
            key: value
            for key, value in {**prompt.row, **self.facts, **facts}.items()
            if key not in ("completion", "reference")
        }
        references = getattr(prompt.reference, "references", [prompt.reference])
        parts = {
            name: max(self._score(name, completion, reference, columns) for reference in references)
            for name in self.functions
        }
        return sum(self.weights[name] * value for name, value in parts.items()), parts

    def _score(self, name: str, completion: str, reference: str | None, columns: dict[str, Any]) -> float:
        try:
            value = self.functions[name](completion, reference, **columns)
            number = float(value)
        except Exception as error:
            error.add_note(f"raised by the reward '{name}' for {completion[:200]!r}, reference {reference!r}")
            raise
        if not math.isfinite(number):
            raise ConfigError(f"The reward '{name}' returned {value!r} for {completion[:80]!r}; expected finite.")
        return number


def make_rewards(
    rewards: str | Reward | Sequence[str | Reward] | Mapping[str, float],
    overlong: OverlongRewardConfig | None = None,
    setting: str = SETTING,
) -> Rewards:
    """Build the weighted sum. Raise ConfigError if a name is unknown, a weight is not finite, or the list is empty.

    ``rewards`` are a name in ``REWARDS``, a function, a list of these (each with weight 1), or ``{name: weight}``. ``overlong``, if
    enabled, adds the reward of that name with its buffer and weight. ``setting`` is the key that configures ``rewards``, for messages.
    """
    if isinstance(rewards, str) or callable(rewards):
        rewards = [rewards]
    weights = dict(rewards) if isinstance(rewards, Mapping) else dict.fromkeys(rewards, 1.0)
    if not weights:
        raise ConfigError(f"{setting} is empty; expected a reward. Set {setting}=gsm8k")
    if overlong is not None and overlong.enable_overlong_penalty:
        weights.setdefault("overlong", overlong.penalty_factor)
    result = Rewards({}, {}, {} if overlong is None else {"overlong_buffer": overlong.buffer_length})
    for reward, weight in weights.items():
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"The weight of the reward '{name}' is {weight!r}. Set {setting}.{name}=1.0")
        if name in result.functions:
            raise ConfigError(f"Two rewards are called '{name}'; expected unique names, which the logs use.")
        result.functions[name] = REWARDS.get(reward) if isinstance(reward, str) else reward
        result.weights[name] = float(weight)
    return result


def gsm8k(completion: str, reference: str | None, **row: object) -> float:
    """Return 1 if the number after the first ``#### `` equals the reference's, compared as text without commas; otherwise 0."""
    number, expected = (_after_hashes(text) for text in (completion, _required(reference, "gsm8k")))
    return float(number is not None and number == expected)


def gsm8k_loose(completion: str, reference: str | None, **row: object) -> float:
    """Return 1 if the last number in the text equals the last number in the reference; otherwise 0."""
    number, expected = (_last_number(text) for text in (completion, _required(reference, "gsm8k_loose")))
    return float(number is not None and number == expected)


def single_choice(completion: str, reference: str | None, **row: object) -> float:
    """Return 1 if the text in the first answer tags (without tags, the complete text) equals the reference's; otherwise 0."""
    return float(_choice(completion) == _choice(_required(reference, "single_choice")))


def think_format(completion: str, reference: str | None = None, **row: object) -> float:
    """Return 1 if the text consists of a think block, exactly two newlines, and an answer block; otherwise 0."""
    return float(_THINK_ANSWER.fullmatch(completion) is not None)


def boxed_math(completion: str, reference: str | None, **row: object) -> float:
    r"""Return 1 if math_verify finds the content of ``\boxed{}`` mathematically equal to the reference within 5 s; otherwise 0."""
    math_verify: Any = import_extra("math_verify", "The reward boxed_math", "recipes")
    reference = _required(reference, "boxed_math")
    if "\\boxed" not in completion:
        return 0.0
    # math_verify enforces its time limit with a signal, which only the main thread of a process receives.
    seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    if seconds is None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    parsed, expected = (
        math_verify.parse(text, [math_verify.LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=seconds)
        for text in (completion, reference if "\\boxed" in reference else f"\\boxed{{{reference}}}")
    )
    return float(bool(parsed) and bool(expected) and math_verify.verify(expected, parsed, timeout_seconds=seconds))


def direct_math(completion: str, reference: str | None, **row: object) -> float:
    """Return 1 if the last line is ``Answer: <reference>``, otherwise -1 (DAPO, Yu et al. 2025)."""
    lines = completion.strip().split("\n")
    match = _ANSWER_LINE.fullmatch(lines[-1].strip()) if lines else None
    return 1.0 if match and _plain(match[1]) == _plain(_required(reference, "direct_math")) else -1.0


def overlong(completion: str, reference: str | None = None, **row: Any) -> float:
    """Return a linear penalty from 0 to -1 over the last ``overlong_buffer`` tokens (default: a quarter) of the limit (DAPO, eq. 13)."""
    missing = [name for name in ("num_tokens", "max_tokens") if name not in row]
    if missing:
        raise ConfigError(f"The reward overlong needs {' and '.join(missing)}: the completion's length and limit.")
    buffer = row.get("overlong_buffer") or max(1, round(OVERLONG_BUFFER * row["max_tokens"]))
    beyond = row["num_tokens"] - (row["max_tokens"] - buffer)
    return -min(max(beyond / buffer, 0.0), 1.0)


def _required(reference: str | None, name: str) -> str:
    if reference is None:
        raise ConfigError(f"The reward {name} needs a reference, but the row has none. "
                          "Set train.train_policy.response_column_name=<column of the references>")  # fmt: skip
    return reference


def _after_hashes(text: str) -> str | None:
    match = _AFTER_HASHES.search(text)
    return match[1].replace(",", "").replace("$", "") if match else None


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "").rstrip(".")) if numbers else None
    except InvalidOperation:  # such as 1.2.3
        return None


def _choice(text: str) -> str:
    match = _ANSWER.search(text)
    return (match[1] if match else text).strip().lower()


def _plain(text: str) -> str:
    return re.sub(r"[\s$,.\\{}]|\\boxed", "", text).lower()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "gsm8k": _after_hashes,
    "gsm8k_loose": lambda text: None if (number := _last_number(text)) is None else str(number),
    "single_choice": _choice,
}
"""Functions that extract the part of a completion that a reward compares; rewards not listed use the complete text."""
