"""Checks for token policies, generation engines and language models.

``check_generation`` and ``check_policy`` test a class against its interface and return one message per violation.
``validate_log_probability_consistency`` compares two backends. ``length_checks`` and ``consistency_checks`` test a language model;
``rlinf diagnose <model>`` prints them.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from rlinf.contracts.report import BATCH_SIZES, Check, print_checks, rejected_by_vllm
from rlinf.engines.vllm_engine import require_vllm
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError
from rlinf.llm.batch_checks import response_mask, verify_right_padding
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.causal_lm import CausalLMConfig, load_causal_lm
from rlinf.llm.generation_interface import GenerationInterface
from rlinf.llm.hf_generation import SamplingConfig, generate_tokens
from rlinf.llm.logprobs import context_length, sequence_scores
from rlinf.llm.losses import NLLLossFn
from rlinf.llm.policy_interface import PolicyInterface
from rlinf.llm.vllm_generation import VllmGenerationWorker
from rlinf.models import MODELS
from rlinf.models.config import MAX_EXP_GAP
from rlinf.models.loading import hide_progress_bars, read_json
from rlinf.options import from_mapping

logger = logging.getLogger(__name__)

ROUNDING = 1e-5
"""Maximum difference between log-probabilities that should be equal; two passes with the same weights may sum in different orders."""
NUM_SAMPLES = 8
"""Number of sampled responses per prompt."""
CHANCE = 1e-6
"""Outcomes with a lower probability are reported as errors."""
PROMPT_LENGTHS = (4, 16)
NUM_NEW_TOKENS = 16
_OUTPUT_KEYS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs")

Generate = Callable[[BatchedDataDict, int, bool], BatchedDataDict]
"""``generate(prompts, max_new_tokens, greedy)`` returns a ``GenerationOutputSpec``."""


def check_generation(backend: GenerationInterface | PolicyInterface, prompts: BatchedDataDict) -> list[str]:
    """Check ``GenerationOutputSpec``, that greedy generation is repeatable, and that sampling is random; return one message per violation.

    ``backend`` must be ready to generate, with ``do_sample`` enabled. ``prompts`` are a few right-padded prompts of different lengths,
    each at least two tokens long.
    """
    greedy = backend.generate(prompts, greedy=True)
    many = BatchedDataDict(prompts).repeat_interleave(NUM_SAMPLES)
    sampled = backend.generate(many, greedy=False)
    report = [*_output_faults(greedy, prompts, "greedy"), *_output_faults(sampled, many, "sampled")]
    if report:
        return report
    if not backend.generate(prompts, greedy=True)["output_ids"].equal(greedy["output_ids"]):
        report.append("Greedy generation of the same prompts returned different tokens the second time.")
    probability = float(sampled["logprobs"][response_mask(sampled)].sum().exp())
    if _responses(sampled) == _responses(greedy.repeat_interleave(NUM_SAMPLES)) and probability < CHANCE:
        chance = f"according to its own logprobs, this has a probability of {probability:.1g}"
        report.append(f"generate with greedy=False returned the greedy tokens of all {many.size} rows; {chance}.")
    return report


def check_policy(policy: PolicyInterface, prompts: BatchedDataDict) -> list[str]:
    """Check an untrained policy's generation, log-probabilities, reference (if any) and a training step; see ``check_generation``."""
    report = check_generation(policy, prompts)
    if report:
        return report
    sampled = policy.generate(prompts, greedy=False)
    logprobs, (ids, mask) = policy.get_logprobs(sampled)["logprobs"], tokens_and_mask(sampled)
    if logprobs.shape != ids.shape or logprobs.dtype != torch.float32:
        return [f"get_logprobs returned {logprobs.dtype} {list(logprobs.shape)}; expected float32 {list(ids.shape)}."]
    if logprobs[:, 0].any() or logprobs[~mask].any() or not logprobs.isfinite().all():
        return ["get_logprobs must be finite, and 0 for the first token and for padding."]
    gap = log_probability_error(logprobs, sampled["logprobs"], response_mask(sampled))
    if not gap <= MAX_EXP_GAP:
        report.append(f"generate and get_logprobs disagree: mean exp|difference| is {gap:.3f}, limit {MAX_EXP_GAP}.")

    def is_close(actual: Tensor, expected: Tensor) -> bool:
        return torch.allclose(actual, expected, rtol=0, atol=ROUNDING)

    has_reference = type(policy).get_reference_logprobs is not PolicyInterface.get_reference_logprobs
    before = policy.get_reference_logprobs(sampled)["logprobs"] if has_reference else logprobs
    if not is_close(before, logprobs):
        report.append("Before training, get_reference_logprobs differs from get_logprobs.")
    metrics = policy.train(prompts, NLLLossFn())
    if "loss" not in metrics:
        report.append(f"train returned {sorted(metrics)}, without 'loss'.")
    if is_close(policy.get_logprobs(sampled)["logprobs"], logprobs):
        report.append("A training step did not change any log-probability.")
    if has_reference and not is_close(policy.get_reference_logprobs(sampled)["logprobs"], before):
        report.append("A training step changed the reference log-probabilities.")
    return report


def _output_faults(output: BatchedDataDict, prompts: BatchedDataDict, kind: str) -> Iterator[str]:
    missing = [key for key in _OUTPUT_KEYS if key not in output]
    if missing:
        yield f"The {kind} output lacks {', '.join(missing)}."
        return
    (ids, mask), logprobs = tokens_and_mask(prompts), output["logprobs"]
    shape, lengths = list(output["output_ids"].shape), output["unpadded_sequence_lengths"]
    totals = mask.sum(-1) + output["generation_lengths"]
    if not lengths.equal(totals):
        sums = f"prompt plus generation_lengths are {totals.tolist()}"
        yield f"{kind}: unpadded_sequence_lengths are {lengths.tolist()}, {sums}."
    if shape[1] < int(totals.max()):
        yield f"{kind}: output_ids are {shape}, too narrow for {int(totals.max())} tokens."
        return
    if not verify_right_padding(output) or not output["output_ids"][:, : ids.shape[1]][mask].equal(ids[mask]):
        yield f"{kind}: output_ids are not the prompt, then the response, then padding."
    response = (torch.arange(shape[1]) >= mask.sum(-1, keepdim=True)) & tokens_and_mask(output)[1]
    if list(logprobs.shape) != shape or logprobs.dtype != torch.float32:
        yield f"{kind}: logprobs are {logprobs.dtype} {list(logprobs.shape)}; expected float32 {shape}."
        return
    if logprobs[~response].any() or (logprobs > 0).any():
        yield f"{kind}: some logprobs are positive, or not 0 outside the response."
    if response.any() and not logprobs[response].any():
        yield f"{kind}: logprobs of the response are 0 everywhere, as if each token were certain."


def _responses(output: BatchedDataDict) -> list[list[int]]:
    ids, mask = output["output_ids"], response_mask(output)
    return [ids[row][mask[row]].tolist() for row in range(output.size)]


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
    threshold: float = MAX_EXP_GAP,
) -> bool:
    """Sample responses to ``test_data`` (prompts) with the inference backend, score them with the training backend, and compare.

    Return whether ``mean(exp|training - inference|)`` over the generated tokens is at most ``threshold`` (1 means equal); if not, log a
    warning with the reason. Raise ConfigError if vocabularies or shapes differ, or no tokens were generated.
    """
    backends = (training_backend, inference_backend)
    training_size, inference_size = map(vocab_size, backends)
    if None not in (training_size, inference_size) and training_size != inference_size:
        sizes = f"The training backend has vocab_size={training_size}, the inference backend {inference_size}"
        raise ConfigError(f"{sizes}; expected the same vocabulary. Pass the same model_name to both")
    inference_backend.prepare_for_generation()
    try:
        output = inference_backend.generate(test_data, greedy=False)
    finally:
        inference_backend.finish_generation()
    training = training_backend.get_logprobs(output)["logprobs"]
    if training.shape != output["logprobs"].shape:
        shapes = f"{list(training.shape)} for generated log-probs {list(output['logprobs'].shape)}"
        raise ConfigError(f"get_logprobs returned {shapes}; expected one number per token, [B, S]")
    error = log_probability_error(training, output["logprobs"], response_mask(output))
    if error <= threshold:
        return True
    first, second = (getattr(backend, "temperature", None) for backend in backends)
    differ = None not in (first, second) and first != second
    hint = f" The training backend has temperature={first}, the inference backend {second}." if differ else ""
    logger.warning("mean exp|log-prob difference| is %.4f, more than %.4f.%s", error, threshold, hint)
    return False


def vocab_size(backend: Any) -> int | None:
    """Return the ``vocab_size`` of a backend or its model's config, or None."""
    if hasattr(backend, "vocab_size"):
        return backend.vocab_size
    config = getattr(getattr(backend, "model", None), "config", None)
    return None if config is None else config.get_text_config().vocab_size


def log_probability_error(training: Tensor, inference: Tensor, mask: Tensor) -> float:
    """Return ``mean(exp|training - inference|)`` over the tokens in ``mask``; raise ConfigError if ``mask`` is empty."""
    if not mask.any():
        raise ConfigError("No tokens were generated to compare. Pass shorter prompts or max_new_tokens=8")
    differences = (training.float() - inference.to(training.device).float()).abs()[mask.to(training.device)]
    return float(differences.exp().mean())


class DiagnosticError(RLinfError):
    """Raised if a language model fails a diagnostic; the message lists the failed checks."""


def test_max_model_len_respected(model_name: str, **kwargs: Any) -> list[Check]:
    """Request more tokens than fit into ``max_model_len``, and check that prompt and response fill it exactly.

    ``model_name`` is a folder or hub ID, and ``kwargs`` are fields of ``CausalLMConfig``. A failed check raises DiagnosticError.
    """
    return _all_passed(length_checks, model_name, kwargs)


def test_generation_consistency(model_name: str, **kwargs: Any) -> list[Check]:
    """Compare log-probabilities from cached decoding and a single forward pass; arguments as in ``test_max_model_len_respected``."""
    return _all_passed(consistency_checks, model_name, kwargs)


# Prevent pytest from collecting these two functions when a test imports them.
test_max_model_len_respected.__test__ = False
test_generation_consistency.__test__ = False


def length_checks(model: nn.Module, generate: Generate, engine: str) -> list[Check]:
    """Run the checks of ``test_max_model_len_respected`` on a loaded model; ``engine`` is the name of the engine used by ``generate``."""
    limit, checks = length_limit(model), []
    for prompts, greedy, setting in _settings(model):
        lengths = generate(prompts, limit, greedy)["unpadded_sequence_lengths"]
        longest, shortest = int(lengths.max()), int(lengths.min())
        detail = f"{shortest} to {longest} tokens, limit {limit}"
        checks.append(Check(f"{engine}: length, {setting}", shortest == longest == limit, detail))
    name = f"{engine}: length, prompt at the limit"
    try:
        generate(_prompts(model, 1, limit), limit, True)
        checks.append(Check(name, False, "accepted, although this leaves no tokens for a response"))
    except ConfigError as error:
        checks.append(Check(name, True, f"rejected: {str(error).split('.')[0]}"))
    return checks


@torch.no_grad()
def consistency_checks(model: nn.Module, generate: Generate, engine: str) -> list[Check]:
    """Run the checks of ``test_generation_consistency`` on a loaded model; ``engine`` is the name of the engine used by ``generate``."""
    checks = []
    for prompts, greedy, setting in _settings(model):
        output = generate(prompts, NUM_NEW_TOKENS, greedy)
        prefill = sequence_scores(model, *tokens_and_mask(output)).logprobs
        error = log_probability_error(prefill, output["logprobs"], response_mask(output))
        detail = f"mean exp|difference| {error:.6f}, limit {MAX_EXP_GAP}"
        checks.append(Check(f"{engine}: decode against prefill, {setting}", error <= MAX_EXP_GAP, detail))
    return checks


def length_limit(model: nn.Module) -> int:
    """Return the maximum total number of prompt and response tokens in the checks."""
    return min(max(PROMPT_LENGTHS) + NUM_NEW_TOKENS, context_length(model) or 1 << 30)


def torch_engine(model: nn.Module) -> Generate:
    """Return a function that generates with a loaded model."""

    def generate(prompts: BatchedDataDict, num_tokens: int, greedy: bool) -> BatchedDataDict:
        config = SamplingConfig(max_new_tokens=num_tokens, max_model_len=length_limit(model), eos_token_id=[])
        return generate_tokens(model, prompts, config, greedy, torch.Generator().manual_seed(0))

    return generate


@contextmanager
def vllm_engine(model_name: str, model: nn.Module, config: CausalLMConfig) -> Iterator[Generate]:
    """Run a vLLM engine for a loaded ``model``, and yield a function that generates with it."""
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


def _settings(model: nn.Module) -> Iterator[tuple[BatchedDataDict, bool, str]]:
    """Yield prompts, whether to generate greedily, and a description of both."""
    lengths = [length for length in PROMPT_LENGTHS if length < length_limit(model)]
    for size, length, greedy in itertools.product(BATCH_SIZES, lengths, (True, False)):
        description = f"batch {size}, prompts of {length}, {'greedy' if greedy else 'sampled'}"
        yield _prompts(model, size, length), greedy, description


def _prompts(model: nn.Module, batch_size: int, prompt_len: int) -> BatchedDataDict:
    """Return random right-padded prompts; the first row has ``prompt_len`` tokens, and each following row one token less."""
    random = torch.Generator().manual_seed(prompt_len)
    device = next(model.parameters()).device
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch_size, prompt_len), generator=random)
    lengths = torch.tensor([max(1, prompt_len - row) for row in range(batch_size)])
    mask = torch.arange(prompt_len) < lengths.unsqueeze(1)
    return BatchedDataDict({"input_ids": ids * mask, "attention_mask": mask.long()}).to(device)


def _all_passed(
    run: Callable[[Any, Generate, str], list[Check]], model_name: str, fields: Mapping[str, Any]
) -> list[Check]:
    model = load_causal_lm(model_name, from_mapping(CausalLMConfig, fields))
    checks = run(model, torch_engine(model), "torch")
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        lines = [f"{len(failed)} of {len(checks)} checks of '{model_name}' failed:", *failed]
        raise DiagnosticError("\n  ".join(lines))
    return checks


def diagnose(arguments: Sequence[str]) -> int:
    """Print the checks of a language model: its folder or hub id, and ``key=value`` for fields of ``CausalLMConfig``."""
    name = next(argument for argument in arguments if "=" not in argument)
    about = Path(name).expanduser() / "config.json"
    model_type = read_json(about).get("model_type") if about.is_file() else None
    if model_type in MODELS.entries() and MODELS.get(model_type).acts:
        usage = f"rlinf diagnose model.model_type={model_type} model.model_path={name} env=<its env>"
        raise ConfigError(f"'{name}' contains a '{model_type}', a policy; expected a language model. Run {usage}")
    values = dict(pair.partition("=")[::2] for pair in arguments if pair != name)
    config = from_mapping(CausalLMConfig, {key: yaml.safe_load(value) for key, value in values.items()})
    hide_progress_bars()
    model = load_causal_lm(name, config)

    def run(generate: Generate, engine: str) -> list[Check]:
        return [*length_checks(model, generate, engine), *consistency_checks(model, generate, engine)]

    checks, note = run(torch_engine(model), "torch"), None
    try:
        require_vllm()
        with vllm_engine(name, model, config) as generate:
            checks += run(generate, "vllm")
    except MissingDependencyError as error:
        note = f"vllm: not checked. {error}"
    except RLinfError as error:
        note = rejected_by_vllm(checks, error)
    return print_checks(checks, note)
