"""Registry of policies: registering a model type once makes it available to configuration, loading and training.

An unregistered model type falls back to ``HFModel`` (text) or ``hf_vla`` (images and text). Importing this module imports
neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rlinf.errors import ConfigError
from rlinf.imports import import_string, lazy_attributes
from rlinf.registry import Registry
from rlinf.wings import added

__all__ = [
    "MODELS", "HFLLMModel", "HFModel", "ModelEntry", "build_policy", "config_file_names", "entry_for", "get_model",
    "get_model_config_and_processor", "local_settings", "model_of_folder", "random_weights", "register_auto_classes",
    "register_model", "torch_dtype_from_precision",
]  # fmt: skip


BUILDING = (
    "build_policy", "config_file_names", "entry_for", "get_model", "get_model_config_and_processor", "local_settings",
    "model_of_folder", "random_weights",
)  # fmt: skip

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(BUILDING, "rlinf.models.building")
    | dict.fromkeys(("HFModel", "HFLLMModel"), "rlinf.llm.hf_model")
    | {
        "HuggingFacePolicy": "rlinf.llm.hf_policy",
        "MegatronPolicy": "rlinf.llm.megatron.policy",
        "torch_dtype_from_precision": "rlinf.models.precision",
    },
)


def import_target(target: Any) -> Any:
    """Import ``"module:attribute"``; return anything else unchanged."""
    return import_string(target) if isinstance(target, str) else target


@dataclass(frozen=True)
class ModelEntry:
    """The classes of a model type, each given directly or as ``"module:attribute"``.

    Attributes:
        model: Policy class: ``ActionModel``, and ``PreTrainedModel`` or ``PlainPolicy``.
        config: ``PreTrainedConfig`` or ``PlainConfig`` class; None uses ``model.config_class``.
        processor: Class whose ``from_pretrained(path, tokenizer=..., image_processor=...)`` loads the input processor.
        load_processor: Function used instead of the two processor classes: ``(tokenizer_config, model_config, path | None)``.
        acts: Whether the model predicts actions; False for a language model.
        is_remote: Whether the policy runs on the server at ``model.url`` and so has no local weights.
        folder_settings: Function that returns a folder's ``model`` section, or None, if its config.json has no ``model_type``.
    """

    name: str
    model: Any
    config: Any = None
    processor: Any = None
    image_processor: Any = None
    load_processor: Any = None
    acts: bool = True
    is_remote: bool = False
    folder_settings: Any = None

    def resolve(self) -> ModelEntry:
        """Import the classes, reject an incomplete policy class, and register with transformers; safe to call repeatedly."""
        parts = ("model", "config", "processor", "image_processor", "load_processor")
        entry = replace(self, **{part: import_target(getattr(self, part)) for part in parts})
        missing = sorted(getattr(entry.model, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(
                f"{entry.model.__name__}, the class of model type '{entry.name}', does not implement {', '.join(missing)}, "
                "which every policy needs (docs/adding_a_model.md)"
            )
        if entry.config is None:
            entry = replace(entry, config=getattr(entry.model, "config_class", None))
        if not getattr(entry.config, "is_plain", entry.config is None):
            _register_auto_classes(entry)
        return entry


def _family(name: str, policy: str, config: str, processing: str | None = None, **parts: str) -> ModelEntry:
    """Return the entry of a model family; ``processing`` names a different family whose processing module it uses."""
    folder = f"rlinf.models.embodiment.{name}"
    parts["load_processor"] = f"rlinf.models.embodiment.{processing or name}.processing:load_processor"
    return ModelEntry(name, f"{folder}.policy:{policy}", f"{folder}.config:{config}", **parts)


PRISMATIC = {
    "processor": "rlinf.models.embodiment.openvla.processing:PrismaticProcessor",
    "image_processor": "rlinf.models.embodiment.openvla.processing:PrismaticImageProcessor",
}
TEMPLATE = "rlinf.models.embodiment.your_model_action_model"
NO_PROCESSOR = "rlinf.models.embodiment.mlp_action_model:load_processor"
ENTRIES = (
    _family("openvla", "OpenVLAForRLActionPrediction", "OpenVLAConfig", **PRISMATIC),
    _family("openvla_oft", "OpenVLAOFTForRLActionPrediction", "OpenVLAOFTConfig", "openvla", **PRISMATIC),
    _family("pi0", "Pi0ForRLActionPrediction", "Pi0Config"),
    _family("hf_vla", "HfVlaForRLActionPrediction", "HfVlaConfig"),
    ModelEntry("cnn", "rlinf.models.embodiment.cnn_action_model:CNNForRLActionPrediction", load_processor=NO_PROCESSOR),
    ModelEntry(
        "remote",
        "rlinf.models.embodiment.remote_action_model:RemotePolicy",
        load_processor=NO_PROCESSOR,
        is_remote=True,
    ),
    ModelEntry(
        "your_model",
        f"{TEMPLATE}:YourModelForRLActionPrediction",
        f"{TEMPLATE}:YourModelConfig",
        f"{TEMPLATE}:YourProcessor",
        f"{TEMPLATE}:YourImageProcessor",
        load_processor=f"{TEMPLATE}:load_processor",
    ),
    ModelEntry("mlp", "rlinf.models.embodiment.mlp_action_model:MLPForRLActionPrediction", load_processor=NO_PROCESSOR),
)
MODELS: Registry[ModelEntry] = Registry(
    "model type", "rlinf.models", {**{entry.name: entry for entry in ENTRIES}, **added("models")}
)


def register_model(
    name: str,
    *,
    model: Any,
    config: Any = None,
    processor: Any = None,
    image_processor: Any = None,
    load_processor: Callable[..., Any] | str | None = None,
) -> None:
    """Register a model type, replacing any earlier one of the same name. See ``ModelEntry`` for the arguments."""
    MODELS.register(name, ModelEntry(name, model, config, processor, image_processor, load_processor))


def register_auto_classes() -> None:
    """Register every policy with transformers' Auto classes, e.g. for ``AutoModel.from_pretrained("my_policy")``.

    Importing rlinf does not do this, because it would import torch and all models. The loaded model cannot act until its
    processor is set, as ``rlinf.load_policy`` does. Policies with a ``PlainConfig`` are not registered with transformers.
    """
    for name in MODELS:
        _register_auto_classes(MODELS.get(name).resolve())


def _register_auto_classes(entry: ModelEntry) -> None:
    from transformers import AutoConfig, AutoModel, PreTrainedConfig

    AutoConfig.register(entry.config.model_type or entry.name, entry.config, exist_ok=True)
    is_custom = issubclass(entry.config, PreTrainedConfig) or entry.config.is_plain
    # transformers' own model types keep their classes, because other models build their submodules from them.
    if is_custom and entry.acts and not entry.config.__module__.startswith("transformers."):
        AutoModel.register(entry.config, entry.model, exist_ok=True)
    if entry.image_processor is not None:
        # Imported late: it imports tokenizers, which a policy without images does not need.
        from transformers import AutoImageProcessor

        AutoImageProcessor.register(entry.config, slow_image_processor_class=entry.image_processor, exist_ok=True)
    if entry.processor is not None:
        from transformers import AutoProcessor

        AutoProcessor.register(entry.config, entry.processor, exist_ok=True)
