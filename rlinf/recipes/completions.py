"""Completions of prompts, with their rewards: what GRPO trains on, and what a validation counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from rlinf.distributed.deadlines import heartbeat
from rlinf.distributed.process_group import gather_objects, rank
from rlinf.llm.batch_checks import response_mask
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.generation_interface import SEEDS_KEY
from rlinf.recipes.rewards import Rewards
from rlinf.recipes.samples import Prompt, Sample, collate
from rlinf.recipes.token_trainer import Validation, own_share


class Generator(Protocol):
    """Who answers (``rlinf.recipes.rollouts``)."""

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        """Yield what ``PolicyInterface.generate`` returns for each batch, in their order; called inside ``ready``.

        Within an update or a validation, all ranks call it equally often.
        """

    def ready(self) -> AbstractContextManager[None]:
        """Return a context in which the present weights generate (a collective call)."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass
class Completion:
    """An answer to a prompt.

    Attributes:
        prompt: The question.
        tokens: Of the answer, with the token that ends it.
        logprobs: Their log-probabilities, as the generator reports them.
        text: The answer without special tokens.
        reward: Weighted sum of the parts.
        parts: Each reward by its name, without its weight.
        is_cut: The answer has reached the largest length without an end.
        advantage: Of the reward over the others of its group.
    """

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float
    parts: dict[str, float]
    is_cut: bool
    advantage: float = 0.0

    def sample(self) -> Sample:
        """Return prompt and answer as a row that trains the answer by its token ids."""
        prompt = self.prompt.input_ids
        mask = [False] * len(prompt) + [True] * len(self.tokens)
        return Sample(prompt + self.tokens, mask, self.prompt.model_inputs)

    def describe(self, tokenizer: Any) -> dict[str, Any]:
        """Return the completion as JSON values, but for the previews of its images: bytes."""
        previews = {"images": self.prompt.previews} if self.prompt.previews else {}
        runs = [list(run) for _, run in groupby(self.prompt.input_ids)]
        # Four or more equal tokens are the place of an image, of which one is shown.
        shown = [token for run in runs for token in (run[:1] if len(run) > 3 else run)]
        return {
            "prompt": tokenizer.decode(shown),
            **previews,
            "completion": self.text,
            "reference": self.prompt.reference,
            "reward": self.reward,
            "rewards": self.parts,
            "num_tokens": len(self.tokens),
        }


class Completer:
    """Generates answers and rewards them.

    Args:
        tokenizer: Decodes, and names the end token.
        batch_size: Rows of one call of the generator.
        max_new_tokens: Largest length of an answer.
        end_tokens: Tokens that end an answer.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        rewards: Rewards,
        *,
        batch_size: int,
        max_new_tokens: int,
        end_tokens: Sequence[int],
    ) -> None:
        self.generator, self.tokenizer, self.rewards = generator, tokenizer, rewards
        self.batch_size, self.max_new_tokens, self.end_tokens = batch_size, max_new_tokens, set(end_tokens)

    def complete(self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None) -> list[Completion]:
        """Return an answer for each prompt, sampled with ``seeds``; None: the most likely tokens. Called inside ``ready``."""
        slices = [slice(start, start + self.batch_size) for start in range(0, len(prompts), self.batch_size)]
        batches = [collate(prompts[each]) for each in slices]
        for batch, each in zip(batches, slices, strict=True):
            if seeds is not None:
                batch[SEEDS_KEY] = torch.tensor(seeds[each])
        found: list[Completion] = []
        outputs = self.generator.generate(batches, greedy=seeds is None)
        for each, output in zip(slices, outputs, strict=True):
            rows = prompts[each]
            heartbeat()
            mask = response_mask(output)
            for row, prompt in enumerate(rows):
                tokens = output["output_ids"][row][mask[row]].tolist()
                is_cut = not tokens or tokens[-1] not in self.end_tokens
                text = self.tokenizer.decode(tokens if is_cut else tokens[:-1], skip_special_tokens=True)
                facts = {"num_tokens": len(tokens), "max_tokens": self.max_new_tokens}
                reward, parts = self.rewards(text, prompt, **facts)
                logprobs = output["logprobs"][row][mask[row]].tolist()
                found.append(Completion(prompt, tokens, logprobs, text, reward, parts, is_cut))
        return found


def completion_metrics(completions: Sequence[Completion], section: str) -> dict[str, float]:
    """Return means over the completions of all ranks, named ``<section>/...``; each rank gives its own, in the order of the ranks."""
    own = [(each.reward, len(each.tokens), each.is_cut, each.parts) for each in completions]
    every = [each for part in gather_objects(own) for each in part]
    rewards = torch.tensor([each[0] for each in every], dtype=torch.float64)
    lengths = torch.tensor([each[1] for each in every], dtype=torch.float64)
    metrics = {
        f"{section}/reward_mean": float(rewards.mean()),
        f"{section}/reward_std": float(rewards.std(correction=0)),
        f"{section}/completion_length_mean": float(lengths.mean()),
        f"{section}/completion_length_max": float(lengths.max()),
        f"{section}/truncated_fraction": sum(each[2] for each in every) / len(every),
    }
    for name in every[0][3]:
        metrics[f"{section}/reward_mean/{name}"] = sum(each[3][name] for each in every) / len(every)
    return metrics


class Answers:
    """A validation by the answers to its prompts, one each, of the most likely tokens."""

    def __init__(self, completer: Completer, prompts: Sequence[Prompt]) -> None:
        self.completer, self.prompts = completer, prompts

    def __call__(self, step: int) -> Validation:
        """Return the mean reward, with all completions (a collective call)."""
        share = own_share(len(self.prompts))
        with self.completer.generator.ready():
            own = self.completer.complete([self.prompts[row] for row in range(share.start, share.stop)])
        metrics = completion_metrics(own, "eval") | {"eval/num_answers": float(len(self.prompts))}
        described = gather_objects([each.describe(self.completer.tokenizer) for each in own])
        samples = [each for part in described for each in part] if rank() == 0 else []
        reward = metrics["eval/reward_mean"]
        return Validation(reward, metrics, f"reward {reward:.4f} of {len(self.prompts)} answers", samples)
