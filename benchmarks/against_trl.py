"""Compares the speed and memory of the recipes with TRL, for supervised fine-tuning with packing and for GRPO iterations.

Both sides train the same tiny model (float32, AdamW) in separate CPU processes with the same number of threads, and alternate
steps. Features that only TRL enables by default are disabled: gradient checkpointing, bfloat16, and the weights of the KL
penalty (``use_bias_correction_kl``).

    python -m venv trl && trl/bin/pip install torch==2.13.0+cpu trl==1.16.0 transformers==5.19.0 datasets==5.2.0
    python benchmarks/against_trl.py sft --peer-python trl/bin/python [--length 1024] [--packed-rows 4] [--steps 12]
    python benchmarks/against_trl.py grpo --peer-python trl/bin/python [--beta 0.04] [--updates 1] [--iterations 8]

``sft``: TRL packs the rows (``packing=True``, strategy ``bfd``) into rows of ``--length`` tokens, one per forward pass, and reports the
rows of each step; ours (the recipes' ``SFTTrainer`` with ``sequence_packing``) trains on the same rows with the same limit.
First-step losses must agree to 1e-5 and gradient norms to a relative 1e-5, unlike in the control, whose loss includes prompts. Later
losses must agree to 1e-3. ``ours`` and ``peer`` are median tokens per second, including prompts but not padding.

``grpo``: an iteration is answers to ``--prompts`` prompts, ``--group-size`` each, with ``generate`` of transformers below both; rewards;
with ``--beta`` the log-probabilities of the reference; ``--updates`` optimiser steps in micro-batches of ``--micro-batch`` rows. The
answers are drawn and so differ, but nearly all have ``--answer-tokens`` tokens, because a random model ends one in ``--vocab-size``
tokens; both numbers are reported and must agree to 2 %. The losses of given answers with stale log-probabilities must agree to 1e-5,
and gradient norms to 1e-5 of the norm. The control, the same without staleness, must not. The std divides by n - 1 in TRL and
by n in ours, so this check uses given advantages. ``ours`` and ``peer`` are median iterations per second.

``cpu_ratio`` compares CPU seconds instead, which depend less on other programs on the machine. ``memory_mb`` is each process's
peak memory, and the increase during training after imports and model loading.
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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl_side import Side, Stopwatch, distinct_words, memory_mb, serve

from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import GRPOLossFn
from rlinf.recipes.completions import Completer
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt, Sample, collate
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


def start_sides(settings: dict[str, Any], arguments: argparse.Namespace) -> tuple[Side, Side]:
    """Start our process and TRL's process."""
    settings |= {"threads": arguments.threads, "seed": arguments.seed}
    own = Side("ours", sys.executable, Path(__file__), settings)
    return own, Side("TRL", arguments.peer_python, Path(__file__).with_name("trl_side.py"), settings)


def memory_of(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the peaks of both processes, from their last answers."""
    return {
        name: {"peak": round(side["peak_mb"], 1), "of_training": round(side["peak_mb"] - side["start_mb"], 1)}
        for name, side in (("ours", ours), ("peer", theirs))
    }


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
    """The rows of one step, used instead of a dataset."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []

    def batch(self, *_: int) -> Sequence[Sample]:
        """Return the rows that were set last."""
        return self.rows


def sft_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that trains our side on given rows."""
    torch.set_num_threads(settings["threads"])
    policy = HuggingFacePolicy(
        settings["model"], torch_dtype="float32", device_map=None, learning_rate=settings["learning_rate"],
        sequence_packing=True, max_tokens_per_microbatch=settings["micro_batch"] * settings["length"],
    )  # fmt: skip
    rows = GivenRows()
    trainer = SFTTrainer(policy, rows, num_steps=10**6, batch_size=1)
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


def compare_sft(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train both sides on the rows packed by TRL, and return the result."""
    needed = (
        (arguments.steps + 3) * arguments.packed_rows * arguments.length // (arguments.shortest + arguments.longest)
    )
    rows = make_rows(needed * 2, arguments.vocab_size, arguments.shortest, arguments.longest, arguments.seed)
    settings = {
        "method": "sft", "model": folder, "rows": rows, "length": arguments.length, "micro_batch": 1,
        "accumulation": arguments.packed_rows, "learning_rate": 1e-3,
    }  # fmt: skip
    own, peer = start_sides(settings, arguments)
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
    own.close()
    peer.close()
    return {
        "name": "sft_throughput", "ours": round(medians["ours"], 1), "peer": round(medians["peer"], 1),
        "ratio": round(medians["ours"] / medians["peer"], 3), "unit": "tokens/s",
        "ratios": [round(one / other, 3) for one, other in zip(speeds["ours"], speeds["peer"], strict=True)],
        "cpu_ratio": round(statistics.median(cpu_ratios), 3), "first_loss": first, "largest_loss_gap": max(gaps), "memory_mb": memory_of(ours, theirs),
    }  # fmt: skip


def check_first(ours: dict[str, Any], theirs: dict[str, Any], control: float) -> None:
    """Exit unless first losses and gradients agree, and differ with a different mask."""
    gap, norm_gap = abs(ours["loss"] - theirs["loss"]), abs(ours["norm"] - theirs["norm"]) / theirs["norm"]
    print(
        f"first step: losses {gap:.1e} apart, gradient norms {norm_gap:.1e}; with prompts learned {abs(control - theirs['loss']):.1e}"
    )
    if gap > 1e-5 or norm_gap > 1e-5:
        raise SystemExit(f"The first steps differ: losses {ours['loss']} and {theirs['loss']}.")
    if abs(control - theirs["loss"]) <= 1e-4:
        raise SystemExit("Including prompts does not change the loss, so the comparison of losses is meaningless.")


class Prompts:
    """The prompts of one step, used instead of a dataset."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def batch(self, step: int, size: int, *_: int) -> Sequence[Prompt]:
        """Return ``size`` prompts, the next ones in each step."""
        return [self.prompts[(step * size + number) % len(self.prompts)] for number in range(size)]


def grpo_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return our side, a function that takes an iteration, or gives loss and gradient norm of ``given`` answers."""
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    policy = HuggingFacePolicy(
        settings["model"], torch_dtype="float32", device_map=None, learning_rate=settings["learning_rate"],
        micro_batch_size=settings["micro_batch"], temperature=settings["temperature"],
        max_new_tokens=settings["answer_tokens"], tokenizer=tokenizer,
    )  # fmt: skip
    loss = GRPOLossFn(
        clip_range_low=settings["epsilon"], clip_range_high=settings["epsilon"], kl_coef=settings["beta"],
        temperature=settings["temperature"],
    )  # fmt: skip
    completer = Completer(
        TorchGenerator(policy), tokenizer, make_rewards(lambda completion, reference, **_: distinct_words(completion)),
        batch_size=settings["batch_size"], max_new_tokens=settings["answer_tokens"], end_tokens=[tokenizer.eos_token_id],
    )  # fmt: skip
    trainer = GRPOTrainer(
        policy, Prompts([Prompt(tokenizer(text)["input_ids"]) for text in settings["prompts"]]), num_steps=10**6,
        batch_size=settings["batch_size"], loss=loss, completer=completer,
        groups=Groups(settings["group_size"], settings["seed"], num_updates=settings["updates"]),
    )  # fmt: skip
    before, step = memory_mb("VmRSS"), 0

    def answer(given: dict[str, list] | None = None) -> dict[str, Any]:
        nonlocal step
        if given is not None:
            return score(policy, loss, given)
        with Stopwatch() as watch:
            update = trainer.step(step)
        step += 1
        return {
            "answer_tokens": update.metrics["rollout/completion_length_mean"],
            "reward": update.metrics["rollout/reward_mean"],
            "peak_mb": memory_mb("VmHWM"), "start_mb": before, **watch.times,
        }  # fmt: skip

    return answer


def score(policy: HuggingFacePolicy, loss: GRPOLossFn, given: dict[str, list]) -> dict[str, Any]:
    """Return the log-probabilities of answers; with old ones given, the loss and its gradient norm instead."""
    batch = collate([
        Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(given["prompts"], given["answers"], strict=True)
    ])  # fmt: skip
    learned = batch["token_mask"]
    if "old_logprobs" not in given:
        logprobs = policy.get_logprobs(batch)["logprobs"]
        return {"logprobs": [row[mask].tolist() for row, mask in zip(logprobs, learned, strict=True)]}
    batch["advantages"] = torch.tensor(given["advantages"])
    for key in ("old_logprobs", "reference_logprobs"):
        batch[key] = torch.zeros(learned.shape).masked_scatter(learned, torch.tensor(sum(given[key], [])))
    value = loss(policy.model, batch)
    value.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in policy.model.parameters()])
    policy.model.zero_grad()
    return {"loss": float(value.detach()), "norm": float(norm)}


def compare_losses(own: Side, peer: Side, arguments: argparse.Namespace) -> dict[str, float]:
    """Stop unless both sides find the same loss and gradients for given answers, and ours others without staleness."""
    generator = random.Random(arguments.seed)

    def tokens(shortest: int, longest: int) -> list[int]:
        return [generator.randrange(3, arguments.vocab_size) for _ in range(generator.randint(shortest, longest))]

    def noisy(rows: list[list[float]]) -> list[list[float]]:
        return [[value + generator.gauss(0, 0.3) for value in row] for row in rows]

    rows = range(arguments.micro_batch)
    given: dict[str, list] = {
        "prompts": [tokens(4, 32) for _ in rows],
        "answers": [tokens(1, 32) for _ in rows],
        "advantages": [generator.gauss(0, 1) for _ in rows],
    }
    logprobs = own.ask(given=given)["logprobs"]
    given |= {"old_logprobs": noisy(logprobs), "reference_logprobs": noisy(logprobs)}
    ours, control = own.ask(given=given), own.ask(given=given | {"old_logprobs": logprobs})

    def padded(key: str, left: bool = False, fill: Any = None) -> list[list]:
        width = max(map(len, given[key]))
        made = []
        for row in given[key]:
            values, padding = row if fill is None else [fill] * len(row), [0] * (width - len(row))
            made.append(padding + values if left else values + padding)
        return made

    theirs = peer.ask(given={
        "prompt_ids": padded("prompts", left=True), "prompt_mask": padded("prompts", left=True, fill=1),
        "completion_ids": padded("answers"), "completion_mask": padded("answers", fill=1),
        "advantages": given["advantages"], "old_per_token_logps": padded("old_logprobs"),
        "ref_per_token_logps": padded("reference_logprobs"),
    })  # fmt: skip
    gap, norm_gap = abs(ours["loss"] - theirs["loss"]), abs(ours["norm"] - theirs["norm"]) / theirs["norm"]
    control_gap = abs(control["loss"] - theirs["loss"])
    print(
        f"given answers: losses {gap:.1e} apart, gradient norms {norm_gap:.1e}; not stale {control_gap:.1e}", flush=True
    )
    if gap > 1e-5 or norm_gap > 1e-5:
        raise SystemExit(f"The losses of given answers differ: {ours} and {theirs}.")
    if control_gap <= 1e-3:
        raise SystemExit("Stale log-probabilities do not change the loss, so the comparison of losses is meaningless.")
    return {"ours": ours["loss"], "peer": theirs["loss"], "control": control["loss"]}


def compare_grpo(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate iterations of both sides, and return the result."""
    batch_size = arguments.prompts * arguments.group_size
    generator = random.Random(arguments.seed)
    lengths = [generator.randint(*arguments.prompt_tokens) for _ in range(20 * arguments.prompts)]
    prompts = [
        " ".join(f"w{generator.randrange(3, arguments.vocab_size)}" for _ in range(length)) for length in lengths
    ]
    settings = {
        "method": "grpo", "model": folder, "prompts": prompts, "batch_size": batch_size,
        "group_size": arguments.group_size, "micro_batch": arguments.micro_batch,
        "accumulation": batch_size // arguments.micro_batch, "answer_tokens": arguments.answer_tokens,
        "temperature": arguments.temperature, "beta": arguments.beta, "updates": arguments.updates, "epsilon": 0.2,
        "learning_rate": 1e-5,
    }  # fmt: skip
    own, peer = start_sides(settings, arguments)
    losses = compare_losses(own, peer, arguments)
    taken: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for iteration in range(arguments.iterations + 1):
        sides = {"ours": own.ask(), "peer": peer.ask()}
        for name, side in sides.items():
            if iteration > 0:
                taken[name].append(side)
        shown = [
            f"{side['seconds']:.2f} s ({side['cpu_seconds']:.2f} of CPU), {side['answer_tokens']:.1f} tokens an answer"
            for side in sides.values()
        ]
        print(f"iteration {iteration}: ours {shown[0]}; TRL {shown[1]}", flush=True)
    own.close()
    peer.close()
    seconds = {name: statistics.median(each["seconds"] for each in steps) for name, steps in taken.items()}
    answer_tokens = {name: statistics.mean(each["answer_tokens"] for each in steps) for name, steps in taken.items()}
    if abs(answer_tokens["ours"] / answer_tokens["peer"] - 1) > 0.02:
        raise SystemExit(f"The completion lengths of the two sides differ: {answer_tokens}.")
    pairs = list(zip(taken["ours"], taken["peer"], strict=True))
    return {
        "name": "grpo_iteration", "ours": round(1 / seconds["ours"], 4), "peer": round(1 / seconds["peer"], 4),
        "ratio": round(seconds["peer"] / seconds["ours"], 3), "unit": "iterations/s",
        "ratios": [round(theirs["seconds"] / ours["seconds"], 3) for ours, theirs in pairs],
        "cpu_ratio": round(statistics.median(theirs["cpu_seconds"] / ours["cpu_seconds"] for ours, theirs in pairs), 3),
        "loss_of_given_answers": losses, "answer_tokens": answer_tokens, "memory_mb": memory_of(taken["ours"][-1], taken["peer"][-1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = parser.add_subparsers(dest="method", required=True)
    sft, grpo = (methods.add_parser(name) for name in ("sft", "grpo"))
    sft.add_argument("--length", type=int, default=1024, help="tokens per packed row")
    sft.add_argument("--packed-rows", type=int, default=4, help="packed rows per optimiser step")
    sft.add_argument("--shortest", type=int, default=16, help="minimum tokens of a prompt or completion")
    sft.add_argument("--longest", type=int, default=240, help="maximum tokens of a prompt or completion")
    sft.add_argument("--steps", type=int, default=12, help="steps per side, after two warm-up steps")
    grpo.add_argument("--prompts", type=int, default=8, help="prompts per iteration")
    grpo.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    grpo.add_argument("--micro-batch", type=int, default=16, help="rows per forward-backward pass")
    grpo.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 64], help="minimum and maximum prompt length")
    grpo.add_argument("--answer-tokens", type=int, default=64)
    grpo.add_argument("--temperature", type=float, default=0.9)
    grpo.add_argument("--beta", type=float, default=0.0, help="weight of the KL penalty to the reference")
    grpo.add_argument("--updates", type=int, default=1, help="optimiser steps per iteration")
    grpo.add_argument("--iterations", type=int, default=8, help="iterations per side, after one warm-up iteration")
    for each in (sft, grpo):
        each.add_argument("--peer-python", required=True, help="interpreter of an environment with TRL")
        each.add_argument("--vocab-size", type=int, default=4096)
        each.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
        each.add_argument("--layers", type=int, default=4)
        each.add_argument("--threads", type=int, default=1)
        each.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.method == "grpo" and arguments.prompts * arguments.group_size % arguments.micro_batch:
        raise SystemExit(
            f"--micro-batch {arguments.micro_batch} does not divide the {arguments.prompts * arguments.group_size} answers of an iteration."
        )
    sizes = {
        "vocab_size": arguments.vocab_size, "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder, sizes, arguments.seed)
        print(f"{parameters / 1e6:.1f} million parameters; starting both sides", flush=True)
        result = (compare_sft if arguments.method == "sft" else compare_grpo)(folder, arguments)
    sizes = {name: value for name, value in vars(arguments).items() if name != "peer_python"}
    print(json.dumps(result | {"parameters": parameters, "sizes": sizes}))


def make_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the function that answers messages to our side."""
    return {"sft": sft_answer, "grpo": grpo_answer}[settings["method"]](settings)


if __name__ == "__main__":
    if "--side" in sys.argv:
        serve(make_answer)
    else:
        main()
