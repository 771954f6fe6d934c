"""Speed of forward and backward of a language model in ``HFModel``, next to plain transformers and next to the machine.

``ours`` and ``peer`` are samples per second (sequences of ``--seq-len`` tokens) of forward, loss and backward, of
``HFModel`` and of ``AutoModelForCausalLM`` with the same weights, measured in turns; the ratio shows what the wrapper
costs. ``peak_fraction`` is the share of the machine's measured matmul speed (a large square, same dtype and threads)
that ``ours`` reaches, with the FLOPs of Chowdhery et al. 2022 (PaLM), appendix B, per sequence of T tokens:

    T * (6 N + 12 L H Q T)

N: parameters without the input embedding, which multiplies nothing; L layers, H heads of Q channels. Attention is
counted in full, without the half that the causal mask saves. Random weights of the llama shape.

    python benchmarks/train_step.py [--sizes 60m 200m] [--precision bf16|fp32] [--batch 4] [--seq-len 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from rlinf.distributed.process_group import set_num_threads
from rlinf.models import HFModel
from rlinf.seeding import seed_everything

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256},
    "60m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "200m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "num_attention_heads": 16},
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def seconds_of(function: Any, device: str) -> float:
    """Seconds of one call, with what it has started on the device."""
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_flops_per_s(size: int, dtype: torch.dtype, device: str, rounds: int) -> float:
    """Best measured FLOP/s of a square matrix product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds_of(lambda: left @ right, device)
    return 2 * size**3 / min(seconds_of(lambda: left @ right, device) for _ in range(rounds))


def forward_backward(model: nn.Module, input_ids: Tensor) -> None:
    """Next-token loss of all positions, and its gradients."""
    model.zero_grad()
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten()).backward()


def measure(size: str, arguments: argparse.Namespace, device: str, peak: float) -> dict[str, Any]:
    """Both speeds of one size, in turns, and what they are of the peak."""
    dtype = DTYPES[arguments.precision]
    config = LlamaConfig(**SIZES[size])
    ours = HFModel.from_config(config, dtype=dtype).to(device)
    peer = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    peer.load_state_dict(ours.model.state_dict())
    input_ids = torch.randint(0, config.vocab_size, (arguments.batch, arguments.seq_len), device=device)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(arguments.rounds + 1):
        for name, model in (("ours", ours), ("peer", peer)):
            spent = seconds_of(lambda model=model: forward_backward(model, input_ids), device)
            if turn > 0:  # the first one warms up
                seconds[name].append(spent)
    speeds = {name: arguments.batch / statistics.median(values) for name, values in seconds.items()}
    embedding = ours.model.get_input_embeddings().weight.numel()
    parameters = sum(p.numel() for p in ours.parameters())
    attention = 12 * config.num_hidden_layers * config.hidden_size * arguments.seq_len
    flops = arguments.seq_len * (6 * (parameters - embedding) + attention)
    result = {
        "parameters": parameters, "ours": round(speeds["ours"], 3), "peer": round(speeds["peer"], 3),
        "ratio": round(speeds["ours"] / speeds["peer"], 3), "gflop_per_sample": round(flops / 1e9, 2),
        "peak_fraction": round(speeds["ours"] * flops / peak, 3),
    }  # fmt: skip
    print(f"{size:>5}: {parameters / 1e6:6.1f} M parameters, {speeds['ours']:8.2f} samples/s (plain {speeds['peer']:.2f}), "
          f"{speeds['ours'] * flops / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s")  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["60m", "200m"], choices=tuple(SIZES))
    parser.add_argument("--precision", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--matmul-size", type=int, default=2048)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_num_threads(None, 1)
    seed_everything(0)
    peak = matmul_flops_per_s(arguments.matmul_size, DTYPES[arguments.precision], device, arguments.rounds)
    results = {size: measure(size, arguments, device, peak) for size in arguments.sizes}
    largest = results[arguments.sizes[-1]]
    print(json.dumps({
        "name": "train_step", "ours": largest["ours"], "peer": largest["peer"], "ratio": largest["ratio"],
        "peak_fraction": largest["peak_fraction"], "unit": "samples/s", "precision": arguments.precision, "device": device,
        "batch": arguments.batch, "seq_len": arguments.seq_len, "matmul_peak_gflops": round(peak / 1e9, 1),
        "threads": torch.get_num_threads(), "sizes": results,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
