"""Run a lerobot policy in this process, with its own class, preprocessor and postprocessor."""

import contextlib
import inspect
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlinf.errors import CheckpointError, MissingDependencyError
from rlinf.models.embodiment.folder_policy import write_safetensors
from rlinf.models.embodiment.lerobot.chunks import FlowPrefix, code_chunk, flow_chunk, seeds_of, xvla_chunk
from rlinf.models.embodiment.lerobot.config import ACTION, PROMPT, LerobotConfig
from rlinf.models.embodiment.lerobot.contents import ENCODE, Finding, cached_folder, groot_base, local_tokenizer
from rlinf.models.embodiment.lerobot.folder import EMBODIMENT_STEPS, WEIGHTS, compare_weights, reject_folder
from rlinf.models.embodiment.lerobot.groot import groot_chunk, groot_prefix, groot_velocity, load_class
from rlinf.models.embodiment.modules.readout_token import masked_mean
from rlinf.models.loading import read_json

FEATURES: dict[str, tuple[str, str]] = {
    "act": ("model.encoder", "sequence first"),
    "diffusion": ("diffusion.unet", "global_cond"),
    "vqbet": ("vqbet.policy", "batch first"),
    "smolvla": ("model.vlm_with_expert.vlm.model.text_model.norm", "batch first"),
    "pi0": ("model.paligemma_with_expert.paligemma.model.language_model.norm", "batch first"),
    "pi05": ("model.paligemma_with_expert.paligemma.model.language_model.norm", "batch first"),
    "pi0_fast": ("model.paligemma_with_expert.paligemma.model.language_model.norm", "batch first"),
    "xvla": ("model.transformer.vlm_proj", "batch first"),
    "groot": ("_groot_model.action_head.model", "encoder_hidden_states"),
}
"""Maps policy types to the module whose output (or argument), averaged over positions, is used as an actor's features."""
STATES = {"xvla": "observation.state", "groot": "state"}
"""Maps policy types whose module lacks the robot's state to the input with it, which is appended to the features."""
CHUNKS: dict[str, Callable[..., Tensor]] = {"vqbet": code_chunk, "xvla": xvla_chunk, "groot": groot_chunk}
"""Chunk functions of policy types whose ``predict_action_chunk`` does not use ``noise``."""


class RunnerOutput(NamedTuple):
    """Float32 chunks ``[B, N, T, D]`` in the folder's units, with ``T`` of ``chunk_size`` actions, and features ``[B, F]``."""

    chunks: np.ndarray
    features: np.ndarray


class LocalRunner:
    """Loads a folder and runs its policy; rejects a folder whose weights do not fit."""

    def __init__(self, folder: str, config: LerobotConfig) -> None:
        self.folder, self.config = Path(folder).expanduser(), config
        # Checked here because this is the only place where lerobot reads a folder's pipelines.
        reject_folder(self.folder, config)
        with quiet():
            self.policy, self._before, self._after = self._load()
        findings = compare_weights(self.folder, self.policy.state_dict())
        if findings:
            raise CheckpointError(f"The policy in {folder} would act blindly: {findings[0]}")
        # SmolVLA's flags are not followed: model=lerobot trains all of its weights.
        follows = config.policy_type in EMBODIMENT_STEPS
        self.frozen = {name for name, x in self.policy.named_parameters() if follows and not x.requires_grad}
        self.policy.requires_grad_(False)
        self.device = torch.device("cpu")
        # Hooks, generators and rows being processed are stored in the policy, so only one thread may run it at a time.
        self._lock = threading.Lock()
        try:
            with quiet():
                output = self.run(self._blank(), None)
        except Exception as error:
            problem = f"lerobot's {config.policy_type} cannot act here ({type(error).__name__}: {error})"
            fix = "Set model.interpreter=<a Python with the versions of transformers and torch that lerobot requires>"
            raise CheckpointError(f"{problem}. {fix}") from error
        self.feature_dim = output.features.shape[1]
        if (width := output.chunks.shape[-1]) != config.action_dim:
            problem = f"has {config.action_dim} dimensions in config.json, but {width} after policy_postprocessor.json"
            finding = Finding(ACTION, problem, "use a folder whose output_features are what an env receives")
            raise CheckpointError(f"The policy in {folder} would act blindly: {finding}")

    def _load(self) -> tuple[Any, Callable, Callable]:
        try:
            from lerobot.configs import PreTrainedConfig
            from lerobot.policies import get_policy_class, make_pre_post_processors
        except ImportError as error:
            fix = "Run bash scripts/setup.sh --lerobot, or set model.interpreter=<a Python that has it>"
            raise MissingDependencyError(
                f"model=lerobot needs the package lerobot, which cannot be imported ({error}). {fix}"
            ) from error
        try:
            config = PreTrainedConfig.from_pretrained(self.folder, cli_overrides=["--device=cpu"])
            fields = self._overrides(config)
            for name, value in fields.items():
                setattr(config, name, value)
            policy_class = get_policy_class(config.type)
            if config.type == "groot":
                policy_class = load_class(policy_class, self.folder, groot_base(self.folder, fields["base_model_path"]))
            let_masks_take_positions()
            policy = policy_class.from_pretrained(str(self.folder), config=config)
            overrides = self._step_overrides()
            before, after = make_pre_post_processors(
                config, pretrained_path=str(self.folder), preprocessor_overrides=overrides
            )
        except CheckpointError:
            raise
        except Exception as error:  # draccus, safetensors, transformers and lerobot raise various types
            raise CheckpointError(f"lerobot cannot load {self.folder}: {self._why(error)}") from error
        return policy.eval(), before, after

    def _why(self, error: Exception) -> str:
        """Explain an error raised by lerobot, whose messages about mismatched weights and fields are long."""
        text = f"{type(error).__name__}: {error}"
        from lerobot import __version__

        if (
            "DecodingError" in type(error).__name__
            or "not valid for" in text
            or "ProcessorStep" in text
            or "groot_n1_7" in text
        ):
            newer = f"pip install --no-deps a newer lerobot than {__version__} into the Python that runs it"
            return f"{Finding('config.json', f'was written by a newer lerobot ({text[:300]})', newer)}"
        return f"{text[:600]}. Use the folder written by training, or set model.interpreter=<a Python with its lerobot>"

    def _overrides(self, config: Any) -> dict[str, Any]:
        """Return overrides that stop the constructor from querying a hub or compiling."""
        fields: dict[str, Any] = {"pretrained_path": self.folder}
        if hasattr(config, "pretrained_backbone_weights"):
            # Not downloaded, because the folder contains these weights.
            fields["pretrained_backbone_weights"] = None
        if hasattr(config, "vlm_model_name"):
            name = self.config.vlm or config.vlm_model_name
            fields |= {"vlm_model_name": local_tokenizer(self.folder, name) or name, "load_vlm_weights": False}
        if hasattr(config, "base_model_path"):
            name = self.config.vlm or config.base_model_path
            place = local_tokenizer(self.folder, name) or name
            fields["base_model_path"] = cached_folder(place) or place if not Path(place).is_dir() else place
        for name in ("text_tokenizer_name", "action_tokenizer_name"):
            if hasattr(config, name):
                fields[name] = self._tokenizer(name, getattr(config, name))
        for name, value in (("compile_model", False), ("n_action_steps", self.config.n_action_steps)):
            if hasattr(config, name):
                fields[name] = value
        return fields

    def _step_overrides(self) -> dict[str, Any]:
        """Return step overrides: the device to load on, and local paths of tokenizers."""
        overrides: dict[str, Any] = {}
        for step in read_json(self.folder / "policy_preprocessor.json")["steps"]:
            name, options = step.get("registry_name"), step.get("config") or {}
            if name == "device_processor":
                overrides[name] = {"device": "cpu"}
            if name == ENCODE:
                overrides[name] = {"device": "cpu"}
            names = ("tokenizer_name", "model_name", "action_tokenizer_name", "paligemma_tokenizer_name")
            places = {key: self._tokenizer(key, options[key]) for key in names if options.get(key)}
            if places:
                overrides[name] = overrides.get(name, {}) | places
        return overrides

    def _tokenizer(self, field: str, name: str) -> str:
        """Return a tokenizer's local path or else its name; ``config.tokenizer`` only replaces text tokenizers."""
        name = name if field == "action_tokenizer_name" else self.config.tokenizer or name
        place = local_tokenizer(self.folder, name) or name
        # GR00T's processor allows code: load exactly the files that were checked, which a hub cannot replace.
        return cached_folder(place) or place if field == "model_name" and not Path(place).is_dir() else place

    def to(self, device: torch.device) -> None:
        if device == self.device:
            return
        self.policy.to(device)
        for pipeline in (self._before, self._after):
            for step in pipeline.steps:
                if hasattr(step, "to"):
                    step.to(device)
                if hasattr(step, "tensor_device"):
                    step.tensor_device = device
        self.policy.config.device, self.device = str(device), device

    @torch.no_grad()
    def run(self, batch: Mapping[str, Any], noise: np.ndarray | None) -> RunnerOutput:
        """Return chunks and features for ``B`` rows.

        Args:
            batch: ``B`` instructions under ``task``, and uint8 images ``[B, H, W, 3]`` and float32 states ``[B, S]`` by
                feature name, with a time axis after ``B`` if ``n_obs_steps`` is above 1.
            noise: float32 ``[B, N, *config.noise_shape]``; None returns one chunk per row, all from one fixed noise.
        """
        rows = len(batch[PROMPT])
        count = 1 if noise is None else noise.shape[1]
        prepared = self._prepared(batch)
        given = self._noise(rows * count, None if noise is None else torch.from_numpy(noise).flatten(0, 1))
        module = FEATURES[self.config.policy_type]
        with self._lock, captured_states(self.policy, *module) as states, seeded_steps(self.policy, given):
            chunk = CHUNKS.get(self.config.policy_type, flow_chunk)(self.policy, prepared, given, count)
        chunks = self._after_each(chunk).cpu().unflatten(0, (rows, count)).numpy()
        features = torch.cat(states)[: rows * count : count].float()
        if (state := prepared.get(STATES.get(self.config.policy_type))) is not None:
            features = torch.cat((features, state.flatten(1).float()), 1)
        return RunnerOutput(chunks, features.cpu().numpy())

    def loss(self, batch: Mapping[str, Any], actions: Tensor, seed: int) -> Tensor:
        """Return the policy's own loss for a ``batch`` as in ``run``, a scalar with gradients.

        ``actions`` are float32 ``[B, chunk_size, D]`` in the folder's units; ``seed`` fixes the noise.
        """
        prepared = self._prepared(batch, actions.to(self.device))
        prepared["action_is_pad"] = torch.zeros(actions.shape[:2], dtype=torch.bool, device=self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self.policy(prepared)[0]

    def prefix(self, batch: Mapping[str, Any]) -> FlowPrefix:
        """Run a ``batch`` as in ``run`` through the prefix of a GR00T or SmolVLA (the first half of ``sample_actions``), with gradients."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        if self.config.policy_type == "groot":
            prepared = self._prepared(batch)
            with self._lock:  # the backbone stores values of the rows being processed
                return groot_prefix(self.policy, prepared)
        policy, flow = self.policy, self.policy.model
        prepared = policy._prepare_batch(self._prepared(batch))
        tokens = (prepared[f"observation.language.{part}"] for part in ("tokens", "attention_mask"))
        images, state = policy.prepare_images(prepared), policy.prepare_state(prepared)
        embedded, mask, groups = flow.embed_prefix(*images, *tokens, state=state)
        states, cache = flow.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, groups), position_ids=mask.cumsum(1) - 1, past_key_values=None,
            inputs_embeds=[embedded, None], use_cache=True,
        )  # fmt: skip
        return FlowPrefix(mask, cache, states[0])

    def velocity(self, prefix: FlowPrefix, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity of a SmolVLA or GR00T at ``x [B, H, D]`` and ``t [B]`` (1 is noise), with gradients."""
        if self.config.policy_type == "groot":
            return groot_velocity(self.policy, prefix, x, t).float()
        return self.policy.model.denoise_step(prefix.mask, prefix.cache, x, t.float())

    def unnormalized(self, chunk: Tensor) -> Tensor:
        """Convert a flow's normalised actions ``[B, T, D]``, including padding, to the folder's units in float32."""
        chunk = chunk[..., : self.config.action_dim]
        if getattr(self.policy.config, "adapt_to_pi_aloha", False):
            chunk = self.policy._pi_aloha_encode_actions(chunk)
        return self._after_each(chunk)

    def _after_each(self, chunk: Tensor) -> Tensor:
        with self._lock:
            return torch.stack([self._after(chunk[:, step]) for step in range(chunk.shape[1])], 1).float()

    def _prepared(self, batch: Mapping[str, Any], actions: Tensor | None = None) -> dict[str, Any]:
        """Apply the policy's own preprocessor to rows and, if given, demonstrated actions."""
        seen = {name: self._tensor(values) for name, values in batch.items() if name != PROMPT}
        # The preprocessor's steps store the rows being processed.
        with self._lock:
            return self._before({**seen, PROMPT: batch[PROMPT], **({} if actions is None else {ACTION: actions})})

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights under the names and in the number formats of the policy's file."""
        target = folder / WEIGHTS
        with safe_open(target, "pt") as file:
            stored = {name.removeprefix("model."): name for name in file.keys()}
        named = {stored.get(name.removeprefix("model.")): weight for name, weight in weights.items()}
        write_safetensors(target, {name: weight for name, weight in named.items() if name is not None})

    def _noise(self, rows: int, given: Tensor | None) -> Tensor | None:
        if self.config.noise_shape is None:
            return None
        if given is None:
            given = greedy_noise(self.config.noise_shape).expand(rows, *self.config.noise_shape)
        return given.to(self.device).contiguous()

    def _tensor(self, values: np.ndarray) -> Tensor:
        """Convert a feature to the format in lerobot's evaluation; images become float32 ``[B, 3, H, W]`` in 0..1."""
        tensor = torch.from_numpy(values).to(self.device)
        return tensor.float().div(255).movedim(-1, -3).contiguous() if values.dtype == np.uint8 else tensor

    def _blank(self) -> dict[str, Any]:
        steps = () if self.config.n_obs_steps == 1 else (self.config.n_obs_steps,)
        inputs: dict[str, Any] = {PROMPT: ["stand still"]}
        inputs |= {name: np.zeros((1, *steps, *shape[1:], 3), np.uint8) for name, shape in self.config.images.items()}
        return inputs | {name: np.zeros((1, *steps, width), np.float32) for name, width in self.config.states.items()}


def let_masks_take_positions() -> None:
    """Allow pi0 and pi0.5 in lerobot 0.6.1 to run with newer versions of transformers."""
    # create_causal_mask no longer accepts cache_position, which transformers now derives from the cache.
    module: Any = sys.modules.get("lerobot.policies.pi_gemma")
    create_mask = getattr(module, "create_causal_mask", None)
    if create_mask is not None and "cache_position" not in inspect.signature(create_mask).parameters:
        module.create_causal_mask = lambda cache_position=None, **given: create_mask(**given)


def greedy_noise(shape: Sequence[int]) -> Tensor:
    """Return the noise for greedy actions, which is equal for all rows and calls."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def captured_states(policy: nn.Module, name: str, where: str) -> Iterator[list[Tensor]]:
    """Collect a module's states ``[B, F]`` per call, averaged over positions; the first call encodes the observation."""
    captured: list[Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states = kwargs[where] if where in kwargs else output[0] if isinstance(output, tuple) else output
        if states.ndim == 3:
            # Only GR00T's prompts are padded.
            mask = kwargs.get("backbone_attention_mask")
            states = states.float().mean(0) if where == "sequence first" else masked_mean(states, mask)
        captured.append(states)

    handle = policy.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    try:
        yield captured
    finally:
        handle.remove()


@contextlib.contextmanager
def seeded_steps(policy: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """Draw a diffusion's step noise from a separate generator per row, seeded by the initial noise."""
    scheduler = getattr(getattr(policy, "diffusion", None), "noise_scheduler", None)
    if scheduler is None or noise is None:
        yield
        return
    streams = [torch.Generator(noise.device).manual_seed(seed) for seed in seeds_of(noise)]
    step = scheduler.step
    scheduler.step = lambda *args, **kwargs: step(*args, **{**kwargs, "generator": streams})
    try:
        yield
    finally:
        del scheduler.step


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress lerobot's output and logs during loading; errors are still raised."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
