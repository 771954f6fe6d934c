"""Iterations of GRPO, with answers that the trained model generates: time and memory of ours, next to TRL.

Both sides train the same tiny model (float32, AdamW) in processes of their own, on the CPU with as many threads, and take their
iterations in turn: answers to ``--prompts`` prompts, ``--group-size`` each, with ``generate`` of transformers below both; rewards;
with ``--beta`` the log-probabilities of the reference; ``--updates`` optimiser steps in micro-batches of ``--micro-batch`` rows. The
answers are drawn and so differ, but nearly all have ``--answer-tokens`` tokens, because a random model ends one in ``--vocab-size``
tokens; both numbers are reported and must agree to 2 %. What TRL has on by default and ours not is switched off: gradient
checkpointing, bfloat16, and the weights of the KL penalty (``use_bias_correction_kl``).

The losses of given answers with stale log-probabilities must agree to 1e-5, and gradient norms to 1e-5 of the norm. The control,
the same without staleness, must not. Deviations are scaled with n - 1 in TRL and with n in ours, so advantages are given here.

    python -m venv trl && trl/bin/pip install torch==2.13.0+cpu trl==1.16.0 transformers==5.19.0 datasets==5.2.0
    python benchmarks/grpo_iteration.py --peer-python trl/bin/python [--beta 0.04] [--updates 1] [--iterations 8] [--threads 1]

``ours`` and ``peer`` are medians of iterations a second. ``cpu_ratio`` compares seconds of processor time instead, which other programs
on the machine change less. ``memory_mb`` is the peak of each process, and how much of it came with training.
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
from sft_throughput import make_model
from side_by_side import Side, Stopwatch, distinct_words, memory_mb, serve
from transformers import AutoTokenizer

from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import GRPOLossFn
from rlinf.recipes.completions import Completer
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt, Sample, collate


class Prompts:
    """The prompts of a step, in the place of a dataset."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def batch(self, step: int, size: int, *_: int) -> Sequence[Prompt]:
        """Return ``size`` prompts, the next ones in each step."""
        return [self.prompts[(step * size + number) % len(self.prompts)] for number in range(size)]


def make_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
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
        raise SystemExit("Stale log-probabilities make no difference, so the comparison of losses shows nothing.")
    return {"ours": ours["loss"], "peer": theirs["loss"], "control": control["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration")
    parser.add_argument("--group-size", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows of a forward-backward pass")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=[16, 64], help="of the shortest and longest prompt"
    )
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL penalty to the reference")
    parser.add_argument("--updates", type=int, default=1, help="optimiser steps of an iteration")
    parser.add_argument("--iterations", type=int, default=8, help="of each side, after one that warms up")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batch_size = arguments.prompts * arguments.group_size
    if batch_size % arguments.micro_batch:
        raise SystemExit(
            f"--micro-batch {arguments.micro_batch} does not divide the {batch_size} answers of an iteration."
        )
    folder = tempfile.TemporaryDirectory()
    sizes = {
        "vocab_size": arguments.vocab_size, "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers,
    }  # fmt: skip
    parameters = make_model(folder.name, sizes, arguments.seed)
    generator = random.Random(arguments.seed)
    lengths = [generator.randint(*arguments.prompt_tokens) for _ in range(20 * arguments.prompts)]
    prompts = [
        " ".join(f"w{generator.randrange(3, arguments.vocab_size)}" for _ in range(length)) for length in lengths
    ]
    settings = {
        "method": "grpo", "model": folder.name, "prompts": prompts, "batch_size": batch_size,
        "group_size": arguments.group_size, "micro_batch": arguments.micro_batch,
        "accumulation": batch_size // arguments.micro_batch, "answer_tokens": arguments.answer_tokens,
        "temperature": arguments.temperature, "beta": arguments.beta, "updates": arguments.updates, "epsilon": 0.2,
        "learning_rate": 1e-5, "threads": arguments.threads, "seed": arguments.seed,
    }  # fmt: skip
    own = Side("ours", sys.executable, Path(__file__), settings)
    peer = Side("TRL", arguments.peer_python, Path(__file__).with_name("trl_side.py"), settings)
    print(f"{parameters / 1e6:.1f} million parameters; starting both sides", flush=True)
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
        raise SystemExit(f"The sides have answers of different lengths: {answer_tokens}.")
    pairs = list(zip(taken["ours"], taken["peer"], strict=True))
    memory = {
        name: {
            "peak": round(steps[-1]["peak_mb"], 1),
            "of_training": round(steps[-1]["peak_mb"] - steps[-1]["start_mb"], 1),
        }
        for name, steps in taken.items()
    }
    result = {
        "name": "grpo_iteration", "ours": round(1 / seconds["ours"], 4), "peer": round(1 / seconds["peer"], 4),
        "ratio": round(seconds["peer"] / seconds["ours"], 3), "unit": "iterations/s",
        "ratios": [round(theirs["seconds"] / ours["seconds"], 3) for ours, theirs in pairs],
        "cpu_ratio": round(statistics.median(theirs["cpu_seconds"] / ours["cpu_seconds"] for ours, theirs in pairs), 3),
        "loss_of_given_answers": losses, "answer_tokens": answer_tokens, "memory_mb": memory, "parameters": parameters,
        "sizes": {name: value for name, value in vars(arguments).items() if name != "peer_python"},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    if "--side" in sys.argv:
        serve(make_answer)
    else:
        main()
