"""Does a model generate within its length, and as it scores? ``rlinf diagnose <model>`` prints the answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.errors import ConfigError, RLinfError
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.hf_generation import SamplingConfig, generate_tokens
from rlinf.llm.logprobs import context_length, sequence_logprobs
from rlinf.llm.validation import log_probability_error, response_mask
from rlinf.llm.vllm_generation import VllmGenerationWorker
from rlinf.options import from_mapping

BATCH_SIZES = (1, 4)
PROMPT_LENGTHS = (4, 16)
NUM_NEW_TOKENS = 16
THRESHOLD = 1.05
"""Largest accepted ``mean(exp|difference|)`` of log-probabilities."""
Generate = Callable[[BatchedDataDict, int, bool], BatchedDataDict]
"""Of prompts, the largest number of new tokens, and whether to be greedy."""


class DiagnosticError(RLinfError):
    """A model failed a diagnostic; the message lists the failed checks."""


@dataclass(frozen=True)
class DiagnosticCheck:
    """One line of the table.

    Attributes:
        name: What was tried.
        passed: Whether it held; None: there was nothing to decide, and ``detail`` says why.
        detail: The numbers.
    """

    name: str
    passed: bool | None
    detail: str


def test_max_model_len_respected(model_name: str, **kwargs: Any) -> list[DiagnosticCheck]:
    """Ask for more tokens than ``max_model_len`` leaves room for: prompt and response must fill it exactly.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``CausalLMConfig``.

    Raises:
        DiagnosticError: A check failed.
    """
    model = load_causal_lm(model_name, from_mapping(CausalLMConfig, kwargs))
    return _passed(length_checks(model, torch_engine(model), "torch"), model_name)


def test_generation_consistency(model_name: str, **kwargs: Any) -> list[DiagnosticCheck]:
    """Compare the log-probs of decoding, token by token with a cache, with those of one pass over the finished rows.

    Args:
        model_name: Folder or hub id.
        **kwargs: Fields of ``CausalLMConfig``.

    Raises:
        DiagnosticError: A check failed.
    """
    model = load_causal_lm(model_name, from_mapping(CausalLMConfig, kwargs))
    return _passed(consistency_checks(model, torch_engine(model), "torch"), model_name)


# These are not tests of this package, in spite of their names.
test_max_model_len_respected.__test__ = False
test_generation_consistency.__test__ = False


def length_checks(model: Any, generate: Generate, engine: str) -> list[DiagnosticCheck]:
    """Checks of ``test_max_model_len_respected`` on a loaded model; ``engine`` names what ``generate`` uses."""
    limit = length_limit(model)
    checks = []
    for batch_size, prompt_len, greedy in _settings(limit):
        output = generate(_prompts(model, batch_size, prompt_len), limit, greedy)
        longest, shortest = (int(pick(output["unpadded_sequence_lengths"])) for pick in (torch.max, torch.min))
        detail = f"{shortest} to {longest} tokens, limit {limit}"
        name = _name(f"{engine}: length", batch_size, prompt_len, greedy)
        checks.append(DiagnosticCheck(name, shortest == longest == limit, detail))
    name = f"{engine}: length, prompt that fills the limit"
    try:
        generate(_prompts(model, 1, limit), limit, True)
        checks.append(DiagnosticCheck(name, False, "accepted; it leaves no room for a response"))
    except ConfigError as error:
        checks.append(DiagnosticCheck(name, True, f"refused: {str(error).split('.')[0]}"))
    return checks


@torch.no_grad()
def consistency_checks(model: Any, generate: Generate, engine: str) -> list[DiagnosticCheck]:
    """Checks of ``test_generation_consistency`` on a loaded model; ``engine`` names what ``generate`` uses."""
    checks = []
    for batch_size, prompt_len, greedy in _settings(length_limit(model)):
        output = generate(_prompts(model, batch_size, prompt_len), NUM_NEW_TOKENS, greedy)
        prefill = sequence_logprobs(model, *tokens_and_mask(output))
        error = log_probability_error(prefill, output["logprobs"], response_mask(output))
        detail = f"mean exp|difference| {error:.6f}, limit {THRESHOLD}"
        name = _name(f"{engine}: decode against prefill", batch_size, prompt_len, greedy)
        checks.append(DiagnosticCheck(name, error <= THRESHOLD, detail))
    return checks


def length_limit(model: Any) -> int:
    """Tokens of prompt and response in all checks."""
    return min(max(PROMPT_LENGTHS) + NUM_NEW_TOKENS, context_length(model) or 1 << 30)


def torch_engine(model: Any) -> Generate:
    """Return a function that generates with the loaded model."""

    def generate(prompts: BatchedDataDict, num_tokens: int, greedy: bool) -> BatchedDataDict:
        config = SamplingConfig(max_new_tokens=num_tokens, max_model_len=length_limit(model), eos_token_id=[])
        return generate_tokens(model, prompts, config, greedy, torch.Generator().manual_seed(0))

    return generate


@contextmanager
def vllm_engine(model_name: str, model: Any, config: CausalLMConfig) -> Iterator[Generate]:
    """Run a vLLM engine and give a function that generates with it.

    Args:
        model_name: Folder or hub id of ``model``.
        model: Loaded, for its sizes and number format.
        config: How it was loaded.
    """
    worker = VllmGenerationWorker(
        model_name, temperature=1.0, eos_token_id=[], max_model_len=length_limit(model), max_num_seqs=max(BATCH_SIZES),
        dtype=str(model.dtype).removeprefix("torch."), trust_remote_code=config.trust_remote_code,
    )  # fmt: skip

    def generate(prompts: BatchedDataDict, num_tokens: int, greedy: bool) -> BatchedDataDict:
        return worker.generate(prompts["input_ids"], prompts["attention_mask"], greedy, max_new_tokens=num_tokens)

    worker.start()
    try:
        yield generate
    finally:
        worker.stop()


def _settings(limit: int) -> list[tuple[int, int, bool]]:
    lengths = [length for length in PROMPT_LENGTHS if length < limit]
    return list(itertools.product(BATCH_SIZES, lengths, (True, False)))


def _prompts(model: Any, batch_size: int, prompt_len: int) -> BatchedDataDict:
    """Random tokens; the first row has ``prompt_len``, the others one less each, padded on the right."""
    random = torch.Generator().manual_seed(prompt_len)
    device = next(model.parameters()).device
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch_size, prompt_len), generator=random)
    lengths = torch.tensor([max(1, prompt_len - row) for row in range(batch_size)])
    mask = torch.arange(prompt_len) < lengths.unsqueeze(1)
    return BatchedDataDict({"input_ids": ids * mask, "attention_mask": mask.long()}).to(device)


def _name(what: str, batch_size: int, prompt_len: int, greedy: bool) -> str:
    return f"{what}, batch {batch_size}, prompts of {prompt_len}, {'greedy' if greedy else 'sampled'}"


def _passed(checks: list[DiagnosticCheck], model_name: str) -> list[DiagnosticCheck]:
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        raise DiagnosticError(
            f"{len(failed)} of {len(checks)} checks of '{model_name}' failed:\n  " + "\n  ".join(failed)
        )
    return checks
