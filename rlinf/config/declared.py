"""The model's own configuration, read before the model is built, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf import models
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.errors import RLinfError
from rlinf.run_folder import MODEL_FOLDER

if TYPE_CHECKING:
    from rlinf.config.schema import RunConfig


def declared_policy(config: RunConfig) -> tuple[Any, Any] | None:
    """Return the policy's class and its own configuration: of the checkpoint whose weights are taken, else of the model section.

    Return None if that configuration is not on this machine.
    """
    source = config.checkpoint or config.init_from
    if source is not None:
        checkpoint = resolve_checkpoint(source)
        for folder in (checkpoint / MODEL_FOLDER, checkpoint):  # adapters lie on the model of the section
            if (folder / "config.json").is_file():
                return models.local_settings(config.model, folder)
    return models.local_settings(config.model)


def cameras_read(config: RunConfig) -> list[str]:
    """Return the usual cameras of the env, as many as the model reads; all of them for a dataset of the expert."""
    try:
        usual = config.env.default_cameras()
    except RLinfError:  # there is no such env, which `validate` reports
        return []
    if config.dataset is not None and config.checkpoint is None:
        return usual
    try:
        found = declared_policy(config)
    except RLinfError:  # there is no such model or folder, which `validate` reports
        return usual
    wanted = None if found is None else found[0].num_cameras(found[1])
    return usual[:wanted] if isinstance(wanted, int) else usual  # ``validate`` reports another type
