"""Base class of all policies that predict action tokens."""

from abc import abstractmethod

import torch
from torch import Tensor

from rlinf.distributed.transfers import to_device
from rlinf.errors import RejectedInputError
from rlinf.models.embodiment.base import ActionModel, Inputs
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer, select_action_stats
from rlinf.models.embodiment.modules.readout_token import TOKEN_WIDTH
from rlinf.models.embodiment.modules.tokenizer import ActionTokenizer
from rlinf.models.loading import num_positions
from rlinf.models.sampling import token_logprobs
from rlinf.types import ActionEvaluation, ActionPrediction, Statistics

PrefixStates = tuple[Tensor, Tensor | None]
"""States ``[B, P, H]`` of images and prompt, and their bool mask ``[B, P]`` (None without padding)."""


class TokenActionModel(ActionModel):
    """A policy that samples ``A = action_dim * action_chunks_len`` action tokens per call."""

    action_tokenizer: ActionTokenizer
    action_normalizer: ActionNormalizer

    @abstractmethod
    def _score(
        self, inputs: Inputs, tokens: Tensor | None, prefix: list[PrefixStates] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return bin logits ``[B, A, n_bins]`` for ``tokens [B, A]`` in one pass, and the hidden state ``[B, H]`` for the value.

        Only autoregressive models read ``tokens``, and the value's state must not depend on them. If ``prefix`` is given,
        the states of images and prompt are appended to it; ``propose`` computes features from them.
        """

    def check_length(self, num_prompt_tokens: int) -> None:
        """Reject inputs that, including the actions, exceed the language model's context length."""
        positions = num_positions(self.config.text_config)
        needed = num_prompt_tokens + self.num_logprobs
        if positions is not None and needed > positions:
            raise RejectedInputError(
                f"An input has {needed} tokens (prompt and images {num_prompt_tokens}, actions {self.num_logprobs}), but the "
                f"language model supports {positions} positions (max_position_embeddings), beyond which its outputs are "
                "meaningless. Shorten the environment's instructions, or set fewer env.cameras or a smaller "
                "model.action_chunks_len"
            )

    def get_action_stats(self, unnorm_key: str | None) -> Statistics:
        """Return a data set's ``q01``, ``q99`` and ``mask``."""
        return dict(select_action_stats(self.config.norm_stats or {}, unnorm_key))

    @property
    def feature_dim(self) -> int:
        """Width of ``A`` concatenated hidden states, the mean prefix state, or the readout token."""
        if self.feature_kind == "token":
            return TOKEN_WIDTH
        return self.config.text_config.hidden_size * (self.num_logprobs if self.feature_kind == "hidden" else 1)

    @torch.no_grad()
    def predict_values(self, **inputs: Tensor) -> Tensor:
        any_token = self.action_tokenizer.first_token
        rows, device = len(inputs["input_ids"]), inputs["input_ids"].device
        tokens = torch.full((rows, self.num_logprobs), any_token, device=device)
        return self._values(self._score(inputs, tokens)[1])

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        tokens = prediction.sequences[:, -self.num_logprobs :] - self.action_tokenizer.first_token
        return token_logprobs(prediction.logits, tokens, temperature)[0]

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        tokens = sequences[:, -self.num_logprobs :]
        logits, value_state = self._score(inputs, tokens)
        logprobs, entropy = token_logprobs(logits, tokens - self.action_tokenizer.first_token, temperature, True)
        return ActionEvaluation(logprobs, entropy, self._values(value_state))

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the mean negative log-probability ``[B]`` of the tokens for ``actions [B, C, D]``, over action bins only."""
        chunk = self.action_normalizer.normalize(actions[:, : self.action_chunks_len])
        tokens = self.action_tokenizer.encode(chunk).flatten(1)
        tokens = to_device(tokens, self.device)
        readout, prefix = self._readout, list[PrefixStates]()
        # User-defined classes without a readout token need not accept the prefix argument.
        logits, _ = self._score(inputs, tokens) if readout is None else self._score(inputs, tokens, prefix)
        losses = -token_logprobs(logits, tokens - self.action_tokenizer.first_token)[0].mean(-1)
        return losses if readout is None else losses + readout.loss(*prefix[0], self._motion(actions))

    def decode_actions(self, sequences: Tensor) -> Tensor:
        tokens = sequences[:, -self.num_logprobs :].unflatten(1, (self.action_chunks_len, self.action_dim))
        return self.action_normalizer.unnormalize(self.action_tokenizer.decode(tokens)).float()
