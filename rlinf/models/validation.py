"""Do two backends give the same tokens the same log-probabilities?"""

from __future__ import annotations

import logging

from torch import Tensor

from rlinf.distributed.batched_data_dict import BatchedDataDict
from rlinf.errors import ConfigError
from rlinf.models.generation.interfaces import GenerationInterface, response_mask
from rlinf.models.interfaces import PolicyInterface

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
        ConfigError: The backends return log-probabilities of different shapes, or nothing was generated.
    """
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
