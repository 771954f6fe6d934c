"""Supervised fine-tuning with packing: tokens a second and memory of ours, next to TRL.

Both sides train the same tiny model (float32, AdamW) in processes of their own, on the CPU with as many threads, and take their
steps in turn. TRL packs the rows (``packing=True``, strategy ``bfd``) into rows of ``--length`` tokens, one to a forward pass, and
tells which rows it has trained in a step; ours (``SFTTrainer`` of the recipes with ``sequence_packing``) trains the same rows with
the same limit. What TRL has on by default and ours not is switched off: gradient checkpointing and bfloat16. Tokens are those of the
rows, prompts included; no padding is counted.

The losses of the first step must agree to 1e-5, and gradient norms to 1e-5 of the norm. The control, a loss over prompts too, must
not. All later losses must agree to 1e-3.

    python -m venv trl && trl/bin/pip install torch==2.13.0+cpu trl==1.16.0 transformers==5.19.0 datasets==5.2.0
    python benchmarks/sft_throughput.py --peer-python trl/bin/python [--length 1024] [--packed-rows 4] [--steps 12] [--threads 1]

``ours`` and ``peer`` are medians of tokens a second. ``cpu_ratio`` compares seconds of processor time instead, which other programs
on the machine change less. ``memory_mb`` is the peak of each process, and how much of it came with training, after imports and with the
model loaded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from side_by_side import Side, Stopwatch, memory_mb, serve
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.recipes.samples import Sample, collate
from rlinf.recipes.sft import SFTTrainer


def make_model(folder: str, sizes: dict[str, int], seed: int) -> int:
    """Write a Llama with random weights and a tokenizer of words ``w5``; return its number of parameters.

    The weights are drawn wide, so that tokens differ in their losses.
    """
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, sizes["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    heads = sizes["hidden_size"] // 64
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes, intermediate_size=3 * sizes["hidden_size"], num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_rows(number: int, vocab_size: int, shortest: int, longest: int, seed: int) -> list[dict[str, list[int]]]:
    """Return rows whose prompt and answer have ``shortest`` to ``longest`` random tokens each."""
    generator = random.Random(seed)
    rows = []
    for _ in range(number):
        prompt, answer = (generator.randint(shortest, longest) for _ in range(2))
        tokens = [generator.randrange(3, vocab_size) for _ in range(prompt + answer)]
        rows.append({"input_ids": tokens, "completion_mask": [0] * prompt + [1] * answer})
    return rows


class GivenRows:
    """Rows of a step, in the place of a dataset."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []

    def batch(self, *_: int) -> Sequence[Sample]:
        """Return the rows that were put here last."""
        return self.rows


def make_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return our side, a function that trains on given rows."""
    torch.set_num_threads(settings["threads"])
    policy = HuggingFacePolicy(
        settings["model"], torch_dtype="float32", device_map=None, learning_rate=settings["learning_rate"],
        sequence_packing=True, max_tokens_per_microbatch=settings["micro_batch"] * settings["length"],
    )  # fmt: skip
    rows = GivenRows()
    trainer = SFTTrainer(policy, rows, num_steps=10**6, batch_size=0)
    before, step = memory_mb("VmRSS"), 0

    def answer(rows_of_step: list[list[list[int]]], all_tokens: bool = False) -> dict[str, Any]:
        nonlocal step
        rows.rows = [Sample(ids, [bool(learned) for learned in mask]) for ids, mask in rows_of_step]
        if all_tokens:  # the control, which takes no step
            logprobs = policy.get_logprobs(collate(rows.rows))["logprobs"]
            return {"loss": -float(logprobs.sum()) / sum(len(row.input_ids) - 1 for row in rows.rows)}
        with Stopwatch() as watch:
            update = trainer.step(step)
        step += 1
        return {
            "loss": update.loss, "norm": update.metrics["sft/grad_norm"], "tokens": update.num_tokens, **watch.times,
            "peak_mb": memory_mb("VmHWM"), "start_mb": before,
        }  # fmt: skip

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a packed row")
    parser.add_argument("--packed-rows", type=int, default=4, help="packed rows of an optimiser step")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest prompt or answer")
    parser.add_argument("--longest", type=int, default=240, help="tokens of the longest prompt or answer")
    parser.add_argument("--steps", type=int, default=12, help="of each side, after two that warm up")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    sizes = {
        "vocab_size": arguments.vocab_size, "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers,
    }  # fmt: skip
    parameters = make_model(folder.name, sizes, arguments.seed)
    needed = (
        (arguments.steps + 3) * arguments.packed_rows * arguments.length // (arguments.shortest + arguments.longest)
    )
    rows = make_rows(needed * 2, arguments.vocab_size, arguments.shortest, arguments.longest, arguments.seed)
    settings = {
        "method": "sft", "model": folder.name, "rows": rows, "length": arguments.length, "micro_batch": 1,
        "accumulation": arguments.packed_rows, "learning_rate": 1e-3, "threads": arguments.threads, "seed": arguments.seed,
    }  # fmt: skip
    own = Side("ours", sys.executable, Path(__file__), settings)
    peer = Side("TRL", arguments.peer_python, Path(__file__).with_name("trl_side.py"), settings)
    print(f"{parameters / 1e6:.1f} million parameters; starting both sides", flush=True)
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    cpu_ratios, gaps = [], []
    for step in range(arguments.steps + 2):
        theirs = peer.ask()
        control = own.ask(rows_of_step=theirs["rows"], all_tokens=True)["loss"] if step == 0 else 0.0
        ours = own.ask(rows_of_step=theirs["rows"])
        gaps.append(abs(ours["loss"] - theirs["loss"]))
        if step == 0:
            check_first(ours, theirs, control)
            first = {"ours": ours["loss"], "peer": theirs["loss"], "control": control}
        if step >= 2:
            speeds["ours"].append(ours["tokens"] / ours["seconds"])
            speeds["peer"].append(ours["tokens"] / theirs["seconds"])
            cpu_ratios.append(theirs["cpu_seconds"] / ours["cpu_seconds"])
        times = " and ".join(f"{side['seconds']:.2f} s ({side['cpu_seconds']:.2f} of CPU)" for side in (ours, theirs))
        losses = f"{ours['loss']:.5f} and {theirs['loss']:.5f}"
        print(f"step {step}: {ours['tokens']:.0f} tokens, ours and TRL {times}, loss {losses}", flush=True)
    if max(gaps) > 1e-3:
        raise SystemExit(f"The losses of a later step differ by {max(gaps):.1e}.")
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    memory = {
        name: {"peak": round(side["peak_mb"], 1), "of_training": round(side["peak_mb"] - side["start_mb"], 1)}
        for name, side in (("ours", ours), ("peer", theirs))
    }
    own.close()
    peer.close()
    result = {
        "name": "sft_throughput", "ours": round(medians["ours"], 1), "peer": round(medians["peer"], 1),
        "ratio": round(medians["ours"] / medians["peer"], 3), "unit": "tokens/s",
        "ratios": [round(one / other, 3) for one, other in zip(speeds["ours"], speeds["peer"], strict=True)],
        "cpu_ratio": round(statistics.median(cpu_ratios), 3), "first_loss": first, "largest_loss_gap": max(gaps), "memory_mb": memory, "parameters": parameters,
        "sizes": {name: value for name, value in vars(arguments).items() if name != "peer_python"},
    }  # fmt: skip
    print(json.dumps(result))


def check_first(ours: dict[str, Any], theirs: dict[str, Any], control: float) -> None:
    """Stop unless the first losses and gradients are the same, and those of another mask differ."""
    gap, norm_gap = abs(ours["loss"] - theirs["loss"]), abs(ours["norm"] - theirs["norm"]) / theirs["norm"]
    print(
        f"first step: losses {gap:.1e} apart, gradient norms {norm_gap:.1e}; with prompts learned {abs(control - theirs['loss']):.1e}"
    )
    if gap > 1e-5 or norm_gap > 1e-5:
        raise SystemExit(f"The first steps differ: losses {ours['loss']} and {theirs['loss']}.")
    if abs(control - theirs["loss"]) <= 1e-4:
        raise SystemExit("A loss over prompts is no different, so the comparison of losses shows nothing.")


if __name__ == "__main__":
    if "--side" in sys.argv:
        serve(make_answer)
    else:
        main()
