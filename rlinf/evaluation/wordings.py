"""Other sentences for the instructions of a list of episodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SYNONYMS = {
    "block": "cube", "zone": "area", "reach": "move to", "go to": "drive to", "touch": "tap", "push": "shove", "pick up": "grab",
    "put": "place", "place": "put", "open": "pull open", "close": "shut", "turn on": "switch on", "turn off": "switch off",
    "stack": "pile up", "bowl": "dish", "plate": "platter", "cabinet": "cupboard", "mug": "cup",
}  # fmt: skip
"""Phrases that may stand for each other. Colours, sides and names of goods have none."""


def paraphrased(sentences: Sequence[str]) -> dict[str, str]:
    """Return each sentence in other words: synonyms for the words that have one, and a polite frame."""
    words = sorted(SYNONYMS, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    return {one: f"please {pattern.sub(lambda match: SYNONYMS[match[0]], one)} now" for one in sentences}


def swapped(sentences_of_tasks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return for each sentence another one that asks for something else; empty if there is only one.

    Of a task with several sentences, it is another one of the same task: half of the sorted list further on, so that sentences with
    two objects differ in the first, too. Else it is that of the next task.
    """
    tasks = {task: sorted(set(sentences)) for task, sentences in sentences_of_tasks.items()}
    everything = sorted({one for sentences in tasks.values() for one in sentences})
    found = {}
    for sentences in tasks.values():
        others = sentences if len(sentences) > 1 else everything
        for one in sentences:
            found[one] = others[(others.index(one) + max(1, len(others) // 2)) % len(others)]
    return {one: other for one, other in found.items() if one != other}
