"""Print the work of models on a GPU that is not there.

python -m tests.fake_gpu.run                               names of the cases
python -m tests.fake_gpu.run "openvla_oft, LoRA" update    counts, and the places behind them
python -m tests.fake_gpu.run --table                       budgets.txt
python -m tests.fake_gpu.run --json                        all counts, which tests/fake_gpu/real.py reads
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

from tests.fake_gpu.gpu import run_script

COLUMNS = ("syncs", "d2h", "h2d", "launches", "bookkeeping", "peak_mb")
HEADROOM = {"launches": 1.02, "bookkeeping": 1.05, "peak_mb": 1.01}
"""Share by which a budget may exceed today's number: other releases of transformers launch a few kernels more or fewer."""


def columns_of(counts: dict[str, Any]) -> dict[str, int]:
    """Return the columns of the table."""
    return {name: counts[name] for name in COLUMNS[:-1]} | {"peak_mb": math.ceil(counts["peak_bytes"] / 1e6)}


def table_row(case: str, phase: str, counts: dict[str, Any]) -> str:
    """Return a row of ``budgets.txt``."""
    numbers = {name: math.ceil(number * HEADROOM.get(name, 1)) for name, number in columns_of(counts).items()}
    return f"{case:<32}| {phase:<12}|" + "".join(f"{numbers[name]:>12}" for name in COLUMNS)


def main(words: list[str]) -> None:
    """Print what the words ask for."""
    from tests.fake_gpu.cases import CASES
    from tests.fake_gpu.runs import count

    if words == ["--table"]:
        print(f"{'case':<32}| {'phase':<12}|" + "".join(f"{name:>12}" for name in COLUMNS))
        for case in CASES:
            for phase, counts in count(case).items():
                print(table_row(case, phase, counts), flush=True)
        return
    if words == ["--json"]:
        print(json.dumps({case: count(case) for case in CASES}))
        return
    if not words:
        print(*CASES, sep="\n")
        return
    start = time.monotonic()
    for phase, counts in count(words[0]).items():
        print(f"\n{phase}:", *(f"{name} {number:,}" for name, number in columns_of(counts).items()), sep="  ")
        if phase in words[1:]:
            print(f"  peak at {counts['peak_at']}")
            for column, found in counts["places"].items():
                print(*(f"  {column:9}{number:6}  {place}" for place, number in found.items()), sep="\n")
    print(f"\n{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    run_script(main)
