"""Losses for token policies: maximum likelihood, preferences and clipped policy gradient.

``loss_fn(model, data)`` runs the model and returns a scalar. ``from_logprobs`` computes the loss from the log-probabilities for part of
a batch and divides by counts for the complete batch, so that losses of micro-batches or ranks add up to the batch's loss.

``logprobs [B, S]`` are returned by ``rlinf.llm.logprobs.sequence_scores``: column ``i`` belongs to token ``i``, and column 0 and
padding are 0. ``rlinf.llm.policy_interface.TrainingDatumSpec`` lists the keys in ``data``.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.algorithms.losses import clipped_policy_loss, kl_penalty
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.llm.batch_checks import response_mask, verify_right_padding
from rlinf.llm.batched_data_dict import Batch, tokens_and_mask
from rlinf.llm.logprobs import batch_scores
from rlinf.options import check_options, option
from rlinf.types import LossOutput

LEVELS = ("token", "sequence")
LOSS_LEVELS = (*LEVELS, "sequence_sum")


@dataclass
class TokenCounts:
    """Denominators for means over a batch, including all micro-batches and ranks.

    Attributes:
        tokens: Number of trained tokens.
        samples: Number of rows (for preference losses, pairs) with trained tokens.
    """

    tokens: float
    samples: float


def trained_tokens(data: Batch) -> Tensor:
    """Return a bool mask ``[B, S]`` of the trained tokens.

    These are the tokens in ``token_mask`` if present, otherwise the response if ``generation_lengths`` is present, otherwise all tokens.
    The first token, padding and rows with ``sample_mask`` 0 are always excluded. Raises ConfigError for masks with a different shape.
    """
    ids, mask = tokens_and_mask(data)
    chosen = mask.clone()
    chosen[:, :1] = False
    if "token_mask" in data:
        token_mask = _tensor_of(data, "token_mask")
        if token_mask.shape != ids.shape:
            raise ConfigError(f"token_mask is {list(token_mask.shape)}; expected the tokens' shape {list(ids.shape)}.")
        chosen &= token_mask.to(ids.device).bool()
    elif isinstance(data.get("labels"), Tensor) and data["labels"].shape == ids.shape:
        raise ConfigError("data['labels'] is not used. Pass token_mask=(labels != -100) instead")
    elif "generation_lengths" in data:
        chosen &= response_mask(data)
    if "sample_mask" in data:
        sample_mask = _tensor_of(data, "sample_mask")
        if sample_mask.shape != ids.shape[:1]:
            raise ConfigError(f"sample_mask is {list(sample_mask.shape)}; expected [{len(ids)}], one per row.")
        chosen &= sample_mask.to(ids.device).bool().unsqueeze(1)
    return chosen


@dataclass
class TokenLoss(ABC):
    """Base class for losses that are functions of log-probabilities.

    Attributes:
        rows_per_sample: Number of consecutive rows that form one sample and must be in the same micro-batch.
        compares: Whether the loss compares different log-probabilities of the same tokens, so that dropout must be disabled.
    """

    rows_per_sample: ClassVar[int] = 1
    compares: ClassVar[bool] = False
    _: KW_ONLY
    temperature: float = option(1.0, "Divisor of the logits if the loss runs the model itself.", minimum=1e-6)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs_reference(self) -> bool:
        """Whether ``data`` must contain ``reference_logprobs``."""
        return False

    def __call__(self, model: nn.Module, data: Batch) -> Tensor:
        """Run a causal language model on a complete right-padded batch, and return the scalar loss."""
        verify_right_padding(data, raise_error=True)
        scores = batch_scores(model, data, self.temperature, chosen=trained_tokens(data))
        return self.from_logprobs(scores.logprobs, data, self.counts(data)).loss

    def counts(self, data: Batch) -> TokenCounts:
        """Count the trained tokens and samples in a batch; the counts of its parts add up."""
        mask = trained_tokens(data)
        return TokenCounts(float(mask.sum()), float(mask.any(-1).sum()))

    @abstractmethod
    def from_logprobs(self, logprobs: Tensor, data: Batch, counts: TokenCounts) -> LossOutput:
        """Return the loss and metrics for part of a batch with the given ``counts``; both add up over the parts.

        ``logprobs`` are float32 ``[B, S]`` with gradients. Raise ConfigError if a key is missing, or the complete batch has no trained
        tokens.
        """


@dataclass
class NLLLossFn(TokenLoss):
    """Mean negative log-likelihood of the trained tokens in nats, for supervised fine-tuning."""

    def from_logprobs(self, logprobs: Tensor, data: Batch, counts: TokenCounts) -> LossOutput:
        _check_counts(counts)
        mask = to_device(trained_tokens(data), logprobs.device)
        loss = -torch.where(mask, logprobs, 0.0).sum() / counts.tokens
        return LossOutput(loss, {"nll": loss.detach()})


@dataclass
class DPOLossFn(TokenLoss):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7); row ``2i`` is chosen and row ``2i + 1`` rejected.

    The loss is ``-log sigmoid(beta (r_chosen - r_rejected))``, where ``r`` is the sum of ``logprobs - reference_logprobs`` over a row's
    trained tokens; it is log 2 if policy and reference are equal. A pair is included if both rows have trained tokens.
    """

    rows_per_sample: ClassVar[int] = 2
    compares: ClassVar[bool] = True
    beta: float = option(0.1, "Strength of the implicit KL constraint to the reference policy.", minimum=1e-6)
    label_smoothing: float = option(0.0, "Probability of swapped labels (Mitchell 2023, eq. 3).", minimum=0, below=0.5)

    @property
    def needs_reference(self) -> bool:
        return True

    def counts(self, data: Batch) -> TokenCounts:
        mask = trained_tokens(data)
        pairs = _pairs(mask.any(-1)).all(-1)
        return TokenCounts(float(mask.sum()), float(pairs.sum()))

    def from_logprobs(self, logprobs: Tensor, data: Batch, counts: TokenCounts) -> LossOutput:
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
    """Clipped policy gradient for given advantages, as in GRPO (Shao et al. 2024, eq. 3) and its variants.

    ``clipped_policy_loss`` computes the surrogate. Without ``old_logprobs``, every ratio is 1, as in a single step per batch.
    ``ratio_level=sequence`` uses ``exp`` of a row's mean log-ratio (GSPO, Zheng et al. 2025, eq. 7) and needs one advantage per row.
    ``loss_level=token`` averages over all tokens in the batch (DAPO, Yu et al. 2025, eq. 8), ``sequence`` averages over tokens in each
    row and then over rows (GRPO, eq. 3), and ``sequence_sum`` sums over tokens in each row and averages over rows, which avoids the bias
    towards short rows (Dr. GRPO, Liu et al. 2025, section 3.1). ``importance_cap`` corrects for a generation backend's different
    numerics with weights ``min(old / generation, cap)`` (truncated importance sampling, Yao et al. 2025).

    With ``generation_logprobs``, the metrics ``logprob_gap_mean`` and ``logprob_gap_exp_mean`` compare them with ``old_logprobs``.
    """

    compares: ClassVar[bool] = True
    clip_range_low: float = option(0.2, "Clip the importance ratio below 1 minus this value.", minimum=0)
    clip_range_high: float = option(0.2, "Clip the importance ratio above 1 plus this value.", minimum=0)
    dual_clip: float | None = option(None, "Dual clip for negative advantages (Ye et al. 2020, eq. 5).", minimum=1)
    ratio_level: str = option("token", "Compute one importance ratio per token or sequence.", choices=LEVELS)
    loss_level: str = option("token", "How the loss is averaged over tokens and rows.", choices=LOSS_LEVELS)
    kl_coef: float = option(0.0, "Weight of the KL penalty relative to the reference policy.", minimum=0)
    kl_estimator: str = option("k3", "Estimator of the KL penalty (Schulman 2020).", choices=("k1", "k2", "k3"))
    importance_cap: float | None = option(None, "Cap on importance weights (needs generation_logprobs).", minimum=0)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def from_logprobs(self, logprobs: Tensor, data: Batch, counts: TokenCounts) -> LossOutput:
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
        # The surrogate is proportional to the advantage, so multiply the advantage to weight a token.
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

    def _advantages(self, data: Batch, logprobs: Tensor) -> Tensor:
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

    def _importance(self, data: Batch, old: Tensor, mask: Tensor) -> Tensor:
        if self.importance_cap is None:
            return torch.ones_like(old)
        generated = _logprobs_of(data, "generation_logprobs", old, "the 'logprobs' of generate(data)")
        return torch.where(mask, old - generated, 0.0).exp().clamp(max=self.importance_cap)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _pairs(values: Tensor) -> Tensor:
    if len(values) % 2:
        raise ConfigError(f"DPOLossFn got {len(values)} rows; expected pairs, row 2i chosen and row 2i + 1 rejected.")
    return values.view(-1, 2)


def _logprobs_of(data: Batch, key: str, like: Tensor, source: str) -> Tensor:
    if key not in data:
        raise ConfigError(f"The loss needs data['{key}']; the batch has {sorted(data)}. Set it to {source}")
    values = _tensor_of(data, key)
    if values.shape != like.shape:
        raise ConfigError(f"data['{key}'] is {list(values.shape)}; expected the tokens' shape {list(like.shape)}.")
    return to_device(values, like.device).to(like.dtype)


def _tensor_of(data: Batch, key: str) -> Tensor:
    if not isinstance(data[key], Tensor):
        raise ConfigError(f"data['{key}'] is a {type(data[key]).__name__}; expected a torch.Tensor.")
    return data[key]


def _check_counts(counts: TokenCounts) -> None:
    if counts.samples <= 0:
        raise ConfigError("The batch has no trained tokens: token_mask or sample_mask is 0, or responses are empty.")
