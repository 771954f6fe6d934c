"""Do two backends give the same tokens the same log-probabilities?"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import response_mask
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.generation_interface import GenerationInterface
from rlinf.llm.policy_interface import PolicyInterface

logger = logging.getLogger(__name__)


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
    threshold: float = 1.05,
) -> bool:
    """Generate with one backend, score the result with the other, and compare.

    Args:
        training_backend: Scores.
        inference_backend: Generates, sampling.
        test_data: Prompts.
        threshold: Largest accepted ``mean(exp|training - inference|)`` over the generated tokens; 1 is equality.

    Returns:
        Whether it is within the threshold; NaN is not. The reason of a False is logged as a warning.

    Raises:
        ConfigError: The backends know different vocabularies, return log-probabilities of different shapes, or nothing was
            generated.
    """
    sizes = [vocab_size(backend) for backend in (training_backend, inference_backend)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"The training backend has vocab_size={sizes[0]}, the inference backend {sizes[1]}; required: one vocabulary. "
            "Set model_name=<one folder for both>"
        )
    temperatures = [getattr(backend, "temperature", None) for backend in (training_backend, inference_backend)]
    inference_backend.prepare_for_generation()
    try:
        output = inference_backend.generate(test_data, greedy=False)
    finally:
        inference_backend.finish_generation()
    training = training_backend.get_logprobs(output)["logprobs"]
    if training.shape != output["logprobs"].shape:
        raise ConfigError(
            f"get_logprobs returned {list(training.shape)} for generated log-probs {list(output['logprobs'].shape)}; "
            "required: one number per token, [B, S]"
        )
    error = log_probability_error(training, output["logprobs"], response_mask(output))
    if error <= threshold:
        return True
    hint = ""
    if None not in temperatures and temperatures[0] != temperatures[1]:
        hint = f" The training backend has temperature={temperatures[0]}, the inference backend {temperatures[1]}."
    logger.warning("mean exp|log-prob difference| is %.4f, more than %.4f.%s", error, threshold, hint)
    return False


def vocab_size(backend: Any) -> int | None:
    """Tokens that a policy or an engine knows; None where it has neither ``vocab_size`` nor a ``model`` with a ``config``."""
    if hasattr(backend, "vocab_size"):
        return backend.vocab_size
    config = getattr(getattr(backend, "model", None), "config", None)
    return None if config is None else config.get_text_config().vocab_size


def log_probability_error(training: Tensor, inference: Tensor, mask: Tensor) -> float:
    """``mean(exp|training - inference|)`` over the tokens of ``mask``; NaN if one of them is.

    Raises:
        ConfigError: ``mask`` is empty.
    """
    if not mask.any():
        raise ConfigError(
            "No token was generated, so there is nothing to compare. Give shorter prompts or max_new_tokens=8"
        )
    differences = (training.float() - inference.to(training.device).float()).abs()[mask.to(training.device)]
    return float(differences.exp().mean())
