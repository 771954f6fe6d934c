"""The contract checkers for token policies and engines, your own included: every violated property becomes a sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.llm.batch_checks import response_mask, verify_right_padding
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.generation_interface import GenerationInterface
from rlinf.llm.losses import NLLLossFn
from rlinf.llm.policy_interface import PolicyInterface

ROUNDING = 1e-5
"""Log-probabilities this close are the same: two passes over the same weights may add in another order."""
NUM_SAMPLES = 8
"""Responses that are sampled for each prompt."""
CHANCE = 1e-6
"""What is less probable than this is taken for an error."""
_OUTPUT_KEYS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs")


def check_generation(backend: GenerationInterface | PolicyInterface, prompts: BatchedDataDict) -> list[str]:
    """Check ``GenerationOutputSpec``, that greedy generation repeats, and that the other kind samples.

    Args:
        backend: Ready to generate, with ``do_sample`` on.
        prompts: A few right-padded prompts of different lengths.

    Returns:
        One sentence per violated property; empty when there is none.
    """
    greedy = backend.generate(prompts, greedy=True)
    many = BatchedDataDict(prompts).repeat_interleave(NUM_SAMPLES)
    sampled = backend.generate(many, greedy=False)
    report = _check_output(greedy, prompts, "greedy") + _check_output(sampled, many, "sampled")
    if report:
        return report
    if not backend.generate(prompts, greedy=True)["output_ids"].equal(greedy["output_ids"]):
        report.append("Greedy generation of the same prompts gave other tokens the second time.")
    probability = float(sampled["logprobs"][response_mask(sampled)].sum().exp())
    if _responses(sampled) == _responses(greedy.repeat_interleave(NUM_SAMPLES)) and probability < CHANCE:
        report.append(f"generate with greedy=False gave the greedy tokens of all {many.size} rows; by its own logprobs the "
                      f"probability of that is {probability:.1g}.")  # fmt: skip
    return report


def check_policy(policy: PolicyInterface, prompts: BatchedDataDict) -> list[str]:
    """Check generation, log-probabilities, the reference (if there is one) and one training step, which changes the policy.

    Args:
        policy: Before its first step.
        prompts: A few right-padded prompts of different lengths, of two tokens or more.

    Returns:
        One sentence per violated property; empty when there is none.
    """
    report = check_generation(policy, prompts)
    if report:
        return report
    sampled = policy.generate(prompts, greedy=False)
    logprobs = policy.get_logprobs(sampled)["logprobs"]
    report += _check_logprobs(logprobs, sampled)
    if report:
        return report
    generated = response_mask(sampled)
    gap = float((logprobs - sampled["logprobs"])[generated].abs().exp().mean())
    if not gap <= 1.05:
        report.append(f"generate and get_logprobs disagree: mean exp|difference| is {gap:.3f}, more than 1.05.")
    has_reference = type(policy).get_reference_logprobs is not PolicyInterface.get_reference_logprobs
    before = policy.get_reference_logprobs(sampled)["logprobs"] if has_reference else logprobs
    if not torch.allclose(before, logprobs, rtol=0, atol=ROUNDING):
        report.append("Before training, get_reference_logprobs differs from get_logprobs.")
    metrics: dict[str, Any] = policy.train(prompts, NLLLossFn())
    if "loss" not in metrics:
        report.append(f"train returned {sorted(metrics)}, without 'loss'.")
    if torch.allclose(policy.get_logprobs(sampled)["logprobs"], logprobs, rtol=0, atol=ROUNDING):
        report.append("A training step changed no log-probability.")
    after = policy.get_reference_logprobs(sampled)["logprobs"] if has_reference else before
    if not torch.allclose(after, before, rtol=0, atol=ROUNDING):
        report.append("A training step changed the reference log-probabilities.")
    return report


def _check_output(output: BatchedDataDict, prompts: BatchedDataDict, kind: str) -> list[str]:
    missing = [key for key in _OUTPUT_KEYS if key not in output]
    if missing:
        return [f"The {kind} output lacks {', '.join(missing)}."]
    report = []
    ids, mask = tokens_and_mask(prompts)
    totals = mask.sum(-1) + output["generation_lengths"]
    if not output["unpadded_sequence_lengths"].equal(totals):
        report.append(f"{kind}: unpadded_sequence_lengths are {output['unpadded_sequence_lengths'].tolist()}, prompt plus "
                      f"generation_lengths are {totals.tolist()}.")  # fmt: skip
    if output["output_ids"].shape[1] < int(totals.max()):
        return [
            *report,
            f"{kind}: output_ids are {list(output['output_ids'].shape)}, too narrow for {int(totals.max())} tokens.",
        ]
    if not verify_right_padding(output) or not output["output_ids"][:, : ids.shape[1]][mask].equal(ids[mask]):
        report.append(f"{kind}: output_ids are not the prompt, then the response, then padding.")
    response = (torch.arange(output["output_ids"].shape[1]) >= mask.sum(-1, keepdim=True)) & tokens_and_mask(output)[1]
    logprobs = output["logprobs"]
    if logprobs.shape != output["output_ids"].shape or logprobs.dtype != torch.float32:
        return [*report, f"{kind}: logprobs are {logprobs.dtype} {list(logprobs.shape)}; required: float32 "
                f"{list(output['output_ids'].shape)}."]  # fmt: skip
    if logprobs[~response].any() or (logprobs > 0).any():
        report.append(f"{kind}: logprobs are positive somewhere, or not 0 outside the response.")
    if response.any() and not logprobs[response].any():
        report.append(f"{kind}: logprobs of the response are 0 everywhere, as if each token had been certain.")
    return report


def _responses(output: BatchedDataDict) -> list[list[int]]:
    ids, mask = output["output_ids"], response_mask(output)
    return [ids[row][mask[row]].tolist() for row in range(output.size)]


def _check_logprobs(logprobs: Tensor, data: BatchedDataDict) -> list[str]:
    ids, mask = tokens_and_mask(data)
    if logprobs.shape != ids.shape or logprobs.dtype != torch.float32:
        return [f"get_logprobs returned {logprobs.dtype} {list(logprobs.shape)}; required: float32 {list(ids.shape)}."]
    if logprobs[:, 0].any() or logprobs[~mask].any() or not logprobs.isfinite().all():
        return ["get_logprobs must be finite, and 0 for the first token and for padding."]
    return []
