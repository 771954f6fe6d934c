"""Peak memory of a rank for weights, gradients and optimiser of a sharded policy: 1, 2 and 4 ranks on this machine.

    python benchmarks/sharded_memory.py [--millions 200]

Every rank trains a stack of layers with random weights in float32 for a step of two micro-batches, through ``Sharded`` and
``TrainStep``. The resident size before the model is built (the interpreter and its libraries) is subtracted. The last line is a
JSON object; ``ours`` is the largest share of one rank's memory on 2 and 4 ranks relative to its limit (0.6, 0.35), ``peer`` the
limit's own 1, and ``ratio`` their quotient.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlinf.distributed.launch import launch  # noqa: E402
from rlinf.distributed.parallel import Sharded  # noqa: E402
from rlinf.distributed.process_group import rank  # noqa: E402
from rlinf.optim.master_adamw import MasterAdamW  # noqa: E402
from rlinf.optim.train_step import TrainStep  # noqa: E402

LIMITS = {2: 0.6, 4: 0.35}
WIDTH = 2048


class Layer(nn.Module):
    """A residual layer of 4 * WIDTH^2 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, WIDTH] -> [B, WIDTH]``."""
        return x + self.down(torch.relu(self.up(x)))


class Policy(nn.Module):
    """As many layers as make ``num_weights`` weights."""

    fsdp_wrap_modules = ("Layer",)

    def __init__(self, num_weights: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(round(num_weights / (4 * WIDTH**2))))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, WIDTH] -> [B, WIDTH]``."""
        for layer in self.layers:
            x = layer(x)
        return x


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(arguments: tuple[str, float]) -> None:
    """Train on this rank, and write its peak above the libraries."""
    folder, num_weights = arguments
    torch.set_num_threads(1)
    warm_up = nn.Linear(2, 2)
    MasterAdamW(warm_up.parameters())  # imports what the first optimiser imports
    torch.manual_seed(0)
    before = peak_bytes()
    model = Policy(num_weights)
    held = Sharded(model, "cpu")
    step = TrainStep(MasterAdamW(model.parameters(), lr=1e-3), 1.0, parallel=held)
    rows = torch.randn(2, 4, WIDTH)
    step.accumulate(rows, lambda part: (model(part).square().mean(), {}))
    step.apply(0.0)
    count = sum(p.numel() for p in model.parameters())
    (Path(folder) / f"{rank()}.json").write_text(json.dumps({"bytes": peak_bytes() - before, "weights": count}))


def measure(num_ranks: int, num_weights: float) -> tuple[float, int]:
    """Return the largest peak of a rank in bytes, and the number of weights."""
    with tempfile.TemporaryDirectory() as folder:
        launch(train, (folder, num_weights), num_ranks, "cpu", process_group=True)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == num_ranks
    return max(each["bytes"] for each in found), found[0]["weights"]


def main() -> None:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=200.0, help="weights in millions")
    num_weights = parser.parse_args().millions * 1e6
    peaks = {}
    for ranks in (*LIMITS, 1):  # one rank runs in this process, whose peak the others would inherit
        peaks[ranks], count = measure(ranks, num_weights)
        print(
            f"{ranks} ranks: {peaks[ranks] / 1e6:.0f} MB a rank, {peaks[ranks] / count:.2f} bytes a weight", flush=True
        )
    shares = {ranks: peaks[ranks] / peaks[1] for ranks in LIMITS}
    ours = max(shares[ranks] / limit for ranks, limit in LIMITS.items())
    result = {
        "name": "sharded_memory", "ours": ours, "peer": 1.0, "ratio": 1.0 / ours, "weights": count,
        "bytes_per_rank": peaks, "share_of_one_rank": shares, "limits": LIMITS,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if ours <= 1 else 1)


if __name__ == "__main__":
    main()
