"""The work of token policies and of actors on frozen policies on a GPU that is not there."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig

from rlinf.algorithms import ALGORITHMS
from rlinf.llm import hf_policy
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_model import model_shapes
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.logprobs import has_separable_head
from rlinf.llm.losses import NLLLossFn
from rlinf.models.embodiment.actor_policy import ActorPolicy, make_actor
from rlinf.models.precision import torch_dtype_of
from rlinf.offpolicy.replay import Batch
from tests.fake_gpu.gpu import Counts, FakeGpu
from tests.fake_gpu.runs import ActionRun, make_state

QWEN = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
"""Qwen2.5 1.5B with two layers."""
NEW_TOKENS = 4


class TokenRun:
    """``HuggingFacePolicy`` of a causal language model on a fake GPU, without files of weights.

    Args:
        gpu: The present one.
        settings: Keyword arguments of the policy.
        rows: Of a batch.
        length: Tokens of the longest row.
    """

    def __init__(self, gpu: FakeGpu, settings: dict[str, Any], rows: int = 8, length: int = 256) -> None:
        self.gpu, settings = gpu, {"gradient_checkpointing": False, "micro_batch_size": rows} | settings

        def load(name: str, config: Any, deferred: bool = False) -> Any:
            return gpu.place(model_shapes(name, dtype=torch_dtype_of(config.torch_dtype)).model).eval()

        # Whether packed rows see each other is read off numbers.
        known = mock.patch.multiple(hf_policy, load_causal_lm=load, keeps_sequences_apart=lambda model: True)
        with tempfile.TemporaryDirectory() as folder, known:
            AutoConfig.for_model("qwen2", **QWEN).save_pretrained(folder)
            self.policy = HuggingFacePolicy(
                folder, max_new_tokens=NEW_TOKENS, eos_token_id=[], pad_token_id=0, **settings
            )
        self.policy.model.ignores_left_padding = True  # this, too
        has_separable_head(self.policy.model)  # is asked once
        lengths = torch.linspace(length // 2, length, rows).long()
        mask = torch.arange(length) < lengths.unsqueeze(1)
        self.data = BatchedDataDict(
            {"input_ids": mask * 7, "attention_mask": mask.long(), "token_loss_mask": mask.long()}
        )

    def generate(self) -> Counts:
        """Count the generation of ``NEW_TOKENS`` tokens to each row; the answers to ``bool`` do not end it."""
        model, asked = self.policy.model, []

        def goes_on(finished: Any, *_: Any, **__: Any) -> bool:
            asked.append(bool(finished))
            return len(asked) <= NEW_TOKENS

        with mock.patch.object(model, "_has_unfinished_sequences", goes_on, create=True), self.gpu.count() as counts:
            self.policy.generate(self.data)
        return counts

    def score(self) -> Counts:
        """Count the scoring of the batch."""
        with self.gpu.count() as counts:
            self.policy.get_logprobs(self.data)
        return counts

    def sft_step(self) -> Counts:
        """Count a step of fine-tuning; not the first, which makes the optimiser's state."""
        make_state(self.policy.optimizer)
        self.policy._train_step.num_steps = 1  # the first step adds up the weights
        with self.gpu.count() as counts:
            self.policy.train(self.data, NLLLossFn())
        return counts


class HeadRun:
    """An actor on a frozen policy, and its learner, on a fake GPU.

    Args:
        gpu: The present one.
        words: Overrides of an off-policy algorithm.
        rows: Envs.
    """

    def __init__(self, gpu: FakeGpu, words: list[str], rows: int) -> None:
        self.gpu, self.base = gpu, ActionRun(gpu, words, rows)
        config, model = self.base.config.algorithm, self.base.model
        learner = ALGORITHMS.get(config.name)
        actor = make_actor(config.actor, model.feature_dim, model, learner.noise_std(config))
        bound = torch.ones(model.action_dim)
        self.policy = ActorPolicy(model, actor, -bound, bound).eval()
        self.learner = learner(config, actor, 0)
        observation = self.base.collector.worker_threads[0].env.reset()[0]
        self.observation = self.policy.resize_images(observation)

    def policy_call(self) -> Counts:
        """Count a call of the policy with its actor."""
        uniforms = torch.rand(len(self.observation), self.policy.num_uniforms)
        with self.gpu.count() as counts:
            inputs = self.policy.preprocess(self.observation)
            self.policy.predict_action_batch(uniforms=uniforms, **inputs).actions.cpu()
        return counts

    def update(self) -> Counts:
        """Count an update of critics and actor; not the first, which makes the optimisers' state."""
        size, actor = self.base.config.algorithm.batch_size, self.policy.actor
        shapes = {
            "features": (actor.feature_dim,), "base": (actor.num_candidates, actor.base_dim), "actions": (actor.output_dim,),
            "returns": (), "discounts": (), "next_features": (actor.feature_dim,),
            "next_base": (actor.num_candidates, actor.base_dim),
        }  # fmt: skip
        batch = Batch(**{name: torch.zeros(size, *shape) for name, shape in shapes.items()})
        for _ in range(2):
            with self.gpu.count() as counts:
                self.learner.update(batch)
        return counts
