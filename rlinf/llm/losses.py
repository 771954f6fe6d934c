"""Losses of token policies: maximum likelihood, preferences, clipped policy gradient.

``loss_fn(model, data)`` runs the model and returns a scalar. ``from_logprobs`` takes the log-probabilities of a part of a batch and
divides by the counts of the complete batch, so that the losses of micro-batches or ranks add up to the loss of the batch.

``logprobs [B, S]`` come from ``rlinf.llm.logprobs.sequence_logprobs``: column ``i`` belongs to token ``i``, column 0 and
padding are 0. ``rlinf.llm.policy_interface.TrainingDatumSpec`` lists the keys of ``data``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.algorithms.losses import clipped_policy_loss, kl_penalty
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import response_mask, verify_right_padding
from rlinf.llm.batched_data_dict import tokens_and_mask
from rlinf.llm.logprobs import batch_logprobs
from rlinf.options import check_options, option
from rlinf.types import LossOutput

LEVELS = ("token", "sequence")
LOSS_LEVELS = (*LEVELS, "sequence_sum")


@dataclass
class TokenCounts:
    """Denominators of the means of a batch, over all micro-batches and ranks.

    Attributes:
        tokens: Trained tokens.
        samples: Rows (preference losses: pairs) with trained tokens.
    """

    tokens: float
    samples: float


def trained_tokens(data: Mapping[str, Any]) -> Tensor:
    """Return the mask bool ``[B, S]`` of the trained tokens.

    It is ``token_mask``, else the response if ``generation_lengths`` is present, else all tokens; always without the first token,
    padding and rows with ``sample_mask`` 0. Raises ConfigError for masks of a different shape.
    """
    ids, mask = tokens_and_mask(data)
    chosen = mask.clone()
    chosen[:, :1] = False
    if "token_mask" in data:
        token_mask = _tensor_of(data, "token_mask")
        if token_mask.shape != ids.shape:
            raise ConfigError(f"token_mask is {list(token_mask.shape)}; required: {list(ids.shape)}, as the tokens.")
        chosen &= token_mask.to(ids.device).bool()
    elif isinstance(data.get("labels"), Tensor) and data["labels"].shape == ids.shape:
        raise ConfigError("data['labels'] are not read. Pass token_mask=(labels != -100) instead")
    elif "generation_lengths" in data:
        chosen &= response_mask(data)
    if "sample_mask" in data:
        sample_mask = _tensor_of(data, "sample_mask")
        if sample_mask.shape != ids.shape[:1]:
            raise ConfigError(f"sample_mask is {list(sample_mask.shape)}; required: [{len(ids)}], one per row.")
        chosen &= sample_mask.to(ids.device).bool().unsqueeze(1)
    return chosen


@dataclass
class TokenLoss(ABC):
    """A loss of log-probabilities.

    Attributes:
        rows_per_sample: Consecutive rows that form one sample and must be in one micro-batch.
        compares: The loss compares log-probabilities of the same tokens, so dropout must be off.
    """

    rows_per_sample: ClassVar[int] = 1
    compares: ClassVar[bool] = False
    _: KW_ONLY
    temperature: float = option(1.0, "Divides the logits if the loss runs the model itself.", minimum=1e-6)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs_reference(self) -> bool:
        """Whether ``data`` must have ``reference_logprobs``."""
        return False

    def __call__(self, model: Any, data: Mapping[str, Any]) -> Tensor:
        """Run a causal language model on a complete right-padded batch, and return the scalar loss."""
        verify_right_padding(data, raise_error=True)
        logprobs = batch_logprobs(model, data, self.temperature, chosen=trained_tokens(data))
        return self.from_logprobs(logprobs, data, self.counts(data)).loss

    def counts(self, data: Mapping[str, Any]) -> TokenCounts:
        """Count the trained tokens and samples of a batch; counts of parts add up."""
        mask = trained_tokens(data)
        return TokenCounts(float(mask.sum()), float(mask.any(-1).sum()))

    @abstractmethod
    def from_logprobs(self, logprobs: Tensor, data: Mapping[str, Any], counts: TokenCounts) -> LossOutput:
        """Return the loss and metrics of a part of a batch with ``counts``; both add up over the parts.

        ``logprobs`` are float32 ``[B, S]`` with gradients. Raise ConfigError if a key is missing, or the complete batch has no trained
        token.
        """


@dataclass
class NLLLossFn(TokenLoss):
    """Mean negative log-likelihood of the trained tokens, in nats: supervised fine-tuning."""

    def from_logprobs(self, logprobs: Tensor, data: Mapping[str, Any], counts: TokenCounts) -> LossOutput:
        _check_counts(counts)
        mask = to_device(trained_tokens(data), logprobs.device)
        loss = -torch.where(mask, logprobs, 0.0).sum() / counts.tokens
        return LossOutput(loss, {"nll": loss.detach()})


@dataclass
class DPOLossFn(TokenLoss):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7): row ``2i`` is chosen, row ``2i + 1`` rejected.

    ``-log sigmoid(beta (r_chosen - r_rejected))`` with ``r`` the sum over the trained tokens of a row of
    ``logprobs - reference_logprobs``; it is log 2 if policy and reference are equal. A pair counts if both rows count.
    """

    rows_per_sample: ClassVar[int] = 2
    compares: ClassVar[bool] = True
    beta: float = option(0.1, "Inverse KL strength towards the reference.", minimum=1e-6)
    label_smoothing: float = option(0.0, "Probability of a swapped label (Mitchell 2023, eq. 3).", minimum=0, below=0.5)

    @property
    def needs_reference(self) -> bool:
        return True

    def counts(self, data: Mapping[str, Any]) -> TokenCounts:
        mask = trained_tokens(data)
        pairs = _pairs(mask.any(-1)).all(-1)
        return TokenCounts(float(mask.sum()), float(pairs.sum()))

    def from_logprobs(self, logprobs: Tensor, data: Mapping[str, Any], counts: TokenCounts) -> LossOutput:
        _check_counts(counts)
        mask = to_device(trained_tokens(data), logprobs.device)
        reference = _logprobs_of(data, "reference_logprobs", logprobs, "policy.get_reference_logprobs(data)")
        rewards = _pairs(self.beta * torch.where(mask, logprobs - reference, 0.0).sum(-1))
        margin = rewards[:, 0] - rewards[:, 1]
        losses = -(1 - self.label_smoothing) * F.logsigmoid(margin) - self.label_smoothing * F.logsigmoid(-margin)
        valid = _pairs(mask.any(-1)).all(-1)

        def mean(values: Tensor) -> Tensor:
            return torch.where(valid, values, 0.0).sum() / counts.samples

        metrics = {
            "accuracy": (margin > 0).float(),
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "reward_margin": margin,
        }
        return LossOutput(mean(losses), {name: mean(value).detach() for name, value in metrics.items()})


@dataclass
class GRPOLossFn(TokenLoss):
    """Clipped policy gradient on given advantages, as in GRPO (Shao et al. 2024, eq. 3) and its relatives.

    ``clipped_policy_loss`` computes the surrogate. Without ``old_logprobs`` every ratio is 1, as for one step per batch.

    Options: a sequence ratio is ``exp`` of the mean log-ratio of a row (GSPO, Zheng et al. 2025, eq. 7), which needs one
    advantage per row. ``loss_level`` token is the mean over all tokens of the batch (DAPO, Yu et al. 2025, eq. 8); sequence the
    mean over the rows of the means over their tokens (GRPO, eq. 3); sequence_sum the mean over the rows of their sums, without the
    bias towards short rows (Dr. GRPO, Liu et al. 2025, section 3.1). ``importance_cap`` corrects for different numerics of a
    generation backend by weights ``min(old / generation, cap)`` (truncated importance sampling, Yao et al. 2025).

    With ``generation_logprobs``, the metrics ``logprob_gap_mean`` and ``logprob_gap_exp_mean`` compare them with ``old_logprobs``.
    """

    compares: ClassVar[bool] = True
    clip_range_low: float = option(0.2, "The ratio is clipped to at least 1 minus this.", minimum=0)
    clip_range_high: float = option(0.2, "The ratio is clipped to at most 1 plus this (DAPO, eq. 8).", minimum=0)
    dual_clip: float | None = option(None, "Dual clip for negative advantages (Ye et al. 2020, eq. 5).", minimum=1)
    ratio_level: str = option("token", "A ratio per token or per sequence.", choices=LEVELS)
    loss_level: str = option("token", "Averaging of the loss.", choices=LOSS_LEVELS)
    kl_coef: float = option(0.0, "Weight of the KL penalty to the reference policy.", minimum=0)
    kl_estimator: str = option("k3", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    importance_cap: float | None = option(None, "Cap of importance weights (needs generation_logprobs).", minimum=0)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def from_logprobs(self, logprobs: Tensor, data: Mapping[str, Any], counts: TokenCounts) -> LossOutput:
        _check_counts(counts)
        mask = to_device(trained_tokens(data), logprobs.device)
        advantages = self._advantages(data, logprobs)
        old = logprobs.detach()
        if "old_logprobs" in data:
            old = _logprobs_of(data, "old_logprobs", logprobs, "policy.get_logprobs(data)")
        lengths = mask.sum(-1, keepdim=True)
        by_mean = self.loss_level == "sequence"
        token_weights = 1 / lengths.clamp(min=1) if by_mean else torch.ones_like(logprobs)
        denominator = counts.tokens if self.loss_level == "token" else counts.samples
        # The surrogate scales with the advantage, so multiplying the advantage weights the token.
        if self.ratio_level == "sequence":
            ratios, old_ratios = (_row_mean(values, mask) for values in (logprobs, old))
            unit_mask, num_units = mask.any(-1, keepdim=True), counts.samples
            weights = (token_weights * mask).sum(-1, keepdim=True) * _row_mean(self._importance(data, old, mask), mask)
        else:
            ratios, old_ratios, unit_mask, num_units = logprobs, old, mask, counts.tokens
            weights = token_weights * self._importance(data, old, mask)
        clipping = (self.clip_range_low, self.clip_range_high, self.dual_clip)
        total, sums = clipped_policy_loss(ratios, old_ratios, advantages * weights, unit_mask, *clipping)
        loss = total / denominator
        metrics = {name: value / num_units for name, value in sums.items()} | {"policy_loss": loss.detach()}
        if "generation_logprobs" in data:
            generated = _logprobs_of(data, "generation_logprobs", old, "the 'logprobs' of generate(data)")
            gaps = torch.where(mask, (old - generated).abs(), 0.0)
            metrics["logprob_gap_mean"] = gaps.sum() / counts.tokens
            metrics["logprob_gap_exp_mean"] = torch.where(mask, gaps.exp(), 0.0).sum() / counts.tokens
        if self.needs_reference:
            reference = _logprobs_of(data, "reference_logprobs", logprobs, "policy.get_reference_logprobs(data)")
            kl = kl_penalty(logprobs, reference, mask, self.kl_estimator, token_weights) / denominator
            loss = loss + self.kl_coef * kl
            metrics["kl_to_reference"] = kl.detach()
        return LossOutput(loss, metrics)

    def _advantages(self, data: Mapping[str, Any], logprobs: Tensor) -> Tensor:
        if "advantages" not in data:
            raise ConfigError(f"GRPOLossFn needs data['advantages'], [B] or [B, S]; the batch has {sorted(data)}.")
        advantages = to_device(_tensor_of(data, "advantages"), logprobs.device).to(logprobs.dtype)
        rows, columns = logprobs.shape
        accepted = [(rows,)] if self.ratio_level == "sequence" else [(rows,), (rows, columns)]
        if tuple(advantages.shape) not in accepted:
            raise ConfigError(
                f"advantages are {list(advantages.shape)}; required with ratio_level='{self.ratio_level}': "
                f"{' or '.join(str(list(shape)) for shape in accepted)}."
            )
        return advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages

    def _importance(self, data: Mapping[str, Any], old: Tensor, mask: Tensor) -> Tensor:
        if self.importance_cap is None:
            return torch.ones_like(old)
        generated = _logprobs_of(data, "generation_logprobs", old, "the 'logprobs' of generate(data)")
        return torch.where(mask, old - generated, 0.0).exp().clamp(max=self.importance_cap)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _pairs(values: Tensor) -> Tensor:
    if len(values) % 2:
        raise ConfigError(f"DPOLossFn got {len(values)} rows; required: pairs, row 2i chosen and row 2i + 1 rejected.")
    return values.view(-1, 2)


def _logprobs_of(data: Mapping[str, Any], key: str, like: Tensor, source: str) -> Tensor:
    if key not in data:
        raise ConfigError(f"The loss needs data['{key}']; the batch has {sorted(data)}. Set it to {source}")
    values = _tensor_of(data, key)
    if values.shape != like.shape:
        raise ConfigError(f"data['{key}'] is {list(values.shape)}; required: {list(like.shape)}, as the tokens.")
    return to_device(values, like.device).to(like.dtype)


def _tensor_of(data: Mapping[str, Any], key: str) -> Tensor:
    if not isinstance(data[key], Tensor):
        raise ConfigError(f"data['{key}'] is a {type(data[key]).__name__}; required: a torch.Tensor.")
    return data[key]


def _check_counts(counts: TokenCounts) -> None:
    if counts.samples <= 0:
        raise ConfigError("The batch trains on nothing: token_mask or sample_mask is 0, or all responses are empty.")
