"""The checks of ``rlinf diagnose`` on the variants of a policy. ``tests/unit/test_action_diagnostics.py`` shows that each finds its defect."""

from unittest import mock

import torch

from rlinf.contracts import policy as contract
from rlinf.contracts.policy import PolicyChecker
from rlinf.models.embodiment.base import ActionModel
from rlinf.types import Observation

GAP = 1e-5
"""Largest accepted difference of tiny models on a CPU; a tenth of the bound for users."""


@torch.no_grad()
def failed_checks(model: ActionModel, observation: Observation, is_scored: bool = True) -> list[str]:
    """Return the failed checks of a policy on four rows, some of which are padded.

    A row alone equals the row in its batch. If the policy has log-probabilities (``is_scored``), shapes are checked, rollout
    and training agree, and every input and the temperature matter.
    """
    checker = PolicyChecker(model, observation, torch.ones(model.action_dim), 1.3, is_exact=True)
    with mock.patch.object(contract, "MAX_GAP", GAP):
        checks = checker.row_checks(model, "torch")
        if is_scored:
            checks += [checker.type_check(), *checker.parity_checks(model, "torch"), *checker.score_checks()]
    if is_scored:
        checks += checker.input_checks()
    return [f"{check.name}: {check.detail}" for check in checks if check.passed is False]
