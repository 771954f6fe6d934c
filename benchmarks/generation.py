"""Compares action-token generation by transformers' ``generate``, our torch code, and vLLM, with the same weights and prompts.

All three continue prompts of equal length by a fixed number of tokens, sampled from the action tokens (the last tokens in the
vocabulary), and return their log-probabilities. ``ours`` is ``HuggingFaceGeneration(allowed_token_ids=...)``;
``peer`` is ``generate(do_sample=True)`` with a logits processor that keeps only action tokens, and
``compute_transition_scores``; ``vllm`` is ``VllmGeneration`` (skipped with a message if vLLM is not installed).
``--all-tokens`` samples from the full vocabulary instead.

In float32, the script stops if ours and the peer choose different greedy tokens. Times are medians of alternating calls.
The time to push new weights to the engine is also measured. Ours uses the trainer's own tensors, whereas vLLM receives
a copy through shared memory. ``ratio`` in the last line is for the worst case.

    python benchmarks/generation.py [--device cuda] [--dtype float32] [--batch-sizes 16 32] [--num-tokens 7 56]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.utils.logging import disable_progress_bar

from rlinf.engines.weight_handle import WeightBuffer
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.models.generation import HuggingFaceGeneration, VllmGeneration
from rlinf.models.precision import DTYPES

NO_VLLM = "vLLM is not installed: bash scripts/setup.sh --vllm"


class OnlyThese(LogitsProcessor):
    """Masks the scores of all tokens except the allowed ones."""

    def __init__(self, token_ids: list[int]) -> None:
        self.first, self.end = token_ids[0], token_ids[-1] + 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.first : self.end] = scores[:, self.first : self.end]
        return masked


def build(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights: 58.5 million parameters by default."""
    torch.manual_seed(0)
    heads = arguments.hidden_size // 64
    config = LlamaConfig(
        vocab_size=arguments.vocab_size, hidden_size=arguments.hidden_size, num_hidden_layers=arguments.num_layers,
        num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=arguments.hidden_size * 11 // 4 // 16 * 16,
        max_position_embeddings=arguments.prompt_len + max(arguments.num_tokens), initializer_range=0.05,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DTYPES[arguments.dtype])


def generate_with_transformers(
    model: Any, prompts: BatchedDataDict, num_tokens: int, token_ids: list[int] | None, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, num_tokens]`` and their log-probabilities."""
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        **prompts, **sampling, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, logits_processor=LogitsProcessorList([OnlyThese(token_ids)] if token_ids else []),
    )  # fmt: skip
    logprobs = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    return output.sequences[:, prompts["input_ids"].shape[1] :], logprobs


def start_vllm(arguments: argparse.Namespace, folder: str, token_ids: list[int] | None) -> VllmGeneration | None:
    """Start the engine with enough capacity for the largest batch."""
    if importlib.util.find_spec("vllm") is None:
        print(f"vllm: skipped ({NO_VLLM})", flush=True)
        return None
    max_len, rows = arguments.prompt_len + max(arguments.num_tokens), max(arguments.batch_sizes)
    generation = VllmGeneration(None, {
        "model_name": folder, "allowed_token_ids": token_ids, "temperature": 1.0, "eos_token_id": [], "dtype": arguments.dtype,
        "max_model_len": max_len, "max_num_seqs": rows, "enable_prefix_caching": False, "gpu_memory_utilization": 0.3,
    })  # fmt: skip
    generation.prepare_for_generation()
    return generation


def time_in_turn(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds per call, one call of each after the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(arguments: argparse.Namespace, folder: str) -> tuple[dict[str, dict[str, float]], float | None]:
    """Milliseconds of every case, and of a sync to vLLM (None without it)."""
    first = arguments.vocab_size - arguments.num_action_tokens
    token_ids = None if arguments.all_tokens else list(range(first, arguments.vocab_size))
    engines = {
        num_tokens: HuggingFaceGeneration(
            folder, torch_dtype=arguments.dtype, max_new_tokens=num_tokens, eos_token_id=[], allowed_token_ids=token_ids,
            device_map=arguments.device if arguments.device == "cuda" else None,
        )
        for num_tokens in arguments.num_tokens
    }  # fmt: skip
    model = engines[arguments.num_tokens[0]].model
    vllm = start_vllm(arguments, folder, token_ids)
    table = {}
    try:
        for batch_size in arguments.batch_sizes:
            for num_tokens, engine in engines.items():
                random = torch.Generator().manual_seed(batch_size)
                ids = torch.randint(3, first, (batch_size, arguments.prompt_len), generator=random).to(arguments.device)
                prompts = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
                if arguments.dtype == "float32":
                    check_equal(engine, model, prompts, num_tokens, token_ids)
                calls = {
                    "ours": lambda engine=engine, prompts=prompts: engine.generate(prompts, greedy=False),
                    "peer": lambda prompts=prompts, num_tokens=num_tokens: generate_with_transformers(
                        model, prompts, num_tokens, token_ids
                    ),
                }
                if vllm is not None:
                    mask = prompts["attention_mask"]
                    calls["vllm"] = lambda ids=ids, mask=mask, num_tokens=num_tokens: vllm.worker.generate(
                        ids, mask, max_new_tokens=num_tokens
                    )
                row = time_in_turn(calls, arguments.rounds, arguments.device)
                row["ratio"] = row["peer"] / row["ours"]
                name = f"batch {batch_size}, {num_tokens} tokens"
                table[name] = {key: round(value, 3) for key, value in row.items()}
                print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        return table, None if vllm is None else time_sync(vllm, model, arguments.rounds)
    finally:
        if vllm is not None:
            vllm.finish_generation()


def check_equal(
    engine: HuggingFaceGeneration, model: Any, prompts: BatchedDataDict, num_tokens: int, token_ids: list[int] | None
) -> None:
    """Exit unless ours and the peer choose the same greedy tokens with similar log-probabilities."""
    output = engine.generate(prompts, greedy=True)
    tokens, logprobs = generate_with_transformers(model, prompts, num_tokens, token_ids, greedy=True)
    start = prompts["input_ids"].shape[1]
    gap = float((output["logprobs"][:, start:] - logprobs).abs().max())
    if not output["output_ids"][:, start:].equal(tokens) or gap > 1e-3:
        raise SystemExit(f"ours and the peer disagree; log-probabilities differ by {gap:.2e}")


def time_sync(vllm: VllmGeneration, model: Any, rounds: int) -> float:
    """Median milliseconds from the trainer's tensors to an engine that generates with them."""
    times, buffer = [], WeightBuffer()
    for version in range(1, rounds + 1):
        start = time.perf_counter()
        vllm.update_weights(buffer.write(model.state_dict(), version))
        times.append(1e3 * (time.perf_counter() - start))
    buffer.close()
    return statistics.median(times)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[7, 56])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=80)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32064)
    parser.add_argument("--num-action-tokens", type=int, default=256)
    parser.add_argument("--all-tokens", action="store_true", help="sample from the full vocabulary")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    model = build(arguments)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{num_parameters / 1e6:.1f}M parameters, {arguments.dtype}, prompts of {arguments.prompt_len} tokens; ms per call"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        table, sync_ms = measure(arguments, folder)
    worst = min(table.values(), key=lambda row: row["ratio"])
    print(f"sync: ours 0 ms (the trainer's own tensors), vllm {'-' if sync_ms is None else f'{sync_ms:.0f} ms'}")
    result = {
        "name": "generation", "ours": worst["ours"], "peer": worst["peer"], "ratio": worst["ratio"], "unit": "ms/call",
        "vllm": worst.get("vllm", NO_VLLM), "sync_ms": {"ours": 0.0, "vllm": sync_ms if sync_ms else NO_VLLM},
        "num_parameters": num_parameters, "sizes": vars(arguments), "by_case": table,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
