"""The work of ``CASES`` on a GPU that is there, beside the counts of the one that is not.

python -m tests.fake_gpu.run --json > counts.json              on a machine without a GPU, with the CPU build of torch
python -m tests.fake_gpu.real counts.json                      on a GPU
python -m tests.fake_gpu.real counts.json "mlp" "pi0, actor"    some cases
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.fake_gpu.cases import CASES
from tests.fake_gpu.gpu import PACKAGE, Counts, FakeGpu, Model
from tests.fake_gpu.runs import described, phases_of

COLUMNS = ("waits", "d2h", "h2d", "launches", "peak_bytes")


class RealGpu:
    """The present GPU, with the interface of ``FakeGpu`` that runs use.

    A blocking copy is a wait here. The driver names no place for kernels and copies.
    """

    device = "cuda"

    def place(self, model: Model) -> Model:
        """Put a model on the meta device onto the GPU, with random weights."""
        FakeGpu.place(self, model)  # type: ignore[arg-type]
        with torch.no_grad():
            for each in model.parameters():
                nn.init.normal_(each, std=0.02)
            for each in model.buffers():
                each.zero_()
        return model

    @contextlib.contextmanager
    def count(self) -> Iterator[Counts]:
        """Count the work inside."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        counts, kinds = Counts(), [torch.profiler.ProfilerActivity.CUDA]
        with warnings.catch_warnings(record=True) as caught, torch.profiler.profile(activities=kinds) as profiler:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield counts
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        counts.peak_bytes = torch.cuda.max_memory_allocated()
        counts.waits = Counter(
            f"{each.filename.removeprefix(PACKAGE)}:{each.lineno}"
            for each in caught
            if "synchronizing CUDA operation" in str(each.message)
        )
        for event in profiler.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
                name = event.name()
                kind = "d2h" if "DtoH" in name else "h2d" if "HtoD" in name else "launches"
                getattr(counts, kind)["the GPU"] += 1
                counts.ops[name] += 1


def main(words: list[str]) -> None:
    """Print a line for each phase: columns as ``there / not there``; a last line of JSON has both."""
    known = json.loads(Path(words[0]).read_text())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':<32}| {'phase':<12}|" + "".join(f"{name:>24}" for name in COLUMNS))
    found: dict[str, Any] = {}
    for case in words[1:] or CASES:
        try:
            for phase, counts in phases_of(case, RealGpu()):
                found.setdefault(case, {})[phase] = here = described(counts)
                there = known[case][phase]
                there["waits"] += there["syncs"] + there["d2h"]
                pairs = (f"{here[name]:,} / {there[name]:,}" for name in COLUMNS)
                print(f"{case:<32}| {phase:<12}|" + "".join(f"{pair:>24}" for pair in pairs), flush=True)
        except Exception:  # noqa: BLE001 - the other cases are of interest, too
            print(f"{case:<32}| {traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
