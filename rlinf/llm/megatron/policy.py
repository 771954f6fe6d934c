"""Policy based on Megatron-core with tensor, sequence, pipeline and data parallelism. Megatron is needed only to construct it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from rlinf.distributed.transfers import fetch
from rlinf.errors import ConfigError, import_extra
from rlinf.llm.batch_checks import verify_text_only
from rlinf.llm.batched_data_dict import BatchedDataDict, tokens_and_mask
from rlinf.llm.generation_interface import GenerationDatumSpec, GenerationOutputSpec
from rlinf.llm.hf_generation import generate_tokens, reject_other_names
from rlinf.llm.hf_model import HFModel, load_config
from rlinf.llm.losses import TokenLoss
from rlinf.llm.megatron.groups import MegatronGroups, check_device, check_ranks, device_of_this_rank
from rlinf.llm.megatron.weights import (
    build_gpt,
    check_family,
    is_replicated,
    load_weights,
    needs_tensor_parallel_sum,
    source_names,
    unshard,
)
from rlinf.llm.policy_interface import LogprobsSpec, LossFunction
from rlinf.llm.token_policy import TokenPolicy, TokenPolicyConfig, check_trainable
from rlinf.models.precision import torch_dtype_of
from rlinf.optim.train_step import Totals
from rlinf.options import from_mapping, option


@dataclass
class MegatronPolicyConfig(TokenPolicyConfig):
    """Keyword arguments for ``MegatronPolicy``."""

    tensor_model_parallel_size: int = option(1, "Number of ranks that split each layer.", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Number of pipeline stages.", minimum=1)
    sequence_parallel: bool = option(False, "Split norms and residuals along the sequence (needs tensor parallelism).")
    use_flash_attention: bool = option(False, "Require the flash attention kernel (needs a GPU and bfloat16).")
    torch_dtype: Any = option("float32", "Dtype for the weights: float32 or bfloat16.")
    tokenizer: Any = option(None, "Tokenizer to supply padding and end tokens that the model lacks.")


class MegatronPolicy(TokenPolicy):
    """Policy based on a Megatron-core ``GPTModel`` with weights from a llama-like transformers checkpoint.

    Without a ``torch.distributed`` process group, the policy creates one of size 1. All ranks of one model (tensor and pipeline
    parallel) must call every method with equal rows, and receive equal results. Data-parallel ranks call ``train`` with their own rows;
    gradients and counts are summed over them. The loss must be a ``TokenLoss``.

    ``generate`` recomputes the complete row for each token, so use it only for checks; for speed, load ``public_state_dict()`` into a
    generation backend. Raises ConfigError if a keyword is unknown or contradicts a different keyword, the ranks, the device or the
    checkpoint, and MissingDependencyError if megatron-core is not installed.

    Args:
        model_name: Folder or hub id of a transformers checkpoint (``rlinf.llm.megatron.weights.FAMILIES``).
        **kwargs: Fields of ``MegatronPolicyConfig``.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        reject_other_names(kwargs)
        self.config = config = from_mapping(MegatronPolicyConfig, kwargs)
        check_trainable(config)
        self._dtype = torch_dtype_of(config.torch_dtype)
        if config.sequence_parallel and config.tensor_model_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel=True with tensor_model_parallel_size=1; expected at least 2. Pass sequence_parallel=False"
            )
        import_extra("megatron", "MegatronPolicy", "megatron", f". Or use HuggingFacePolicy('{model_name}')")
        check_ranks(config)
        self.device = device_of_this_rank()
        check_device(config, self.device)
        self.model_name, self.temperature = model_name, config.temperature
        self._hf_config = load_config(model_name)
        check_family(self._hf_config, config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
        self._groups = MegatronGroups(config, self.device)
        self._causal_lm = self._load_causal_lm()
        self.model = self._causal_lm.model
        self._init_training(self._hf_config, self._groups.data.rank(), norm_of=self._grad_norm)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate one completion per row; ``logprobs`` equal ``get_logprobs`` of the output."""
        verify_text_only(data, "MegatronPolicy", "HuggingFacePolicy")
        return generate_tokens(self._causal_lm, data, self.config, greedy, self._random, self.config.tokenizer)

    @torch.no_grad()
    def public_state_dict(self) -> dict[str, Tensor]:
        """Return all weights on the CPU under their checkpoint names; all ranks must call this."""
        local = {}
        for name, parameter in self.model.named_parameters():
            sources = source_names(name, self._first_layer(self.model))
            local |= zip(
                sources, (t.cpu() for t in unshard(name, self._gather(parameter), self._hf_config)), strict=True
            )
        stages: list[Any] = [None] * self._groups.num_stages
        dist.all_gather_object(stages, local, group=self._groups.pipeline)
        return {name: tensor for stage in stages for name, tensor in stage.items()}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that transformers can load. All ranks must call this; rank 0 writes."""
        weights = self.public_state_dict()
        if dist.get_rank() == 0:
            model = HFModel.from_config(self._hf_config, dtype=self._dtype, meta=True)
            model.save_pretrained(folder, {f"model.{name}": tensor for name, tensor in weights.items()})
        dist.barrier()

    def _load_causal_lm(self) -> _CausalLM:
        loaded = HFModel.from_pretrained(self.model_name, config=self._hf_config, dtype=self._dtype).model
        weights = loaded.state_dict()
        model = build_gpt(self._hf_config, set(weights), loaded.model.rotary_emb, self._dtype, self.config)
        tensor = self._groups.tensor
        load_weights(model, weights, self._hf_config, self._first_layer(model), tensor.rank(), tensor.size())
        return _CausalLM(model.to(self.device).eval(), loaded, self._next_token_logits)

    def _load(self) -> nn.Module:
        return self._load_causal_lm().model

    def _first_layer(self, model: nn.Module) -> int:
        return len(model.decoder.layers) * self._groups.stage

    def _check_loss(self, loss_fn: LossFunction) -> None:
        if not isinstance(loss_fn, TokenLoss):
            raise ConfigError(f"{loss_fn} is not a TokenLoss, which MegatronPolicy needs. Use HuggingFacePolicy")
        super()._check_loss(loss_fn)

    def _sum_values(self, values: list[float]) -> list[float]:
        return self._groups.sum(values, self._groups.data)

    def _accumulate(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        counts, parts = self._prepare(data, loss_fn)
        totals, results = Totals(), []
        # Run one micro-batch per stage at a time, so that all stages are busy.
        for start in range(0, len(parts), self._groups.num_stages):
            passes = []
            for part in parts[start : start + self._groups.num_stages]:
                received, output = self._forward(self.model, part)
                if self._groups.is_last:
                    loss = loss_fn.from_logprobs(self._token_logprobs(output, part), part, counts)
                    output = loss.loss
                    results.append({**loss.metrics, "loss": loss.loss.detach()})
                passes.append((received, output))
            for received, output in passes:
                self._backward(received, output)
                self._optimizer.gather_gradients()
        self._sum_gradients()
        totals.add(results)
        return {**self._groups.from_last_stage(totals.over_ranks(self._sum_values)), "num_tokens": counts.tokens}

    def _forward(self, model: nn.Module, data: BatchedDataDict) -> tuple[Tensor | None, Tensor]:
        """Run this rank's layers.

        Return the previous stage's output (None on the first stage) and this stage's, on the last stage logits ``[B, W, V / ranks]``.
        """
        ids, mask = tokens_and_mask(data)
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        width = math.ceil(int(mask.sum(-1).max()) / shards) * shards
        ids = F.pad(ids[:, :width], (0, max(0, width - ids.shape[1]))).to(self.device)
        received = None
        if not self._groups.is_first:
            shape = (width // shards, len(ids), self._hf_config.hidden_size)
            received = torch.empty(shape, dtype=self._dtype, device=self.device)
            dist.recv(received, self._groups.previous)
            model.set_input_tensor(received.requires_grad_(torch.is_grad_enabled()))
        positions = torch.arange(width, device=self.device).expand_as(ids)
        output = model(ids, positions, attention_mask=None)
        if not self._groups.is_last:
            dist.send(output.detach().contiguous(), self._groups.next)
        return received, output

    def _backward(self, received: Tensor | None, output: Tensor) -> None:
        gradient = None
        if not self._groups.is_last:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self._groups.next)
        output.backward(gradient)
        if received is not None:
            dist.send(received.grad, self._groups.previous)

    def _token_logprobs(self, logits: Tensor, data: BatchedDataDict) -> Tensor:
        """Return log-probabilities float32 ``[B, S]`` as ``token_logprobs`` does, but without gathering the vocabulary over ranks."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        ids, mask = (tensor.to(self.device) for tensor in tokens_and_mask(data))
        predicted = mask.clone()
        predicted[:, 0] = False
        rows, columns = predicted.nonzero(as_tuple=True)
        scaled = logits[rows, columns - 1].float() / self.temperature
        logprobs = -vocab_parallel_cross_entropy(scaled, ids[predicted])
        return torch.zeros(ids.shape, device=self.device).masked_scatter(predicted, logprobs)

    def _logprobs(self, model: nn.Module, data: BatchedDataDict) -> Tensor:
        """Return log-probabilities on the last stage, and zeros on all remaining stages, which ``_score`` replaces at its end."""
        _, output = self._forward(model, data)
        if self._groups.is_last:
            return self._token_logprobs(output, data)
        return torch.zeros(tokens_and_mask(data)[0].shape)

    def _score(self, model: nn.Module, data: BatchedDataDict) -> BatchedDataDict[LogprobsSpec]:
        scored = super()._score(model, data)["logprobs"]
        logprobs = scored.to(self.device)
        self._groups.broadcast_from_last_stage(logprobs)
        return BatchedDataDict({"logprobs": logprobs.to(scored.device)})

    def _next_token_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the next-token logits ``[B, V]`` of right-padded rows on every rank."""
        logits = torch.empty(len(ids), self._hf_config.vocab_size, dtype=self._dtype, device=self.device)
        data = BatchedDataDict({"input_ids": ids, "attention_mask": mask})
        for rows in self._micro_batches(data, rows_per_sample=1):
            part = data.select_indices(rows)
            _, output = self._forward(self.model, part)
            if self._groups.is_last:
                last = output[torch.arange(len(rows)), part["attention_mask"].sum(-1) - 1]
                logits[rows] = torch.cat(self._gather(last), -1)
        self._groups.broadcast_from_last_stage(logits)
        return logits

    def _micro_batches(self, data: BatchedDataDict, rows_per_sample: int) -> list[list[int]]:
        verify_text_only(data, "MegatronPolicy", "HuggingFacePolicy")
        return super()._micro_batches(data, rows_per_sample)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._groups.tensor.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self._groups.tensor)
        return parts

    def _sum_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            master = self._optimizer.master_of(parameter)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if needs_tensor_parallel_sum(name, self.config.sequence_parallel):
                dist.all_reduce(master.grad, group=self._groups.tensor)
            dist.all_reduce(master.grad, group=self._groups.data)

    def _grad_norm(self, masters: list[nn.Parameter]) -> Tensor:
        """Return the complete model's gradient norm in float64, including replicated tensors only once."""
        names = [name for name, _ in self.model.named_parameters()]
        is_first = self._groups.tensor.rank() == 0
        counted = [p for name, p in zip(names, masters, strict=True) if is_first or not is_replicated(name)]
        total = sum(fetch([master.grad.square().sum() for master in counted]))
        return torch.tensor(self._groups.sum([total], self._groups.model)[0], dtype=torch.float64).sqrt()


class _CausalLM(PreTrainedModel, GenerationMixin):
    """Adapts a ``GPTModel`` to transformers' ``generate``, which passes left-padded rows and expects next-token logits."""

    _supports_sdpa = True
    ignores_left_padding = True

    def __init__(self, model: nn.Module, loaded: Any, next_token_logits: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(loaded.config)
        self.model = model
        self.generation_config = loaded.generation_config
        self._next_token_logits = next_token_logits

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> dict:
        """Return the inputs unchanged, because the model has no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> CausalLMOutput:
        """Return logits ``[B, 1, V]``; no mask means no padding."""
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        right = torch.arange(mask.shape[1], device=mask.device) < mask.sum(-1, keepdim=True)
        ids = torch.zeros_like(input_ids).masked_scatter(right, input_ids[mask])
        return CausalLMOutput(logits=self._next_token_logits(ids, right).unsqueeze(1))
