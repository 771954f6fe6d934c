"""Configuration of a VLA based on any Hugging Face image-text-to-text model."""

from __future__ import annotations

import copy
import string
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.hf_vla.processing import load_vlm_processor, new_vlm_processor, reserved_ranges
from rlinf.models.loading import check_choice, checkpoint_folder, dataset_statistics, field_error, read_json
from rlinf.types import Statistics

OWN_KEY = "hf_vla"
"""Key in a VLM's ``config.json`` under which our fields are stored."""

OWN_FIELDS = (
    "n_action_bins", "action_bin_rule", "reserved_tokens", "norm_stats", "prompt_template", "weight_init", "processor_config",
    "special_tokens",
)  # fmt: skip


class HfVlaConfig(PreTrainedConfig):
    """The VLM's own configuration plus the fields needed to use it as a policy.

    Saved folders are in the VLM's format: ``config.json`` is the VLM's, with our fields added under ``hf_vla``.

    Args:
        vlm_config: Configuration of the VLM, or its fields including ``model_type``.
        n_action_bins: Number of action tokens.
        action_bin_rule: ``midpoints`` or ``grid``; see ``ActionTokenizer``.
        reserved_tokens: Ranges ``[first, end)`` of special and added token ids, which are never used as action tokens;
            None reads them from the processor's tokenizer.
        norm_stats: Action statistics by data set name.
        prompt_template: Text that contains ``{image}`` (the image tokens of all cameras) and ``{instruction}``; None uses
            the processor's chat template or, without one, ``{image}{instruction}``.
        weight_init: Random initialisation: ``normal`` (as in the VLM) or ``fan_in`` (std 1/sqrt(inputs), 1 for
            embeddings), with which small models learn faster.
        processor_config: Contents of the VLM's ``processor_config.json``, used without a folder.
        special_tokens: Named tokens of the tokenizer, e.g. ``{image_token: <image>}``, used without a folder.
        merged_adapters: Fingerprints of LoRA adapters already merged into the weights.
    """

    model_type = "hf_vla"
    sub_configs = {"vlm_config": AutoConfig}

    vlm_config: dict[str, Any] | PreTrainedConfig | None = None
    n_action_bins: int = 256
    action_bin_rule: str = "midpoints"
    reserved_tokens: list[list[int]] | None = None
    norm_stats: Statistics | None = None
    prompt_template: str | None = None
    weight_init: str = "normal"
    processor_config: dict[str, Any] | None = None
    special_tokens: dict[str, str] | None = None
    merged_adapters: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.vlm_config, dict):
            self.vlm_config = _vlm_config(self.vlm_config)
        self.norm_stats = self.norm_stats or {}
        self.merged_adapters = self.merged_adapters or []
        super().__post_init__(**kwargs)
        self._check()
        if self.vlm_config is not None and self.reserved_tokens is None and self.processor_config is not None:
            self.reserved_tokens = reserved_ranges(new_vlm_processor(self).tokenizer)

    def _check(self) -> None:
        if type(self.n_action_bins) is not int or self.n_action_bins < 2:
            problem = f"n_action_bins is {self.n_action_bins!r}; expected an integer of at least 2"
            raise field_error(problem, "n_action_bins=256")
        if self.prompt_template is not None and fields_of(self.prompt_template) != {"image", "instruction"}:
            raise ConfigError(
                f"prompt_template is '{self.prompt_template}'; expected a text with {{image}} and {{instruction}}. "
                "Set e.g. 'model.override_config.prompt_template=\"{image}What should the robot do to {instruction}?\"'"
            )
        check_choice("weight_init", self.weight_init, ("fan_in", "normal"))

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.vlm_config.get_text_config()

    @property
    def action_tokens_end(self) -> int:
        """End (exclusive) of the range of action tokens, which contains no special or added tokens."""
        vocab_size, free, start = self.text_config.vocab_size, [], 0
        for first, past in [*sorted(self.reserved_tokens or []), [vocab_size, vocab_size]]:
            free.append((min(first, vocab_size) - start, first))
            start = past
        ends = [min(first, vocab_size) for length, first in free if length >= self.n_action_bins]
        if ends:
            return max(ends)
        longest = max(length for length, _ in free)
        raise field_error(
            f"n_action_bins is {self.n_action_bins}; expected at most {longest}, the longest run without special "
            f"tokens among the vocabulary's {vocab_size} ids", f"n_action_bins={longest}",
        )  # fmt: skip

    def vlm_class(self) -> type:
        """Return transformers' decoder-only image-text-to-text class for this configuration."""
        vlm_config = self.vlm_config
        if vlm_config is None:
            raise ConfigError("model.init_config has no vlm_config. Set model=hf_vla_tiny or model.model_path=<a VLM>")
        vlm_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(vlm_config), None)
        if vlm_class is None or vlm_config.is_encoder_decoder or not vlm_class.can_generate():
            named = ", ".join(vlm_config.architectures or ["no architecture named"])
            raise ConfigError(
                f"The model is a '{vlm_config.model_type}' ({named}); model=hf_vla needs a decoder-only architecture of "
                "AutoModelForImageTextToText. Set model.model_path=<folder of such a model>"
            )
        return vlm_class

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> HfVlaConfig:
        """Read a folder of a VLM or one saved by rlinf, merging ``dataset_statistics.json`` into ``norm_stats``."""
        folder = checkpoint_folder(pretrained_model_name_or_path)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"model.model_path is '{folder}', a folder without a config.json. Set model.model_path=<folder of a VLM>"
            )
        fields = read_json(folder / "config.json")
        vla_fields = fields.pop(OWN_KEY, {})
        vla_fields["merged_adapters"] = fields.get("merged_adapters")
        config = cls(vlm_config=_vlm_config(fields, f"'{folder}'"), **vla_fields)
        config.vlm_class()
        if config.reserved_tokens is None:
            config.reserved_tokens = reserved_ranges(load_vlm_processor(folder, config.vlm_config).tokenizer)
        config.norm_stats = {**config.norm_stats, **dataset_statistics(folder)}
        return config

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        vlm_config = copy.deepcopy(self.vlm_config)
        setattr(vlm_config, OWN_KEY, {name: getattr(self, name) for name in OWN_FIELDS})
        if self.merged_adapters:
            vlm_config.merged_adapters = self.merged_adapters
        vlm_config.save_pretrained(str(save_directory))


def fields_of(template: str) -> set[str | None]:
    """Return the field names in a format string, or ``?`` if it is invalid."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return {"?"}


def _vlm_config(fields: dict[str, Any], source: str = "model.init_config.vlm_config") -> PreTrainedConfig:
    fields = dict(fields)
    model_type = fields.pop("model_type", None)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise CheckpointError(
            f"The configuration in {source} has model_type {model_type or 'null'}, which transformers does not know. "
            "Set model.model_path=<folder of a VLM that AutoModelForImageTextToText loads>"
        ) from error
