"""Base classes of small PyTorch policies, which avoid the slow import of transformers."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rlinf.files import write_text
from rlinf.models.embodiment.folder_policy import FolderPolicy, write_safetensors
from rlinf.models.loading import read_json
from rlinf.models.precision import torch_dtype_of
from rlinf.types import Statistics

CONFIG_FILE = "config.json"


@dataclass
class PlainConfig:
    """A configuration stored in ``PreTrainedConfig``'s ``config.json`` format, which the Auto classes can also read.

    Args:
        norm_stats: Action statistics by data set name.
        architectures: Name of the policy class, set in saved folders.
        dtype: Number format of the weights outside ``float32_modules``.
    """

    model_type: ClassVar[str] = ""
    # AutoModel reads this attribute.
    sub_configs: ClassVar[dict[str, Any]] = {}
    is_plain: ClassVar[bool] = True
    """Whether to defer registration with the Auto classes, which imports transformers, to ``register_auto_classes``."""

    norm_stats: Statistics | None = None
    architectures: list[str] | None = None
    dtype: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build the configuration from the output of ``to_dict``; unknown names become attributes."""
        known = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in values.items() if name in known})
        for name in values.keys() - known - {"model_type"}:
            setattr(config, name, values[name])
        return (config, kwargs) if return_unused_kwargs else config

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Self:
        return cls.from_dict(read_json(Path(folder) / CONFIG_FILE), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type} | vars(self)

    def save_pretrained(self, folder: str | Path) -> None:
        write_text(Path(folder) / CONFIG_FILE, json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")


class PlainPolicy(FolderPolicy, nn.Module):
    """A ``FolderPolicy`` without transformers. Subclasses must call ``self.post_init()`` at the end of the constructor."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config

    def post_init(self) -> None:
        """Initialise the weights by calling ``_init_weights`` on each module, children first."""
        if torch.get_default_device().type != "meta":
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module's weights; by default, leave PyTorch's initialisation unchanged."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @classmethod
    def _from_config(
        cls, config: Any, dtype: torch.dtype | None = None, attn_implementation: str | None = None, **arguments: Any
    ) -> Any:
        """Build the policy with random weights; ``attn_implementation`` has no effect."""
        return cls(config, **arguments)._in_format(dtype)

    def _in_format(self, dtype: torch.dtype | str | None) -> Any:
        """Cast weights outside ``float32_modules`` to ``dtype`` or, if None, to ``config.dtype`` or else float32."""
        dtype = torch_dtype_of(dtype or self.config.dtype or "float32")
        for name, parameter in self.named_parameters():
            if name.split(".")[0] not in self.float32_modules:
                parameter.data = parameter.data.to(dtype)
        self.config.dtype = str(dtype).removeprefix("torch.")
        return self

    @classmethod
    def _with_weights(cls, config: Any, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        names = list(inspect.signature(cls.__init__).parameters)[2:]  # after self and config
        # These random weights are replaced below, so do not advance the global generator.
        with torch.random.fork_rng(devices=[]):
            model = cls(config, *args, **{name: kwargs[name] for name in names if name in kwargs})
        expected = model.state_dict()
        mismatched = {name for name in state_dict.keys() & expected if state_dict[name].shape != expected[name].shape}
        model.load_state_dict({name: state_dict[name] for name in state_dict.keys() - mismatched}, strict=False)
        missing, unexpected = expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys()
        info = {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": mismatched}
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype")
        return model._in_format(None if dtype == "auto" else dtype).eval(), info

    def _write(self, folder: str | Path, state_dict: dict[str, Tensor], **kwargs: Any) -> None:
        self.config.architectures = [type(self).__name__.removeprefix("FSDP")]
        self.config.save_pretrained(folder)
        write_safetensors(Path(folder) / "model.safetensors", state_dict)
