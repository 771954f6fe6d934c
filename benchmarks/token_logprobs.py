"""Memory and time of token log-probabilities with their gradients: ours against all logits at once.

``ours`` is ``sequence_logprobs``, which applies the head to a part of the tokens at a time; ``peer`` is the usual form,
``log_softmax`` over the logits of the whole batch. Each runs in a process of its own; memory is the peak resident size above
what the process held with the weights loaded (Linux). The values must agree to 1e-6 nat and the gradients to 1e-6 of their largest,
and ours must stay below ``--limit-gb``, or the script stops. Memory is the headline: ratio is the peer's over ours.

    python benchmarks/token_logprobs.py [--rows 4] [--tokens 1024] [--vocab-size 150000] [--hidden-size 64] [--limit-gb 1.3]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.llm.logprobs import sequence_logprobs

GB = 1e9


def resident_gb(key: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, in 1e9 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / GB


def all_logits(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Log-probabilities float32 ``[B, S]`` from logits ``[B, S, V]``."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def measure(way: str, arguments: argparse.Namespace) -> tuple[float, float, list, dict[str, list]]:
    """Seconds, peak memory, the values, and the gradient of each weight matrix, summed over its columns."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=arguments.vocab_size, hidden_size=arguments.hidden_size, num_hidden_layers=2,
        intermediate_size=2 * arguments.hidden_size, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1,
        max_position_embeddings=arguments.tokens,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, arguments.vocab_size, (arguments.rows, arguments.tokens))
    mask = torch.ones_like(ids, dtype=torch.bool)
    score = sequence_logprobs if way == "ours" else all_logits
    score(model, ids[:1, :8], mask[:1, :8]).sum().backward()  # kernels are loaded, gradients exist
    model.zero_grad(set_to_none=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    before, start = resident_gb("VmRSS"), time.perf_counter()
    values = score(model, ids, mask)
    values.mean().backward()
    seconds, peak = time.perf_counter() - start, resident_gb("VmHWM") - before
    gradients = {name: p.grad.double().sum(-1).tolist() for name, p in model.named_parameters() if p.ndim == 2}
    return seconds, peak, values.detach().tolist(), gradients


def run(way: str, arguments: argparse.Namespace) -> tuple[float, float, Tensor, dict[str, Tensor]]:
    """``measure`` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        seconds, peak, values, gradients = pool.submit(measure, way, arguments).result()
    return seconds, peak, torch.tensor(values), {name: torch.tensor(each) for name, each in gradients.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--limit-gb", type=float, default=1.3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    seconds, peaks, values, gradients = {}, {}, {}, {}
    for way in ("ours", "peer"):
        seconds[way], peaks[way], values[way], gradients[way] = run(way, arguments)
        print(f"{way}: {peaks[way]:.2f} GB above the weights, {seconds[way]:.1f} s", flush=True)
    value_gap = (values["ours"] - values["peer"]).abs().max().item()
    gradient_gap = max(
        ((gradients["ours"][name] - peer).abs().max() / peer.abs().max()).item()
        for name, peer in gradients["peer"].items()
    )
    print(f"largest gap of a value {value_gap:.1e} nat, of a gradient {gradient_gap:.1e} of the largest")
    if value_gap > 1e-6 or gradient_gap > 1e-6:
        raise SystemExit("The two ways differ.")
    if peaks["ours"] > arguments.limit_gb:
        raise SystemExit(f"Ours took {peaks['ours']:.2f} GB, more than {arguments.limit_gb} GB.")
    result = {
        "name": "token_logprobs", "ours": round(peaks["ours"], 3), "peer": round(peaks["peer"], 3),
        "ratio": round(peaks["peer"] / peaks["ours"], 2), "unit": "GB above the weights",
        "seconds": {way: round(value, 2) for way, value in seconds.items()}, "value_gap": value_gap,
        "gradient_gap": gradient_gap, "sizes": vars(arguments),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
