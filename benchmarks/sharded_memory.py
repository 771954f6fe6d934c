"""Peak memory of a rank of a sharded policy on 1, 2 and 4 ranks of this machine: while it starts, and while it trains.

    python benchmarks/sharded_memory.py [--millions 200]

Start: the ranks hold a language model of that size from safetensors on this disk in float32 shards, by the calls of
``HuggingFacePolicy``. ``rows``: a rank reads only its rows of the weights. ``whole``: a rank first reads the whole model.

Training: every rank trains a stack of layers with random weights in float32 for a step of two micro-batches, through ``Sharded``
and ``TrainStep``.

The resident size before the model is built (the interpreter and its libraries) is subtracted. The last line is a JSON object;
``ours`` is the largest share of one rank's memory on 2 and 4 ranks relative to its limit (0.6, 0.35), at start and in training,
``peer`` the limit's own 1, and ``ratio`` their quotient. ``start_whole_to_rows`` is the quotient of the two ways to start, by ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlinf.distributed.deferred import deferred_parameters  # noqa: E402
from rlinf.distributed.launch import launch  # noqa: E402
from rlinf.distributed.parallel import Sharded, take_weights_of_rank_0  # noqa: E402
from rlinf.distributed.process_group import rank  # noqa: E402
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm  # noqa: E402
from rlinf.models import HFModel  # noqa: E402
from rlinf.models.weights_in_files import check_read  # noqa: E402
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
    """Return the largest resident size of this program so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def report(folder: str, before: int, model: nn.Module) -> None:
    """Write this rank's peak above ``before``, and the number of weights."""
    count = sum(p.numel() for p in model.parameters())
    (Path(folder) / f"{rank()}.json").write_text(json.dumps({"bytes": peak_bytes() - before, "weights": count}))


def save_language_model(folder: str, num_weights: float) -> None:
    """Write a language model with random weights, in files of 100 MB."""
    torch.set_num_threads(2)
    width, vocabulary = WIDTH // 2, 8192
    layers = round((num_weights - 2 * vocabulary * width) / (16 * width**2))
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=max(1, layers), num_attention_heads=16,
        num_key_value_heads=16, vocab_size=vocabulary,
    )  # fmt: skip
    HFModel.from_config(config).save_pretrained(folder, max_shard_size="100MB")


def start(arguments: tuple[str, str, bool]) -> None:
    """Hold the language model in shards, and write this rank's peak."""
    output, folder, rows = arguments
    torch.set_num_threads(1)
    tiny = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    HFModel.from_config(tiny)  # imports what the model imports
    before = peak_bytes()
    model = load_causal_lm(folder, CausalLMConfig(device_map=None), deferred=rows)
    model.fsdp_wrap_modules = HFModel(model).fsdp_wrap_modules
    sources = deferred_parameters(model)
    take_weights_of_rank_0(model)
    Sharded(model, "cpu")
    check_read(model, sources)
    report(output, before, model)


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
    report(folder, before, model)


def on_ranks(work: Callable[[Any], None], arguments: tuple, num_ranks: int) -> None:
    """Launch the ranks from a fresh process: a single rank runs in the process that launches it, whose peak would stay."""
    launch(work, arguments, num_ranks, "cpu", process_group=True)


def measure(work: Callable[[Any], None], num_ranks: int, *arguments: Any) -> tuple[int, int]:
    """Return the largest peak of a rank in bytes, and the number of weights."""
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=on_ranks, args=(work, (folder, *arguments), num_ranks)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == num_ranks
    return max(each["bytes"] for each in found), found[0]["weights"]


def compare(what: str, work: Callable[[Any], None], *arguments: Any) -> tuple[dict[int, int], int]:
    """Measure 1 rank, 2 and 4, and print each."""
    peaks = {}
    for ranks in (1, *LIMITS):
        peaks[ranks], count = measure(work, ranks, *arguments)
        each = f"{peaks[ranks] / 1e6:.0f} MB a rank, {peaks[ranks] / count:.2f} bytes a weight"
        print(f"{what}, {ranks} ranks: {each}", flush=True)
    return peaks, count


def main() -> None:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=200.0, help="weights in millions")
    num_weights = parser.parse_args().millions * 1e6
    with tempfile.TemporaryDirectory() as folder:
        save_language_model(folder, num_weights)
        rows, _ = compare("start, rows", start, folder, True)
        whole, start_weights = compare("start, whole", start, folder, False)
    training, count = compare("training", train, num_weights)
    shares = {
        name: {ranks: peaks[ranks] / peaks[1] for ranks in LIMITS}
        for name, peaks in (("start", rows), ("training", training))
    }
    ours = max(each[ranks] / limit for each in shares.values() for ranks, limit in LIMITS.items())
    result = {
        "name": "sharded_memory", "ours": ours, "peer": 1.0, "ratio": 1.0 / ours, "weights": count,
        "start_weights": start_weights, "start_bytes_per_rank": {"rows": rows, "whole": whole},
        "start_whole_to_rows": {ranks: whole[ranks] / rows[ranks] for ranks in rows},
        "bytes_per_rank": training, "share_of_one_rank": shares, "limits": LIMITS,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if ours <= 1 else 1)


if __name__ == "__main__":
    main()
