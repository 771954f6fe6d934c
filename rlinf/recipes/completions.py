"""Generate completions of prompts and score them, for GRPO and for validation."""

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
from rlinf.recipes.token_trainer import Validation, rank_slice


class Generator(Protocol):
    """Interface of the completion generators in ``rlinf.recipes.rollouts`` and ``rlinf.recipes.rollout_workers``."""

    def generate(self, batches: Sequence[BatchedDataDict], greedy: bool) -> Iterator[BatchedDataDict]:
        """Yield the output of ``PolicyInterface.generate`` for each batch. Call it inside ``ready``, equally often on all ranks."""

    def ready(self) -> AbstractContextManager[None]:
        """Return a context in which ``generate`` uses the current weights (a collective call)."""

    def close(self) -> None:
        """Release engines and rollout workers."""


@dataclass
class Completion:
    """A completion of a prompt, with its reward.

    Attributes:
        tokens: Generated tokens, including the end token.
        logprobs: Log-probabilities of the tokens, as reported by the generator.
        text: The completion's text without special tokens.
        reward, parts: Weighted sum of the rewards, and the unweighted rewards by name.
        is_truncated: Whether the completion reached the maximum length without an end token.
        advantage: Reward relative to the completion's group.
    """

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float
    parts: dict[str, float]
    is_truncated: bool
    advantage: float = 0.0

    def sample(self) -> Sample:
        """Return prompt and completion as a training row."""
        # Use the generated ids, because tokenizing the text again may yield different tokens.
        prompt = self.prompt.input_ids
        mask = [False] * len(prompt) + [True] * len(self.tokens)
        return Sample(prompt + self.tokens, mask, self.prompt.model_inputs)

    def describe(self, tokenizer: Any) -> dict[str, Any]:
        """Return the completion as JSON values, except for image previews, which are bytes."""
        previews = {"images": self.prompt.previews} if self.prompt.previews else {}
        runs = [list(run) for _, run in groupby(self.prompt.input_ids)]
        # Four or more equal tokens in a row are an image placeholder; print only one of them.
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
    """Generates completions in batches of ``batch_size`` rows and scores them with the rewards."""

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
        """Return one completion per prompt, sampled with ``seeds`` or, if None, decoded greedily. Call it inside ``ready``."""
        slices = [slice(start, start + self.batch_size) for start in range(0, len(prompts), self.batch_size)]
        batches = [collate(prompts[rows]) for rows in slices]
        if seeds is not None:
            for batch, rows in zip(batches, slices, strict=True):
                batch[SEEDS_KEY] = torch.tensor(seeds[rows])
        completions: list[Completion] = []
        outputs = self.generator.generate(batches, greedy=seeds is None)
        for rows, output in zip(slices, outputs, strict=True):
            # Each finished batch is progress, so restart the rollout deadline.
            heartbeat()
            mask = response_mask(output)
            for row, prompt in enumerate(prompts[rows]):
                tokens = output["output_ids"][row][mask[row]].tolist()
                is_truncated = not tokens or tokens[-1] not in self.end_tokens
                text = self.tokenizer.decode(tokens if is_truncated else tokens[:-1], skip_special_tokens=True)
                facts = {"num_tokens": len(tokens), "max_tokens": self.max_new_tokens}
                reward, parts = self.rewards(text, prompt, **facts)
                logprobs = output["logprobs"][row][mask[row]].tolist()
                completions.append(Completion(prompt, tokens, logprobs, text, reward, parts, is_truncated))
        return completions


def completion_metrics(completions: Sequence[Completion], section: str) -> dict[str, float]:
    """Return means over the completions on all ranks as metrics ``<section>/...`` (a collective call)."""
    local = [(item.reward, len(item.tokens), item.is_truncated, item.parts) for item in completions]
    # Gather in rank order and sum in float64, so that the means do not depend on the number of ranks.
    gathered = [item for part in gather_objects(local) for item in part]
    rewards = torch.tensor([item[0] for item in gathered], dtype=torch.float64)
    lengths = torch.tensor([item[1] for item in gathered], dtype=torch.float64)
    metrics = {
        f"{section}/reward_mean": float(rewards.mean()),
        f"{section}/reward_std": float(rewards.std(correction=0)),
        f"{section}/completion_length_mean": float(lengths.mean()),
        f"{section}/completion_length_max": float(lengths.max()),
        f"{section}/truncated_fraction": sum(item[2] for item in gathered) / len(gathered),
    }
    for name in gathered[0][3]:
        metrics[f"{section}/reward_mean/{name}"] = sum(item[3][name] for item in gathered) / len(gathered)
    return metrics


class CompletionValidation:
    """Validates with the mean reward of one greedy completion per prompt."""

    def __init__(self, completer: Completer, prompts: Sequence[Prompt]) -> None:
        self.completer, self.prompts = completer, prompts

    def __call__(self, step: int) -> Validation:
        """Generate and score all completions, and return them with their mean reward (a collective call)."""
        rows = rank_slice(len(self.prompts))
        with self.completer.generator.ready():
            completions = self.completer.complete(self.prompts[rows])
        metrics = completion_metrics(completions, "eval") | {"eval/num_completions": float(len(self.prompts))}
        described = gather_objects([item.describe(self.completer.tokenizer) for item in completions])
        samples = [sample for part in described for sample in part] if rank() == 0 else []
        reward = metrics["eval/reward_mean"]
        return Validation(reward, metrics, f"reward {reward:.4f} of {len(self.prompts)} completions", samples)
