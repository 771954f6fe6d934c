"""What the configuration of the model itself declares, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf.checkpoints.checkpoint import resolve_checkpoint
from rlinf.errors import RLinfError
from rlinf.models import declared_value

if TYPE_CHECKING:
    from rlinf.config.schema import RunConfig


def declared(config: RunConfig, field: str) -> Any:
    """A field of the model's own configuration: of the checkpoint whose weights are taken, else of the model section."""
    source = config.checkpoint or config.init_from
    if source is not None:
        checkpoint = resolve_checkpoint(source)
        for folder in (checkpoint / "model", checkpoint):  # Adapters have none, and lie on the model of the section.
            if (folder / "config.json").is_file():
                return declared_value(config.model, field, folder)
    return declared_value(config.model, field)


def cameras_read(config: RunConfig) -> list[str]:
    """Return the usual cameras of the env, as many as the model reads; all of them for a dataset of the expert."""
    usual = type(config.env)().cameras
    if config.dataset is not None and config.checkpoint is None:
        return usual
    try:
        wanted = declared(config, "num_images_in_input")
    except RLinfError:  # there is no such model or folder, which `validate` reports
        return usual
    return usual if wanted is None else usual[:wanted]
