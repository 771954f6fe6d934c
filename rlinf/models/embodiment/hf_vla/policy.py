"""Use any Hugging Face image-text-to-text model as a policy, with a range of its vocabulary as action bins."""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlinf.distributed.transfers import to_device
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.base import Inputs, check_hidden_size
from rlinf.models.embodiment.checkpoint_policy import no_progress_bars
from rlinf.models.embodiment.folder_policy import reject_adapters
from rlinf.models.embodiment.hf_vla.config import HfVlaConfig
from rlinf.models.embodiment.modules.normalizer import ActionNormalizer
from rlinf.models.embodiment.modules.readout_token import READOUT_FILE, KeyframeReadout, ReadoutToken
from rlinf.models.embodiment.modules.tokenizer import ActionTokenizer
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.token_action_model import PrefixStates, TokenActionModel
from rlinf.models.loading import check_fit, checkpoint_folder, without_load_report
from rlinf.models.norms import fuse_norms
from rlinf.models.precision import linear_in_float32
from rlinf.models.sampling import check_finite, sample_tokens
from rlinf.types import ActionPrediction, BaseActions, Observation

VALUE_HEAD_FILE = "value_head.safetensors"
ACTOR_FILES = {"value_head": VALUE_HEAD_FILE, "readout_token": READOUT_FILE}
"""Additional modules, and the files that store them next to the VLM's."""


class ActionRows(nn.Linear):
    """An output head with unchanged parameters that computes only the rows of the action tokens."""

    first_row: int
    end_row: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[..., H]`` to float32 ``[..., n_action_bins]``."""
        bias = None if self.bias is None else self.bias[self.first_row : self.end_row]
        return linear_in_float32(hidden_states, self.weight[self.first_row : self.end_row], bias)


class HfVlaForRLActionPrediction(TokenActionModel, PreTrainedModel):
    """Map images and an instruction to action tokens, one at a time, and to a value read at the end of the prompt."""

    config_class = HfVlaConfig
    base_model_prefix = "hf_vla"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: HfVlaConfig,
        hidden_size: int | None = None,
        unnorm_key: str | None = None,
        action_dim: int = 7,
        action_chunks_len: int = 1,
        value_head: bool = True,
        detach_value: bool = True,
        features: str = "hidden",
    ) -> None:
        super().__init__(config)
        width = config.text_config.hidden_size
        check_hidden_size(hidden_size, width)
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        self.detach_value, self.unnorm_key = detach_value, unnorm_key
        self.action_tokenizer = ActionTokenizer(config.n_action_bins, config.action_tokens_end, config.action_bin_rule)
        self.action_normalizer = ActionNormalizer(self.get_action_stats(unnorm_key), action_dim)
        self._take_vlm(config.vlm_class()(config.vlm_config))
        fuse_norms(self)
        self.value_head = ValueHead(width) if value_head else None
        self._add_readout_token(features, width, action_dim)
        self.post_init()
        # transformers does not call _init_weights for our modules that have no direct parameters.
        if config.weight_init == "fan_in":
            self._init_weights_by_fan_in()

    def _take_vlm(self, vlm: PreTrainedModel) -> None:
        """Use ``vlm``, limiting its output head to the rows of the action tokens."""
        self.vlm = vlm
        head = vlm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ConfigError(
                f"The output head of {type(vlm).__name__} is a {type(head).__name__}; model=hf_vla needs a linear layer. "
                "Set model.model_path=<folder of a different VLM>"
            )
        head.__class__ = ActionRows
        head.first_row, head.end_row = self.action_tokenizer.first_token, self.action_tokenizer.vocab_size

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def fsdp_wrap_modules(self) -> tuple[str, ...]:
        """Class names of the VLM's transformer layers, including the vision tower's."""
        layers = [module for module in self.vlm.modules() if isinstance(module, GradientCheckpointingLayer)]
        return tuple(sorted({type(layer).__name__ for layer in layers}))

    @property
    def lora_target_modules(self) -> str:
        """A regular expression for all linear layers of the VLM except the output head."""
        linear = [name for name, module in self.vlm.named_modules() if type(module) is nn.Linear]
        # Use one pattern for all layers of a stack to keep the expression short.
        patterns = {re.sub(r"\.\d+\\\.", r".\\d+\\.", re.escape(name)) for name in linear}
        return rf"vlm\.({'|'.join(sorted(patterns))})"

    def get_input_embeddings(self) -> nn.Module:
        return self.vlm.get_input_embeddings()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (ValueHead, ReadoutToken, KeyframeReadout)):
            module.reset_parameters()

    @torch.no_grad()
    def _init_weights_by_fan_in(self) -> None:
        for module in self.vlm.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                scale = 0.2 if isinstance(module, ActionRows) else 1.0
                init.normal_(module.weight, std=scale * module.weight[0].numel() ** -0.5)
            elif isinstance(module, nn.Embedding):
                init.normal_(module.weight, std=1.0)
        # Several model families initialise image position embeddings at zero, so patches could not be distinguished.
        for name, parameter in self.vlm.named_parameters():
            if name.endswith("position_embeddings"):
                init.normal_(parameter, std=1.0)

    # -- forward pass --------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Run the VLM's processor on each row, with all cameras in the observation."""
        inputs = self._ready_processor()(replace(observation, instruction=self.instructions(observation)))
        self.check_length(inputs["input_ids"].shape[1])
        return {name: to_device(tensor, self.device) for name, tensor in inputs.items()}

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        prompts = replace(observation, instruction=self.instructions(observation))
        lengths = self._ready_processor().prompt_lengths(prompts)
        # `preprocess` also counts image tokens.
        self.check_length(max(lengths))
        return lengths

    def _start(self, input_ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the initial keyword arguments for the VLM's ``generate``, with images in the dtype of its weights."""
        dtype = self.get_input_embeddings().weight.dtype
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        positions = self.vlm._prepare_position_ids_for_generation(input_ids, {"input_ids": input_ids, **inputs})
        return {**inputs, "position_ids": positions}

    def _run(self, input_ids: Tensor, inputs: dict[str, Any], num_last: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return bin logits ``[B, num_last, n_bins]`` at the last positions, and hidden states ``[B, S, H]``."""
        prepared = self.vlm.prepare_inputs_for_generation(input_ids, **inputs, **kwargs)
        outputs = self.vlm(**prepared, logits_to_keep=num_last, output_hidden_states=True, return_dict=True)
        return outputs.logits[:, -num_last:], outputs.hidden_states[-1]

    def _score(self, inputs: Inputs, tokens: Tensor, prefix: list[PrefixStates] | None = None) -> tuple[Tensor, Tensor]:
        rest = dict(inputs)
        prompt = rest.pop("input_ids")
        rest = self._start(prompt, rest)
        for _ in range(self.num_logprobs - 1):
            rest = self.vlm._update_model_kwargs_for_generation({}, rest)
        sequence = torch.cat([prompt, tokens[:, :-1]], dim=1)
        logits, hidden_states = self._run(sequence, rest, self.num_logprobs, use_cache=False, is_first_iteration=True)
        if prefix is not None:
            prefix.append((hidden_states[:, : prompt.shape[1]], _bool_mask(inputs)))
        return logits, hidden_states[:, prompt.shape[1] - 1]

    # -- the contract --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_action_batch(
        self,
        input_ids: Tensor | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
        **inputs: Tensor,
    ) -> ActionPrediction:
        rest, cache, logits, hidden_states = self._prefill(input_ids, inputs)
        first = (logits, hidden_states[:, -1])
        sequences, logits, _ = self._continue(input_ids, rest, cache, first, do_sample, temperature, uniforms)
        if not do_sample:
            check_finite(logits)
        return ActionPrediction(self.decode_actions(sequences), sequences, logits, self._values(first[1]))

    def _prefill(self, input_ids: Tensor, inputs: Inputs) -> tuple[dict[str, Any], DynamicCache, Tensor, Tensor]:
        """Run the prompts; return the next arguments, cache, first logits ``[B, n_bins]`` and all states ``[B, S, H]``."""
        rest, cache = self._start(input_ids, inputs), DynamicCache(config=self.vlm.config.get_text_config(decoder=True))
        kwargs = {"use_cache": True, "past_key_values": cache, "is_first_iteration": True}
        logits, hidden_states = self._run(input_ids, rest, 1, **kwargs)
        return rest, cache, logits[:, 0], hidden_states

    def _continue(
        self,
        sequences: Tensor,
        rest: dict[str, Any],
        cache: DynamicCache,
        first: tuple[Tensor, Tensor],
        do_sample: bool,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode after the prompts, given the first token's logits and state ``[B, H]``.

        Return sequences ``[B, L + A]``, and each token's logits ``[B, A, n_bins]`` and states ``[B, A, H]``.
        """
        # Copied, because the hook below changes the arguments in place.
        all_logits, states, rest = [first[0]], [first[1]], dict(rest)
        kwargs = {"use_cache": True, "past_key_values": cache, "next_sequence_length": 1, "is_first_iteration": False}
        for i in range(self.num_logprobs):
            if i > 0:
                rest = self.vlm._update_model_kwargs_for_generation({}, rest)
                logits, hidden_states = self._run(sequences, rest, 1, **kwargs)
                all_logits.append(logits[:, 0])
                states.append(hidden_states[:, -1])
            bins = sample_tokens(all_logits[-1], do_sample, temperature, None if uniforms is None else uniforms[:, i])
            sequences = torch.cat([sequences, bins[:, None] + self.action_tokenizer.first_token], dim=1)
        return sequences, torch.stack(all_logits, 1), torch.stack(states, 1)

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        observed = dict(inputs)
        prompt = observed.pop("input_ids")
        rest, cache, logits, prefix = self._prefill(prompt, observed)
        first, prompt_cache = (logits, prefix[:, -1]), copy.deepcopy(cache) if samples else None
        sequences, drawn_from, states = self._continue(prompt, rest, cache, first, do_sample=False)
        check_finite(drawn_from)
        if self.feature_kind == "hidden":
            features = states.flatten(1).float()
        else:
            features = self._prefix_features(prefix, _bool_mask(inputs))

        def sample(uniforms: Tensor) -> Tensor:
            times, repeated = uniforms.shape[1], copy.deepcopy(prompt_cache)
            repeated.batch_repeat_interleave(times)
            prompts, expanded = self.vlm._expand_inputs_for_generation(times, input_ids=prompt, **rest)
            start = tuple(tensor.repeat_interleave(times, dim=0) for tensor in first)
            drawn, _, _ = self._continue(prompts, expanded, repeated, start, True, uniforms=uniforms.flatten(0, 1))
            return self.decode_actions(drawn).unflatten(0, uniforms.shape[:2])

        return BaseActions(self.decode_actions(sequences).unsqueeze(1), features, sample if samples else None)

    # -- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any
    ) -> HfVlaForRLActionPrediction:
        """Load a VLM's folder or hub id, or a folder saved by rlinf (the same format plus ``value_head.safetensors``)."""
        folder = checkpoint_folder(pretrained_model_name_or_path)
        config = kwargs.pop("config", None)
        if not isinstance(config, HfVlaConfig):
            config = HfVlaConfig.from_pretrained(config or folder)
        loading = {name: kwargs.pop(name) for name in ("attn_implementation", "low_cpu_mem_usage") if name in kwargs}
        # Weights that do not fit are rejected below.
        loading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loading["dtype"] = kwargs.pop("torch_dtype", kwargs.pop("dtype", torch.float32))
        # All classes come from transformers, so there is no remote code.
        kwargs.pop("trust_remote_code", None)
        # Run the constructor first, so that invalid settings are rejected before weights are read.
        with torch.device("meta"), init.no_init_weights():
            model = cls(config, *args, **kwargs)
        try:
            with no_progress_bars(), without_load_report():
                vlm, info = config.vlm_class().from_pretrained(folder, config=config.vlm_config, **loading)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"The weights of '{folder}' cannot be read: {error}. Set model.model_path=<complete checkpoint folder>"
            ) from error
        unused = set(info["unexpected_keys"]) - {name for name, _ in vlm.named_buffers()}
        check_fit(folder, {**info, "unexpected_keys": unused})
        model._take_vlm(vlm)
        for name, file in ACTOR_FILES.items():
            head = getattr(model, name)
            if head is not None:
                head.to_empty(device="cpu").reset_parameters()
                if (folder / file).is_file():
                    saved, expected = load_file(folder / file), head.state_dict()
                    wrong = [key for key in expected if key in saved and saved[key].shape != expected[key].shape]
                    keys = {
                        "missing_keys": expected.keys() - saved.keys(),
                        "unexpected_keys": saved.keys() - expected.keys(),
                    }
                    check_fit(folder, keys | {"mismatched_keys": wrong})
                    head.load_state_dict(saved)
        return model.eval()

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        reject_adapters(state)
        folder = Path(folder)
        tied = getattr(self.vlm, "all_tied_weights_keys", {})
        weights = {name: tensor for name, tensor in _part(state, "vlm.").items() if name not in tied}
        with no_progress_bars():
            self.vlm.save_pretrained(folder, state_dict=weights, **kwargs)
        self.config.save_pretrained(folder)
        for name, file in ACTOR_FILES.items():
            if getattr(self, name) is not None:
                head = _part(state, f"{name}.")
                tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in head.items()}
                save_file(tensors, folder / file, metadata={"format": "pt"})
        if self.processor is not None:
            self.processor.save_pretrained(folder)


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _bool_mask(inputs: Inputs) -> Tensor | None:
    mask = inputs.get("attention_mask")
    return None if mask is None else mask.bool()
