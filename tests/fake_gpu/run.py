"""Print the work of a model on a GPU that is not there: ``python -m tests.fake_gpu.run openvla_oft model.is_lora=true update``."""

from __future__ import annotations

import os
import sys
import time

from tests.fake_gpu.gpu import environment, why_not


def main(words: list[str]) -> None:
    """Print one row for each phase, and the places behind it."""
    from tests.fake_gpu.cases import MODELS
    from tests.fake_gpu.runs import count

    family, *rest = words
    phases = [word for word in rest if "=" not in word]
    start = time.monotonic()
    result = count([*MODELS[family], *[word for word in rest if "=" in word]], rows=8, phases=phases)
    for phase, counts in result.items():
        places = counts.pop("places")
        print(f"\n{phase}:", *(f"{name} {number:,}" for name, number in counts.items() if name != "peak_at"), sep="  ")
        print(f"  peak at {counts['peak_at']}")
        for column, found in places.items():
            for place, number in list(found.items())[:12]:
                print(f"  {column:9}{number:6}  {place}")
    print(f"\n{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    if os.environ.get("LD_PRELOAD"):
        main(sys.argv[1:])
    elif (reason := why_not()) is not None:
        sys.exit(reason)
    else:
        os.execve(sys.executable, [sys.executable, "-m", "tests.fake_gpu.run", *sys.argv[1:]], environment())
