"""A token policy on two processes takes the step of one."""

from __future__ import annotations

import pytest
import torch

from rlinf.algorithms import NLLLossFn
from rlinf.distributed.process_group import launch
from rlinf.errors import ConfigError
from rlinf.models import HuggingFacePolicy


def train_one_rank(arguments) -> None:
    import torch.distributed as dist

    folder, batch, output = arguments
    rank = dist.get_rank()
    policy = HuggingFacePolicy(folder, learning_rate=1e-3)
    rows = batch.slice(0, 3) if rank == 0 else batch.slice(3, 4)
    metrics = policy.train(rows, NLLLossFn())
    with pytest.raises(ConfigError, match="no TokenLoss.*2 ranks"):
        policy.train(rows, lambda model, data: model(input_ids=data["input_ids"]).logits.sum())
    torch.save((metrics, policy.model.state_dict()), f"{output}/{rank}.pt")


def test_two_uneven_ranks_are_one_batch(tiny_lm, prompts, tmp_path):
    launch(train_one_rank, (tiny_lm(), prompts, str(tmp_path)), 2, "cpu")
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-3)
    metrics = policy.train(prompts, NLLLossFn())
    own = policy.model.state_dict()
    for rank in range(2):
        rank_metrics, state = torch.load(tmp_path / f"{rank}.pt")
        assert rank_metrics == pytest.approx(metrics, rel=1e-5)
        assert max(float((own[name] - state[name]).abs().max()) for name in own) < 1e-5
