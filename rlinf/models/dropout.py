"""Dropout of a policy, which must be off: rollout and training would not see the same log-probabilities."""

from __future__ import annotations

from typing import Any

from torch import nn


def switch_off_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout rate of a model to 0, in its modules and in its configuration; returns the model.

    Published configurations of language models may have rates above 0. With them, the ratios of the first update would
    not be 1, although rollout and scoring, which both run in evaluation mode, agree.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear(module)
    _clear_config(model.config)
    return model


def _clear(owner: Any) -> None:
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)


def _clear_config(config: Any) -> None:
    _clear(config)
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):  # the configuration of a part
            _clear_config(value)
