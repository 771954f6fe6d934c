"""OpenVLA (Kim et al. 2024) as a policy for reinforcement learning."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutput

from rlinf.distributed.deferred import Weight
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.embodiment.base import Inputs, check_hidden_size
from rlinf.models.embodiment.checkpoint_policy import CheckpointPolicy
from rlinf.models.embodiment.folder_policy import open_safetensors
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer, select_action_stats
from rlinf.models.embodiment.modules.readout_token import KeyframeReadout, ReadoutToken, make_readout
from rlinf.models.embodiment.modules.tokenizer import ActionTokenizer
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.openvla.config import OpenVLAConfig
from rlinf.models.embodiment.openvla.llama_layer import KVCache, run_layers, use_action_layers
from rlinf.models.embodiment.openvla.vision_tower import Projector, VisionBackbone, VisionTower
from rlinf.models.embodiment.openvla.vllm import OpenVLAVllmAdapter
from rlinf.models.embodiment.openvla.weights import from_public, to_public
from rlinf.models.embodiment.token_action_model import PrefixStates, TokenActionModel
from rlinf.models.precision import linear_in_float32
from rlinf.models.sampling import check_finite, draw_uniforms, sample_tokens
from rlinf.types import ActionPrediction, BaseActions, Observation


class OpenVLAForRLActionPrediction(TokenActionModel, CheckpointPolicy):
    """Map images and an instruction to action tokens and, with a value head, a value.

    The sequence is BOS, image tokens, (padding,) prompt, then ``A = action_dim * action_chunks_len`` action tokens
    (autoregressive) or placeholders (parallel). Logits are computed only for the action bins. The value is read at the last
    prompt position (autoregressive) or at the last placeholder (parallel).
    """

    config_class = OpenVLAConfig
    base_model_prefix = "openvla"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["LlamaActionLayer", "DinoBlock", "SiglipBlock"]
    fsdp_wrap_modules: ClassVar[tuple[str, ...]] = ("LlamaActionLayer", "DinoBlock", "SiglipBlock", "Projector")
    lora_target_modules: ClassVar[str] = (
        r"(vision_backbone\..*\.(q_proj|k_proj|v_proj|o_proj|out_proj|fc1|fc2)|projector\.fc\d"
        r"|language_model\.model\.layers\..*_proj)"
    )

    vllm_adapter: ClassVar[type[OpenVLAVllmAdapter]] = OpenVLAVllmAdapter

    def __init__(
        self,
        config: OpenVLAConfig,
        hidden_size: int | None = None,
        unnorm_key: str | None = None,
        action_dim: int = 7,
        action_chunks_len: int = 1,
        value_head: bool = True,
        detach_value: bool = True,
        features: str = "hidden",
    ) -> None:
        super().__init__(config)
        self.check_settings(config, hidden_size=hidden_size, unnorm_key=unnorm_key, action_dim=action_dim)
        width = config.text_config.hidden_size
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        self.detach_value, self.unnorm_key = detach_value, unnorm_key
        self.action_tokenizer, self.action_normalizer = _action_units(config, unnorm_key, action_dim)
        self.vision_backbone = VisionBackbone(config)
        self.projector = Projector(config, self.vision_backbone.embed_dim, self.vision_backbone.grid_size)
        self.language_model = LlamaForCausalLM(config.text_config)
        use_action_layers(self.language_model)
        learned = config.action_decoding == "parallel" and config.learned_placeholders
        self.placeholders = nn.Parameter(torch.zeros(self.num_logprobs, width)) if learned else None
        self.value_head = ValueHead(width) if value_head else None
        self._add_readout_token(features, width, action_dim)
        self._add_modules()
        self.post_init()
        self._freeze()

    @classmethod
    def check_settings(
        cls, config: OpenVLAConfig, *, hidden_size: int | None, unnorm_key: str | None, action_dim: int, **_: object
    ) -> None:
        check_hidden_size(hidden_size, config.text_config.hidden_size)
        config.token_block()
        _action_units(config, unnorm_key, action_dim)

    @classmethod
    def check_cuda_graph(cls, config: OpenVLAConfig, attn_implementation: str) -> None:
        """Accept all attention kernels that do not need row lengths."""
        if attn_implementation == "flash_attention_2":
            raise ConfigError(
                "model.cuda_graph=true with model.attn_implementation=flash_attention_2, which needs the lengths of padded "
                "rows on the CPU; expected a different kernel. Set model.attn_implementation=sdpa, or model.cuda_graph=false"
            )

    def _add_modules(self) -> None:
        """Add a subclass's modules, before random weights are drawn."""

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def num_image_tokens(self) -> int:
        return self.projector.tokens_per_image * self.config.num_images_in_input

    @property
    def min_action(self) -> Any:
        return self.action_normalizer.low

    @property
    def max_action(self) -> Any:
        return self.action_normalizer.high

    @property
    def frozen_modules(self) -> list[str]:
        """Layers after the vision towers' feature layers; they exist in public checkpoints but are never run."""
        towers = [(name, module) for name, module in self.named_modules() if isinstance(module, VisionTower)]
        return [f"{name}.{part}" for name, tower in towers for part in tower.unused]

    @property
    def _value_position(self) -> int:
        """Index of the state from which the value is read, among the states of the action tokens."""
        return -1 if self.config.action_decoding == "parallel" else 0

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.text_config.initializer_range
        if isinstance(module, (ValueHead, KeyframeReadout, ReadoutToken)):
            module.reset_parameters()
        elif isinstance(module, VisionTower):
            for token in (module.pos_embed, getattr(module, "cls_token", None), getattr(module, "reg_token", None)):
                if token is not None:
                    init.normal_(token, std=std)
        elif type(module).__name__ == "Dinov2WithRegistersLayerScale":
            init.ones_(module.lambda1)
        elif module is self:
            if self.placeholders is not None:
                init.normal_(self.placeholders, std=std)
            if self.config.weight_init == "fan_in":
                self._init_weights_by_fan_in()

    def _init_weights_by_fan_in(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith(("value_head.", "readout_token.")):
                init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                init.normal_(module.weight, std=1.0)
            elif isinstance(module, VisionTower):
                init.normal_(module.pos_embed, std=0.1)
        if self.placeholders is not None:
            init.normal_(self.placeholders, std=1.0)
        lm_head = self.language_model.lm_head
        init.normal_(lm_head.weight, std=0.2 * lm_head.in_features**-0.5)

    # -- forward pass --------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Tokenise instructions and send uint8 images to the model's device, where they are resized and normalised."""
        processor = self._ready_processor()
        wanted, device = self.config.num_images_in_input, self.device
        input_ids, attention_mask = processor.encode_instructions(self.instructions(observation))
        pixels = []
        for image in self._camera_images(observation, wanted):
            frames = to_device(torch.from_numpy(image), device).permute(0, 3, 1, 2)
            resize = processor.image_processor.preprocess_tensors
            pixels.append(resize(frames, observation.is_resized, observation.is_cropped))
        # Omit the mask without padding, because inspecting it later on a GPU would synchronise.
        mask = {} if bool(attention_mask.all()) else {"attention_mask": to_device(attention_mask, device)}
        pixel_values = pixels[0] if wanted == 1 else torch.cat(pixels, dim=1)
        return {"input_ids": to_device(input_ids, device), **mask, "pixel_values": pixel_values}

    def resize_images(self, observation: Observation) -> Observation:
        """Resize the images that the policy reads, including JPEG round trip and crop, unless an image would grow."""
        resize = self._ready_processor().image_processor.resize_once
        images = dict(observation.images)
        for name in list(images)[: self.config.num_images_in_input]:
            frames = to_device(torch.from_numpy(images[name]), self.device).permute(0, 3, 1, 2)
            resized = resize(frames)
            if resized is None:
                return observation
            if resized is not frames:
                images[name] = resized.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        return replace(observation, images=images, is_resized=True)

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        lengths = self._ready_processor().prompt_lengths(self.instructions(observation))
        self.check_length(max(lengths) + self.num_image_tokens)
        return lengths

    def _embed_prompt(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **observed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B, 1 + P + L - 1, H]`` and their bool mask, or None without padding."""
        return self._embed_masked(input_ids, _key_mask(attention_mask), **observed)

    def _embed_masked(
        self, input_ids: Tensor, key_mask: Tensor | None, **observed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``_embed_prompt`` for a bool mask, without operations that depend on tensor values."""
        text = self.get_input_embeddings()(input_ids)
        tokens = self._observation_tokens(text, key_mask, **observed)
        self.check_length(text.shape[1] + tokens.shape[1])
        if key_mask is not None:
            key_mask = torch.cat([key_mask[:, :1], key_mask.new_ones(tokens.shape[:2]), key_mask[:, 1:]], dim=1)
        return torch.cat([text[:, :1], tokens, text[:, 1:]], dim=1), key_mask

    def _observation_tokens(self, text: Tensor, key_mask: Tensor | None, pixel_values: Tensor) -> Tensor:
        """Return the embeddings ``[B, P, H]`` of all tokens between BOS and the text, i.e. the image tokens."""
        language = self._language_vector(text, key_mask) if self.config.use_film else None
        return self.projector(self.vision_backbone(pixel_values.to(text.dtype), language))

    def _language_vector(self, text: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return the mean text embedding ``[B, H]``, which FiLM uses to modulate the vision layers."""
        if key_mask is None:
            return text.mean(1)
        weights = key_mask.to(text.dtype)
        return (text * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    def _placeholder_embeddings(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings that follow the prompt in parallel decoding, ``[B, A, H]``."""
        shape = (len(embeddings), self.num_logprobs, embeddings.shape[-1])
        return embeddings.new_zeros(shape) if self.placeholders is None else self.placeholders.expand(shape)

    def _bin_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits for the action bins only, float32 ``[..., n_action_bins]``."""
        first, end = self.action_tokenizer.first_token, self.action_tokenizer.vocab_size
        return linear_in_float32(hidden_states, self.language_model.lm_head.weight[first:end])

    def _score(
        self, inputs: Inputs, tokens: Tensor | None, prefix: list[PrefixStates] | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden_states = self._action_states(inputs, tokens, prefix)
        return self._bin_logits(hidden_states), hidden_states[:, self._value_position]

    def _action_states(self, inputs: Inputs, tokens: Tensor | None, prefix: list[PrefixStates] | None) -> Tensor:
        """Return the hidden states ``[B, A, H]`` from which action tokens are read; for arguments see ``_score``."""
        embeddings, key_mask = self._embed_prompt(**inputs)
        seen: list[Tensor] = []
        if self.config.action_decoding == "parallel":
            hidden_states = self._read_out(embeddings, key_mask, last_inputs=seen)
        else:
            extra = self.get_input_embeddings()(tokens[:, :-1])
            hidden_states = self._run_behind(embeddings, key_mask, extra, last_inputs=seen)
        if prefix is not None:
            prefix.append((self._prefix_states(seen, embeddings), key_mask))
        return hidden_states

    def _prefix_states(self, seen: list[Tensor], embeddings: Tensor) -> Tensor:
        """Return states ``[B, P, H]`` of images and prompt, which are the last layer's normed inputs (``seen``)."""
        return self.language_model.model.norm(seen[0][:, : embeddings.shape[1]])

    def _read_out(self, embeddings: Tensor, key_mask: Tensor | None, **options: Any) -> Tensor:
        """Return the hidden states of the action tokens in parallel decoding, ``[B, A, H]``."""
        return self._run_behind(embeddings, key_mask, self._placeholder_embeddings(embeddings), **options)

    def _behind_prompt(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Inputs, *more: Any, settings: tuple[Any, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Return ``function(embeddings, key_mask, *more, *settings)`` for a prompt, without gradients.

        It runs as a CUDA graph if enabled, so its kernels must not depend on tensor values. ``more`` are further tensors.
        """
        observed = dict(inputs)
        prompt = (observed.pop("input_ids"), _key_mask(observed.pop("attention_mask", None)))

        def run(ids: Tensor, key_mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
            seen = dict(zip(observed, rest, strict=False))
            return function(*self._embed_masked(ids, key_mask, **seen), *rest[len(seen) :])

        if self._graphs is None:
            return run(*prompt, *observed.values(), *more, *settings)
        return self._graphs.run(run, (*prompt, *observed.values(), *more), *settings, weights=self.parameters)

    def _states_to_act(self, inputs: Inputs) -> Tensor:
        return self._behind_prompt(lambda *prompt: (self._read_out(*prompt),), inputs)[0]

    def _run_behind(self, embeddings: Tensor, key_mask: Tensor | None, extra: Tensor, **options: Any) -> Tensor:
        """Run the language model over prompt and ``extra [B, S, H]``; return its last ``A`` positions, ``[B, A, H]``."""
        if key_mask is not None:
            key_mask = torch.cat([key_mask, key_mask.new_ones(extra.shape[:2])], dim=1)
        sequence, is_causal = torch.cat([embeddings, extra], dim=1), self.config.action_decoding == "autoregressive"
        return run_layers(self.language_model.model, sequence, key_mask, self.num_logprobs, is_causal, **options)

    # -- the contract --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
    ) -> ActionPrediction:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
        if self.config.action_decoding == "parallel":
            states = self._states_to_act(inputs)
            logits, value_state = self._bin_logits(states), states[:, self._value_position]
            bins = sample_tokens(logits, do_sample, temperature, uniforms)
        else:
            bins, logits, value_state = self._decode(inputs, do_sample, temperature, uniforms)
        # Skipped when sampling, because the check would wait for the GPU.
        if not do_sample:
            check_finite(logits)
        sequences = torch.cat([input_ids, bins + self.action_tokenizer.first_token], dim=1)
        return ActionPrediction(self.decode_actions(sequences), sequences, logits, self._values(value_state))

    def _decode(
        self, inputs: Inputs, do_sample: bool, temperature: float, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._graphs is not None and do_sample and uniforms is None:
            uniforms = draw_uniforms(len(inputs["input_ids"]), self.num_logprobs, device=self.device)
        drawn = uniforms if do_sample else None
        return self._behind_prompt(self._decode_tokens, inputs, drawn, settings=(do_sample, temperature))

    def _decode_tokens(
        self, embeddings: Tensor, key_mask: Tensor | None, uniforms: Tensor | None, do_sample: bool, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return bins ``[B, A]``, their logits, and the hidden state for the value."""
        cache, key_mask, first = self._prefill(embeddings, key_mask)
        bins, logits, _ = self._continue(cache, key_mask, first, do_sample, temperature, uniforms)
        return bins, logits, first

    def _prefill(
        self, embeddings: Tensor, key_mask: Tensor | None, **options: Any
    ) -> tuple[KVCache, Tensor | None, Tensor]:
        """Return the prompt's cache, a mask that includes future tokens, and the first token's state ``[B, H]``."""
        num_later = self.num_logprobs - 1
        cache = KVCache(embeddings.shape[1] + num_later)
        key_mask = None if key_mask is None else nn.functional.pad(key_mask, (0, num_later), value=True)
        decoder = self.language_model.model
        state = run_layers(decoder, embeddings, key_mask, 1, is_causal=True, cache=cache, **options)[:, -1]
        return cache, key_mask, state

    def _continue(
        self,
        cache: KVCache,
        key_mask: Tensor | None,
        state: Tensor,
        do_sample: bool,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode after a prefilled prompt; return bins ``[B, A]``, their logits, and their states ``[B, A, H]``."""
        bins, logits, states = [], [], [state]
        for i in range(self.num_logprobs):
            if i > 0:
                token = self.get_input_embeddings()(bins[-1][:, None] + self.action_tokenizer.first_token)
                decoder = self.language_model.model
                states.append(run_layers(decoder, token, key_mask, 1, is_causal=True, cache=cache)[:, -1])
            logits.append(self._bin_logits(states[-1]))
            drawn = None if uniforms is None else uniforms[:, i]
            bins.append(sample_tokens(logits[-1], do_sample, temperature, drawn))
        return torch.stack(bins, 1), torch.stack(logits, 1), torch.stack(states, 1)

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        embeddings, key_mask = self._embed_prompt(**inputs)
        seen: list[Tensor] = []
        if self.config.action_decoding == "parallel":
            states = self._read_out(embeddings, key_mask, last_inputs=seen)
            greedy, draw = self._greedy(states), partial(self._sampled, states)
        else:
            prefilled = self._prefill(embeddings, key_mask, last_inputs=seen)
            bins, logits, states = self._continue(*prefilled, do_sample=False)
            check_finite(logits)
            greedy = bins + self.action_tokenizer.first_token
            draw = partial(self._decode_samples, *prefilled, embeddings.shape[1])
        if self.feature_kind == "hidden":
            features = states.flatten(1).float()
        else:
            features = self._prefix_features(self._prefix_states(seen, embeddings), key_mask)

        def sample(uniforms: Tensor) -> Tensor:
            drawn = draw(uniforms)
            return self.decode_actions(drawn.flatten(0, 1)).unflatten(0, drawn.shape[:2])

        return BaseActions(self.decode_actions(greedy).unsqueeze(1), features, sample if samples else None)

    def _greedy(self, states: Tensor) -> Tensor:
        """Return the greedy tokens ``[B, A]`` of parallel decoding."""
        # Not checked, because this would wait for the GPU; damaged weights also cause NaN features.
        return self._bin_logits(states).argmax(-1) + self.action_tokenizer.first_token

    def _sampled(self, states: Tensor, uniforms: Tensor) -> Tensor:
        """Return sampled tokens ``[B, K, A]`` of parallel decoding for ``uniforms [B, K, A]``."""
        logits = self._bin_logits(states).unsqueeze(1).expand(-1, uniforms.shape[1], -1, -1)
        return sample_tokens(logits, True, uniforms=uniforms) + self.action_tokenizer.first_token

    def _decode_samples(
        self, cache: KVCache, key_mask: Tensor | None, first: Tensor, prompt_len: int, uniforms: Tensor
    ) -> Tensor:
        """Like ``_sampled``, but decode token by token after a single prompt of ``prompt_len`` positions."""
        times = uniforms.shape[1]
        key_mask = None if key_mask is None else key_mask.repeat_interleave(times, dim=0)
        cache, first = cache.repeated(times, prompt_len), first.repeat_interleave(times, dim=0)
        bins, _, _ = self._continue(cache, key_mask, first, do_sample=True, uniforms=uniforms.flatten(0, 1))
        return bins.unflatten(0, uniforms.shape[:2]) + self.action_tokenizer.first_token

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        **_: object,
    ) -> CausalLMOutput:
        """Run the language model on BOS, image tokens and right-padded text, as in the public fine-tuning.

        ``labels [B, L]`` are -100 where not scored; ``loss`` is the mean over all scored tokens in the batch. Also return
        ``logits [B, P + L, vocab_size]`` and the last layer's normed ``hidden_states``.
        """
        embeddings, key_mask = self._embed_prompt(input_ids, attention_mask, pixel_values=pixel_values)
        hidden_states = run_layers(self.language_model.model, embeddings, key_mask, None, is_causal=True)
        logits = self.language_model.lm_head(hidden_states)
        loss = None
        if labels is not None:
            image = labels.new_full((len(labels), self.num_image_tokens), -100)
            targets = torch.cat([labels[:, :1], image, labels[:, 1:]], dim=1)[:, 1:]
            scored = logits[:, :-1].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(scored, targets.flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=(hidden_states,))

    # -- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def _read_weights(cls, folder: Path, config: OpenVLAConfig, arguments: dict[str, Any]) -> dict[str, Weight]:
        return from_public(open_safetensors(folder), config)

    @classmethod
    def _new_heads(cls, config: OpenVLAConfig, arguments: dict[str, Any]) -> dict[str, nn.Module | None]:
        width = config.text_config.hidden_size
        return {
            "value_head": ValueHead(width) if arguments["value_head"] else None,
            "readout_token": make_readout(arguments["features"], width, arguments["action_dim"]),
        }

    def _public_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_public(state_dict, self.config)


def _key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Convert a mask to bool, or return None without padding."""
    key_mask = None if attention_mask is None else attention_mask.bool()
    # Kernels are faster without a mask, but on a GPU this check would synchronise.
    if key_mask is not None and key_mask.device.type == "cpu" and bool(key_mask.all()):
        return None
    return key_mask


def _action_units(
    config: OpenVLAConfig, unnorm_key: str | None, action_dim: int
) -> tuple[ActionTokenizer, ActionNormalizer]:
    stats = select_action_stats(config.norm_stats, unnorm_key)
    return (
        ActionTokenizer(config.n_action_bins, config.action_vocab_size, config.action_bin_rule),
        ActionNormalizer(stats, action_dim, config.action_bounds, config.unnormalize_epsilon),
    )
