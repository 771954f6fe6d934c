"""Base class of policies built from transformers modules; checkpoints that do not fit exactly are rejected."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.folder_policy import FolderPolicy
from rlinf.models.loading import without_load_report


class CheckpointPolicy(FolderPolicy, PreTrainedModel):
    """A ``FolderPolicy`` that is also a ``PreTrainedModel``."""

    @classmethod
    def _with_weights(cls, config: Any, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        with no_progress_bars(), without_load_report():
            return super(ActionModel, cls).from_pretrained(
                None,
                *args,
                config=config,
                state_dict=state_dict,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # ``check_fit`` reports these together with all other mismatches
                **kwargs,
            )

    def _write(self, folder: str | Path, state_dict: dict[str, Tensor], **kwargs: Any) -> None:
        with no_progress_bars():
            super(ActionModel, self).save_pretrained(folder, state_dict=state_dict, **kwargs)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars (one per file) within the context."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
