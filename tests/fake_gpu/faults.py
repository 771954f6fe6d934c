"""Faults that the budgets must notice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from rlinf.models.embodiment.pi0.policy import Pi0ForRLActionPrediction as Policy
from rlinf.optim.master_adamw import MasterAdamW
from tests.fake_gpu.runs import count

kept: list[Any] = []


def _reads_a_number() -> AbstractContextManager:
    score = Policy.evaluate_actions

    def evaluate_actions(self: Any, *args: Any, **options: Any) -> Any:
        result = score(self, *args, **options)
        assert result.values.mean().item() == 1
        return result

    return mock.patch.object(Policy, "evaluate_actions", evaluate_actions)


def _copies_to_the_cpu() -> AbstractContextManager:
    score = Policy.evaluate_actions

    def evaluate_actions(self: Any, *args: Any, **options: Any) -> Any:
        result = score(self, *args, **options)
        result.entropy.detach().cpu()
        return result

    return mock.patch.object(Policy, "evaluate_actions", evaluate_actions)


def _keeps_gradients() -> AbstractContextManager:
    """A buffer that is not written in place: each micro-batch has sums of its own."""
    gather = MasterAdamW.gather_gradients

    def gather_gradients(self: MasterAdamW) -> None:
        kept.extend(master.grad.clone() for master in self.masters if master.grad is not None)
        gather(self)

    return mock.patch.object(MasterAdamW, "gather_gradients", gather_gradients)


def _steps_one_by_one() -> AbstractContextManager:
    step = MasterAdamW.step

    @torch.no_grad()
    def one_by_one(self: MasterAdamW, closure: None = None) -> None:
        for master in self.masters:
            if master.grad is not None:
                master.grad.mul_(1.0)
        step(self)

    return mock.patch.object(MasterAdamW, "step", one_by_one)


FAULTS = {
    "reads a number": _reads_a_number,
    "copies to the CPU": _copies_to_the_cpu,
    "keeps gradients": _keeps_gradients,
    "steps one by one": _steps_one_by_one,
}


def count_with(fault: str) -> dict[str, Any]:
    """Return the counts of an update of pi0 with a fault."""
    with FAULTS[fault]():
        try:
            return count("pi0, action expert", ("policy_call", "update"))["update"]
        finally:
            kept.clear()
