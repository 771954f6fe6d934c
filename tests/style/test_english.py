"""Phrases that a reader has to read twice do not grow: "that of", "what is" and "is no" stand where a noun would do."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted((ROOT / "rlinf").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATTERNS = {
    "that of": (re.compile(r"\b(that|those) of\b", re.IGNORECASE), 'repeat the noun, or write "the policy\'s"'),
    "what is": (
        re.compile(r"\bwhat (is|was|plays|writes|there)\b", re.IGNORECASE),
        "write the noun: a file, a player, an error",
    ),
    "is no": (re.compile(r"\b(is|are) (no|none)\b"), 'write "is not a", "has no" or "without"'),
}
CEILINGS = {"that of": (9, 1), "what is": (5, 7), "is no": (38, 11)}
"""The most matches in the code and in the pages. Lower a number after an improvement; never raise it."""


def matches(paths: list[Path], pattern: re.Pattern) -> dict[Path, list[str]]:
    """Return the matches of each file with any, as ``line number: line``; one entry a match."""
    found = {}
    for path in paths:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if here := [f"{number}: {line.strip()}" for number, line in lines for _ in pattern.finditer(line)]:
            found[path] = here
    return found


def complaint(name: str, paths: list[Path], ceiling: int) -> str:
    """Return "" up to the ceiling; else the count, the lines of the file with most matches, and the remedy."""
    pattern, remedy = PATTERNS[name]
    found = matches(paths, pattern)
    count = sum(map(len, found.values()))
    if count <= ceiling:
        return ""
    worst = max(found, key=lambda path: len(found[path]))
    lines = "\n  ".join(found[worst])
    return f"{count} matches of '{name}', at most {ceiling}: {remedy}. Most of them are in {worst}:\n  {lines}"


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("place", "paths"), [(0, CODE), (1, PAGES)], ids=["code", "pages"])
def test_phrases_without_a_noun_do_not_grow(name, place, paths):
    problem = complaint(name, paths, CEILINGS[name][place])
    assert not problem, problem


@pytest.mark.parametrize(
    ("name", "planted"),
    [("that of", "Those of a head are that of the base."), ("what is", "It reads what plays, and what there is."),
     ("is no", "There is no key, and there are none.")],
)  # fmt: skip
def test_a_planted_sentence_is_counted(name, planted, tmp_path):
    page, clean = tmp_path / "page.md", tmp_path / "clean.md"
    page.write_text(f"# A title\n{planted}\n")
    clean.write_text("The head's number, whatever it is not. This is now noted.\n")
    assert complaint(name, [page, clean], 2) == "", "two matches are allowed"
    problem = complaint(name, [page, clean], 1)
    assert f"2: {planted}" in problem and PATTERNS[name][1] in problem and "clean.md" not in problem
