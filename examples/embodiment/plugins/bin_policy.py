"""A policy of action tokens in plain PyTorch: a GRU that reads the state (docs/adding_a_model.md)."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from rlinf.models import register_model
from rlinf.models.embodiment.checkpoint_policy import CheckpointPolicy
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer, select_action_stats
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.sampling import draw_uniforms, sample_tokens, token_logprobs
from rlinf.types import ActionEvaluation, ActionPrediction


class BinConfig(PreTrainedConfig):
    """Sizes that ``model.init_config`` sets."""

    model_type = "bin_policy"
    num_images_in_input = 0  # the env draws no images for it

    state_dim: int = 31
    width: int = 128
    n_bins: int = 64
    norm_stats: dict | None = None


class BinPolicy(CheckpointPolicy):
    """Predict one token per action dimension of a chunk; each depends on the tokens before it."""

    config_class = BinConfig
    main_input_name = "state"
    lora_target_modules = ("encoder",)
    trained_in_full = ("value_head", "head")

    def __init__(
        self,
        config,
        hidden_size=None,
        unnorm_key=None,
        action_dim=2,
        action_chunks_len=1,
        value_head=True,
        detach_value=False,
    ):
        super().__init__(config)
        self.action_dim, self.action_chunks_len, self.detach_value = action_dim, action_chunks_len, detach_value
        self.action_normalizer = ActionNormalizer(select_action_stats(config.norm_stats, unnorm_key), action_dim)
        self.encoder = nn.Linear(config.state_dim, config.width)
        self.token_embedding = nn.Embedding(config.n_bins, config.width)
        self.gru = nn.GRUCell(config.width, config.width)
        self.head = nn.Linear(config.width, config.n_bins)
        self.value_head = ValueHead(config.width) if value_head else None
        self.post_init()

    def preprocess(self, observation):
        return {"state": torch.from_numpy(observation.state).to(self.device, self.dtype)}

    def _decode(self, state, choose):
        """Return tokens ``[B, A]``, their logits ``[B, A, n_bins]`` and values ``[B]``; ``choose(position, logits)`` gives a token."""
        hidden = torch.tanh(self.encoder(state))
        values, tokens, logits = self._values(hidden), [], []
        for position in range(self.num_logprobs):
            logits.append(self.head(hidden))
            tokens.append(choose(position, logits[-1]))
            hidden = self.gru(self.token_embedding(tokens[-1]), hidden)
        return torch.stack(tokens, 1), torch.stack(logits, 1), values

    @torch.no_grad()
    def predict_action_batch(self, do_sample=True, temperature=1.0, uniforms=None, *, state):
        if do_sample and uniforms is None:
            uniforms = draw_uniforms(len(state), self.num_logprobs, device=state.device)

        def choose(position, logits):
            return sample_tokens(logits, do_sample, temperature, uniforms[:, position] if do_sample else None)

        tokens, logits, values = self._decode(state, choose)
        return ActionPrediction(self.decode_actions(tokens), tokens, logits, values)

    def rollout_logprobs(self, prediction, temperature=1.0):
        return token_logprobs(prediction.logits, prediction.sequences, temperature)[0]

    def evaluate_actions(self, inputs, sequences, temperature=1.0):
        tokens = sequences[:, -self.num_logprobs :]
        _, logits, values = self._decode(inputs["state"], lambda position, _: tokens[:, position])
        return ActionEvaluation(*token_logprobs(logits, tokens, temperature, with_entropy=True), values)

    def sft_loss(self, inputs, actions, uniforms=None):
        normalized = self.action_normalizer.normalize(actions).flatten(1).to(self.device)
        bins = ((normalized + 1) / 2 * self.config.n_bins).long().clamp(0, self.config.n_bins - 1)
        return -self.evaluate_actions(inputs, bins).logprobs.mean(-1)

    def decode_actions(self, sequences):
        middles = (sequences[:, -self.num_logprobs :] + 0.5) / self.config.n_bins * 2 - 1
        return self.action_normalizer.unnormalize(
            middles.unflatten(1, (self.action_chunks_len, self.action_dim))
        ).float()


def load_processor(tokenizer_config, model_config, path):
    """Return no processor: a state needs none."""


register_model("bin_policy", model=BinPolicy, load_processor=load_processor)
