"""OpenVLA-OFT (Kim et al. 2025) as a policy for reinforcement learning."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from rlinf.distributed.deferred import Weight
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.embodiment.base import Inputs
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer, select_stats
from rlinf.models.embodiment.openvla.llama_layer import run_layers
from rlinf.models.embodiment.openvla.policy import OpenVLAForRLActionPrediction
from rlinf.models.embodiment.openvla.weights import from_public
from rlinf.models.embodiment.openvla_oft.action_head import L1ActionHead, ProprioProjector
from rlinf.models.embodiment.openvla_oft.config import OpenVLAOFTConfig
from rlinf.models.embodiment.openvla_oft.weights import absent_parts, draw_parts, read_oft_weights
from rlinf.models.embodiment.token_action_model import PrefixStates
from rlinf.models.loading import field_error, without_logprobs
from rlinf.models.sampling import check_finite, sample_tokens
from rlinf.types import ActionEvaluation, ActionPrediction, EnvSpec, Observation


class OpenVLAOFTForRLActionPrediction(OpenVLAForRLActionPrediction):
    """Predict all tokens of an action chunk in one pass, from images, instruction and (optionally) the robot's state.

    The sequence is BOS, image tokens, state token, (padding,) prompt, ``A`` placeholders (zeros or learned) and ``</s>``, with
    bidirectional attention. Token ``i`` is read ``i`` positions after the last prompt token, where the value is read.

    With ``action_head=l1``, the chunk is regressed from the same hidden states, without log-probabilities, and
    ``sequences`` contains the normalised actions ``[B, A]``.
    """

    config_class = OpenVLAOFTConfig
    without_state = "model.init_config.use_proprio=false model.init_config.state_dim=null"
    # vLLM only supports causal decoding.
    vllm_adapter: ClassVar[None] = None
    base_model_prefix = "openvla_oft"
    lora_target_modules: ClassVar[str] = (
        r"(vision_backbone\..*\.(q_proj|k_proj|v_proj|o_proj|out_proj|fc1|fc2|film\.scale|film\.shift)|projector\.fc\d"
        r"|language_model\.model\.layers\..*_proj)"
    )
    trained_in_full: ClassVar[tuple[str, ...]] = (
        "value_head", "readout_token", "action_head", "proprio_projector", "placeholders",
    )  # fmt: skip

    def _add_modules(self) -> None:
        config = self.config
        hidden_size = config.text_config.hidden_size
        self.action_head = L1ActionHead(hidden_size, self.action_dim) if config.action_head == "l1" else None
        self.state_normalizer = _state_normalizer(config, self.unnorm_key)
        self.state_range = None if self.state_normalizer is None else self.state_normalizer.range
        self.proprio_projector = ProprioProjector(self.state_dim, hidden_size) if config.use_proprio else None
        # Folders saved from now on contain all parts.
        config.new_parts = []

    @classmethod
    def check_settings(cls, config: OpenVLAOFTConfig, *, unnorm_key: str | None, **arguments: Any) -> None:
        super().check_settings(config, unnorm_key=unnorm_key, **arguments)
        _state_normalizer(config, unnorm_key)

    @classmethod
    def reads_state(cls, config: OpenVLAOFTConfig) -> bool:
        return config.use_proprio

    @classmethod
    def check_env(cls, config: OpenVLAOFTConfig, env: EnvSpec) -> None:
        super().check_env(config, env)
        if config.use_proprio and env.state_dim == 0:
            problem = f"The model reads the state (use_proprio=true), but env.name={env.name} provides none with the current settings"
            raise field_error(problem, "use_proprio=false")

    @classmethod
    def check_rl(cls, config: OpenVLAOFTConfig) -> None:
        if config.action_head == "l1":
            raise without_logprobs("action_head", "l1", "discrete")

    @property
    def state_dim(self) -> int:
        """Width of the state that the model reads, or 0 if it reads none."""
        return 0 if self.state_normalizer is None else len(self.state_normalizer.low)

    @property
    def _value_position(self) -> int:
        return 0

    # -- forward pass --------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Prepare inputs as in the base class, plus ``proprio [B, S]``, the state normalised to [-1, 1]."""
        inputs = super().preprocess(observation)
        if self.state_normalizer is None:
            return inputs
        given = 0 if observation.state is None else observation.state.shape[1]
        if given != self.state_dim:
            raise ConfigError(
                f"The model reads a state of {self.state_dim} dimensions (use_proprio), but the environment provides "
                f"{given or 'none'}; expected equal. Set env.state=proprio, or a model.unnorm_key of this environment"
            )
        state = self.state_normalizer.normalize(to_device(torch.from_numpy(observation.state), self.device))
        return inputs | {"proprio": state.float()}

    def _stop_embeddings(self, num_rows: int) -> Tensor:
        """Return the embedding of ``</s>``, ``[B, 1, H]``, or an empty tensor ``[B, 0, H]`` if unused."""
        num_stops = int(self.config.stop_token_in_input)
        ids = torch.full((num_rows, num_stops), self.config.text_config.eos_token_id, device=self.device)
        return self.get_input_embeddings()(ids)

    def _language_vector(self, text: Tensor, key_mask: Tensor | None) -> Tensor:
        stop = self._stop_embeddings(len(text))
        return super()._language_vector(torch.cat([text, stop], dim=1), _extended(key_mask, stop.shape[1]))

    def _observation_tokens(
        self, text: Tensor, key_mask: Tensor | None, pixel_values: Tensor, proprio: Tensor | None = None
    ) -> Tensor:
        image = super()._observation_tokens(text, key_mask, pixel_values)
        if self.proprio_projector is None:
            return image
        state = self.proprio_projector(proprio.to(text.dtype))
        return torch.cat([image, state.unsqueeze(1)], dim=1)

    def _read_out(self, embeddings: Tensor, key_mask: Tensor | None, **options: Any) -> Tensor:
        tail = torch.cat([self._placeholder_embeddings(embeddings), self._stop_embeddings(len(embeddings))], dim=1)
        sequence = torch.cat([embeddings, tail], dim=1)
        key_mask = _extended(key_mask, tail.shape[1])
        num_queries = 1 + tail.shape[1]
        decoder = self.language_model.model
        hidden_states = run_layers(decoder, sequence, key_mask, num_queries, is_causal=False, **options)
        return hidden_states[:, : self.num_logprobs]

    def forward(self, **inputs: Tensor | None) -> CausalLMOutput:
        """Return ``logits [B, A, vocab_size]`` and normed ``hidden_states [B, A, H]`` for the action tokens."""
        hidden_states = self._read_out(*self._embed_prompt(**inputs))
        return CausalLMOutput(logits=self.language_model.lm_head(hidden_states), hidden_states=(hidden_states,))

    # -- the contract --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: Tensor | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
        **inputs: Tensor | None,
    ) -> ActionPrediction:
        hidden_states = self._states_to_act({"input_ids": input_ids, **inputs})
        values = self._values(hidden_states[:, 0])
        if self.action_head is not None:
            normalized = self.action_head(hidden_states).flatten(1)
            return ActionPrediction(self.decode_actions(normalized), normalized, normalized.unsqueeze(-1), values)
        logits = self._bin_logits(hidden_states)
        if do_sample:
            tokens = self.action_tokenizer.first_token + sample_tokens(logits, True, temperature, uniforms)
        else:
            tokens = self._greedy_tokens(hidden_states, check_finite(logits))
        sequences = torch.cat([input_ids, tokens], dim=1)
        return ActionPrediction(self.decode_actions(sequences), sequences, logits, values)

    @property
    def num_candidate_uniforms(self) -> int:
        return 0 if self.action_head is not None else super().num_candidate_uniforms

    def _greedy(self, states: Tensor) -> Tensor:
        if self.action_head is not None:
            return self.action_head(states).flatten(1)
        return self._greedy_tokens(states, self._bin_logits(states))

    def _greedy_tokens(self, states: Tensor, logits: Tensor) -> Tensor:
        """Return the greedy tokens ``[B, A]`` for hidden states and the bins' logits."""
        if self.config.greedy_over_vocabulary:
            return self.language_model.lm_head(states).argmax(-1)
        if self.config.greedy_decoding == "mode":
            return self.action_tokenizer.first_token + logits.argmax(-1)
        halves = torch.full(logits.shape[:-1], 0.5, device=logits.device)
        return self.action_tokenizer.first_token + sample_tokens(logits, True, uniforms=halves)

    def _sampled(self, states: Tensor, uniforms: Tensor) -> Tensor:
        # The L1 head predicts a single action, so repeat it K times.
        if self.action_head is not None:
            return self._greedy(states).unsqueeze(1).expand(-1, uniforms.shape[1], -1)
        return super()._sampled(states, uniforms)

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        self.check_rl(self.config)
        return super().rollout_logprobs(prediction, temperature)

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        self.check_rl(self.config)
        return super().evaluate_actions(inputs, sequences, temperature)

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the cross-entropy ``[B]`` of the tokens for ``actions [B, C, D]`` or, with l1, the mean absolute error."""
        if self.action_head is None:
            return super().sft_loss(inputs, actions, uniforms)
        chunk = actions[:, : self.action_chunks_len]
        target = to_device(self.action_normalizer.normalize(chunk).float(), self.device)
        readout, prefix = self.readout_token, list[PrefixStates]()
        states = self._action_states(inputs, None, None if readout is None else prefix)
        losses = (self.action_head(states) - target).abs().mean((1, 2))
        return losses if readout is None else losses + readout.loss(*prefix[0], self._motion(actions))

    def decode_actions(self, sequences: Tensor) -> Tensor:
        if self.action_head is None:
            return super().decode_actions(sequences)
        normalized = sequences[:, -self.num_logprobs :].unflatten(1, (self.action_chunks_len, self.action_dim))
        return self.action_normalizer.unnormalize(normalized).float()

    # -- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def _read_weights(cls, folder: Path, config: OpenVLAOFTConfig, arguments: dict[str, Any]) -> dict[str, Weight]:
        state_dict = from_public(read_oft_weights(folder, config), config)
        parts = absent_parts(folder, config, state_dict)
        action_dim, chunk_len = arguments["action_dim"], arguments["action_chunks_len"]
        normalizer = _state_normalizer(config, arguments["unnorm_key"])
        state_dim = 0 if normalizer is None else len(normalizer.low)
        return state_dict | draw_parts(parts, config, action_dim, action_dim * chunk_len, state_dim)


def _state_normalizer(config: OpenVLAOFTConfig, unnorm_key: str | None) -> ActionNormalizer | None:
    """Return the state normaliser, or None without ``use_proprio``."""
    if not config.use_proprio:
        return None
    stats = select_stats(config.norm_stats, unnorm_key)
    if not stats.get("proprio"):
        raise ConfigError(
            f"use_proprio is true, but the statistics of '{unnorm_key or next(iter(config.norm_stats))}' "
            f"contain {', '.join(stats)} but no proprio. Set env.state=proprio if the statistics are the "
            "environment's, otherwise a different model.unnorm_key"
        )
    normalizer = ActionNormalizer(stats["proprio"], bounds=config.action_bounds)
    if config.state_dim not in (None, len(normalizer.low)):
        raise ConfigError(
            f"state_dim is {config.state_dim}, but the statistics of the state have {len(normalizer.low)} dimensions. "
            f"Set model.init_config.state_dim={len(normalizer.low)}"
        )
    return normalizer


def _extended(key_mask: Tensor | None, num_keys: int) -> Tensor | None:
    """Extend a mask ``[B, keys]`` to ``num_keys`` keys; the new ones are not padding."""
    return None if key_mask is None else nn.functional.pad(key_mask, (0, num_keys), value=True)
