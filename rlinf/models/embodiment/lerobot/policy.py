"""Adapter for lerobot policies, so that they can act, or be the frozen base of an actor."""

from __future__ import annotations

import math
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.base import ActionModel, Inputs
from rlinf.models.embodiment.lerobot.config import ACTION, PROMPT, LerobotConfig
from rlinf.models.embodiment.lerobot.folder import NEEDED, action_statistics, folder_digest, reject_folder
from rlinf.models.embodiment.lerobot.runner import LocalRunner, RunnerOutput
from rlinf.models.embodiment.lerobot.worker import WorkerRunner, interpreter_for, runs_here
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.loading import checkpoint_folder
from rlinf.models.sampling import draw_uniforms, standard_normal
from rlinf.types import ActionEvaluation, ActionPrediction, BaseActions, EnvSpec, Observation

INSTEAD = "model=openvla_tiny model.model_path=null"
TRAINED = {"smolvla": "model=smolvla", "groot": "model=groot"}
"""Maps policy types to the model type that supports training with policy gradients."""
FAR = 5.0
"""Distance from the middle of an env's bounds, in half-widths, beyond which demonstrated actions are implausible."""


class LerobotPolicy(ActionModel, nn.Module):
    """A client of a runner that computes chunks and features in this process or a separate interpreter.

    The runner owns the weights. The state dict only contains their digest, by which an actor recognises its base, and
    ``save_pretrained`` copies the folder. With ``config.trained``, both include the weights. For greedy actions
    (``do_sample=False``), flows and diffusions start from one fixed noise for every row and call.

    Args:
        folder: The policy's folder.
        interpreter: Python interpreter that runs the policy (``model.interpreter``).
    """

    config_class = LerobotConfig
    main_input_name = PROMPT
    predicts_values: ClassVar[bool] = False
    has_logprobs: ClassVar[bool] = False
    float32_modules: ClassVar[tuple[str, ...]] = ()
    detach_value = True
    training_options: ClassVar[dict[str, Any]] = {"trained": True}
    other_statistics: ClassVar[str] = "model.override_config.action_scale or state_scale=<policy units per env unit>"

    @classmethod
    def check_env(cls, config: LerobotConfig, env: EnvSpec) -> None:
        """Reject an env whose cameras, image size or state differ from the policy's inputs."""
        config.camera_of(env.cameras)
        for name, (_, height, width) in config.images.items():
            if not config.resizes and (height, width) != (env.image_size, env.image_size):
                fix = f"env.image_size={height}" if height == width else "an env with images of this size"
                problem = f"'{name}' has {height} x {width} pixels, but env.image_size is {env.image_size}"
                raise ConfigError(f"The policy's image {problem}. Set {fix}")
        super().check_env(config, env)

    @classmethod
    def check_rl(cls, config: LerobotConfig) -> None:
        raise ConfigError(
            f"A lerobot policy ({config.policy_type}) has no log-probabilities here; expected an algorithm that trains an actor on "
            f"top of it. Set algorithm=sac algorithm.actor.name=residual, or {TRAINED.get(config.policy_type, INSTEAD)}"
        )

    @classmethod
    def check_sft(cls, config: LerobotConfig) -> None:
        """Reject weights in a different process, and policies that read several observations."""
        if config.n_obs_steps > 1:
            raise ConfigError(
                f"{config.policy_type} reads {config.n_obs_steps} observations, but a demonstration has one per row; expected a policy "
                "that reads one. Set model.model_path=<a policy of ACT or SmolVLA>"
            )
        if not config.trained:
            raise ConfigError(
                "The weights of a lerobot policy are frozen; expected trainable weights. Set "
                "model.override_config.trained=true"
            )
        if not runs_here():
            raise ConfigError(
                "lerobot cannot be imported by this Python, which has to train its weights; expected a Python with lerobot. Run "
                "`.venv-lerobot/bin/python -m rlinf sft ...`, after creating it by bash scripts/setup.sh --lerobot"
            )

    @classmethod
    def _from_config(cls, config: LerobotConfig, **arguments: Any) -> LerobotPolicy:
        # Memory estimates do not need weights.
        if torch.get_default_device().type == "meta":
            return cls(config, None, arguments["action_dim"], arguments["action_chunks_len"])
        raise ConfigError(
            "model=lerobot has no random weights; expected a folder. Set model.model_path=<folder> model.init_config={}"
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, config: LerobotConfig, **arguments: Any) -> LerobotPolicy:
        """Load a folder; raise CheckpointError if its policy would act blindly (see ``check_folder``)."""
        place = checkpoint_folder(folder)
        if arguments.get("torch_dtype", torch.float32) != torch.float32:
            raise ConfigError("A lerobot policy uses the number format set in its folder. Set model.precision=fp32")
        reject_folder(place, config)
        config.norm_stats = {"lerobot": {ACTION: action_statistics(place)}}
        names = ("interpreter", "timeout_s", "connect_timeout_s")
        options = {name: arguments[name] for name in names if name in arguments}
        return cls(config, place, arguments["action_dim"], arguments["action_chunks_len"], **options)

    def __init__(
        self,
        config: LerobotConfig,
        folder: Path | None,
        action_dim: int,
        action_chunks_len: int,
        interpreter: str | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 300.0,
    ) -> None:
        nn.Module.__init__(self)
        _check_sizes(config, action_dim, action_chunks_len)
        self.config, self.folder, self.num_observations = config, folder, config.n_obs_steps
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        digest = bytes.fromhex(folder_digest(folder)) if folder is not None else bytes(32)
        self.weights_sha256 = nn.Parameter(torch.tensor(list(digest), dtype=torch.float32), requires_grad=False)
        self._runner_options = interpreter, timeout_s, connect_timeout_s
        self._runner: Any = None
        # Set on the instance, because a class attribute would hide the module.
        self.value_head = None
        self.policy: nn.Module | None = None
        if folder is not None:
            _ = self.runner
        self.state_range = self._range(config.states, "policy_preprocessor.json", config.state_scale)
        # A policy in a separate interpreter can act, but not be trained.
        if config.trained and isinstance(self._runner, LocalRunner):
            self.policy = self._runner.policy
            for name, weight in self.policy.named_parameters():
                weight.requires_grad_(name not in self._runner.frozen)

    @property
    def runner(self) -> LocalRunner | WorkerRunner:
        """The runner, loaded once per process."""
        if self._runner is None:
            self._runner = start_runner(str(self.folder), self.config, *self._runner_options)
        self._runner.to(self.device)
        return self._runner

    def __getstate__(self) -> dict[str, Any]:
        # Each process loads its own runner.
        replaced = {"_runner": None} if self.policy is None else {}
        return {**self.__dict__, **replaced}

    @property
    def device(self) -> torch.device:
        return self.weights_sha256.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def num_uniforms(self) -> int:
        return self.num_candidate_uniforms

    @property
    def num_candidate_uniforms(self) -> int:
        return math.prod(self.config.noise_shape or [0])

    @property
    def num_sft_uniforms(self) -> int:
        # One number seeds the noise of the loss.
        return 1

    @property
    def sft_chunk_len(self) -> int:
        return self.config.chunk_size

    @property
    def feature_dim(self) -> int:
        return self.config.width if self.folder is None else self.runner.feature_dim

    @property
    def action_range(self) -> Range | None:
        return self._range({ACTION: self.action_dim}, "policy_postprocessor.json", self.config.action_scale)

    def _range(self, widths: Mapping[str, int], file: str, scale: float | list[float]) -> Range | None:
        """Return the range of the concatenated features in env units."""
        modes, features = self.config.normalization_mapping or {}, {**(self.config.input_features or {})}
        features |= self.config.output_features or {}
        ends = []
        for name, width in widths.items() if self.folder is not None else ():
            # Features that are not normalised have half-width 0 and are not compared.
            bounds = np.zeros((2, width))
            if names := NEEDED.get(modes.get(features[name]["type"], "")):
                span = Range.of(action_statistics(self.folder, file, name), names, None)
                bounds += [span.middle - span.half, span.middle + span.half]
            ends.append(bounds)
        return Range(*(np.concatenate(ends, 1) / np.array(scale))) if ends else None

    def check_actions(self, low: np.ndarray, high: np.ndarray) -> None:
        """Compare the action statistics with the env's bounds; units that are too small cannot be detected."""
        learnt = {name: np.array(values) for name, values in self.config.norm_stats["lerobot"][ACTION].items()}
        if {"mean", "std"} <= learnt.keys():
            least, most = learnt["mean"] - 2 * learnt["std"], learnt["mean"] + 2 * learnt["std"]
        else:
            names = next((pair for pair in (("q01", "q99"), ("min", "max")) if set(pair) <= learnt.keys()), None)
            if names is None:
                return
            least, most = learnt[names[0]], learnt[names[1]]
        # The env rejects actions of a different width.
        if len(low) != self.action_dim:
            return
        scale = np.array(self.config.action_scale)
        least, most = (np.broadcast_to(bound / scale, low.shape) for bound in (least, most))
        middle, half = (low + high) / 2, (high - low) / 2
        beyond = np.flatnonzero(np.maximum(abs(least - middle), abs(most - middle)) > FAR * half)
        if len(beyond):
            k = beyond[0]
            raise ConfigError(
                f"action {k} of the policy ranged from {least[k]:.4g} to {most[k]:.4g} in training, but the env accepts {low[k]:.4g} to "
                f"{high[k]:.4g}, so units differ. Set model.override_config.action_scale=<policy units per env unit> (57.29578 for "
                "degrees per radian), or env=<an env in the policy's units>"
            )

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return uint8 images ``[B, H, W, 3]`` and float32 states by feature name, and instructions as bytes.

        With ``num_observations`` above 1, images and states have a time axis after ``B``.
        """
        cameras = self.config.camera_of(list(observation.images))
        arrays = (*observation.images.values(), observation.state)
        moments = [array.shape[1] for array in arrays if array is not None and array.ndim in (3, 5)]
        if any(count != self.num_observations for count in moments) or (self.num_observations > 1 and not moments):
            raise ConfigError(
                f"The policy ({self.config.policy_type}) reads {self.num_observations} observations at a time (n_obs_steps), but received "
                f"{moments[0] if moments else 1}. `rlinf evaluate`, `audit`, `play` and `collect` track the history; servers and actors "
                "do not. Set model.model_path=<a policy with n_obs_steps=1>"
            )
        arrays = {name: observation.images[camera] for name, camera in cameras.items()}
        inputs = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        width = self.config.state_dim
        given = 0 if observation.state is None else observation.state.shape[-1]
        if width and given != width:
            raise ConfigError(
                f"The policy reads a state of width {width}, but the observation has one of width {given}. Set a different env"
            )
        if width:
            state = torch.from_numpy(observation.state).float() * numbers(self.config.state_scale)
            inputs |= zip(self.config.states, state.split(list(self.config.states.values()), -1), strict=True)
        prompts = [self.config.prompt or instruction for instruction in self.instructions(observation)]
        return {**inputs, PROMPT: as_bytes(prompts)}

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        return self.instructions(observation) if self.config.prompt is None else [0] * len(observation)

    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        rows = len(inputs[PROMPT])
        noise = None
        if do_sample and self.num_uniforms:
            uniforms = draw_uniforms(rows, self.num_uniforms) if uniforms is None else uniforms
            noise = self._noise(uniforms.unsqueeze(1)) * temperature**0.5
        chunks = self._run(inputs, noise)[0][:, 0]
        empty = torch.zeros(rows, 0, device=self.device)
        return ActionPrediction(chunks, empty, empty, torch.zeros(rows, device=self.device))

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        chunks, features = self._run(inputs, None)

        def sample(uniforms: Tensor) -> Tensor:
            noise = self._noise(uniforms)
            return chunks.expand(-1, uniforms.shape[1], -1, -1) if noise is None else self._run(inputs, noise)[0]

        return BaseActions(chunks, features, sample if samples else None)

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return lerobot's own loss, ``[B]``: the mean over rows, repeated for each row. Dropout is off."""
        # As in lerobot, a variational encoder's or flow's noise is drawn for all rows of a micro-batch together.
        if self.policy is None:
            raise ConfigError(
                "The policy runs in a separate interpreter (model.interpreter), but weights can only be trained in this process. Set "
                "model.interpreter=null model.override_config.trained=true"
            )
        batch = batch_of(inputs)
        seed = 0 if uniforms is None else int(float(uniforms[0, 0]) * 2**31)
        loss = self.runner.loss(batch, actions.cpu() * numbers(self.config.action_scale), seed)
        return loss.expand(len(actions))

    def _noise(self, uniforms: Tensor) -> Tensor | None:
        """Map uniforms ``[B, N, U]`` to normal noise ``[B, N, ...]``; return None for a policy that samples none."""
        shape = self.config.noise_shape
        return None if shape is None else standard_normal(uniforms.cpu()).unflatten(2, shape)

    def _run(self, inputs: Inputs, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return chunks ``[B, N, C, D]`` in env units, and features ``[B, F]``, on the model's device."""
        output: RunnerOutput = self.runner.run(batch_of(inputs), None if noise is None else noise.numpy())
        chunks = torch.from_numpy(output.chunks[:, :, : self.action_chunks_len].copy())
        chunks = chunks / numbers(self.config.action_scale)
        return chunks.to(self.device), torch.from_numpy(output.features.copy()).to(self.device)

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        raise ConfigError(f"A policy of lerobot has no log-probabilities here. Set {INSTEAD}")

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        raise ConfigError(f"A policy of lerobot has no log-probabilities here. Set {INSTEAD}")

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        if self.policy is not None:
            state = self.state_dict() if state_dict is None else state_dict
            weights = {name.removeprefix("policy."): x for name, x in state.items() if name.startswith("policy.")}
            self.runner.write(weights, Path(folder))


def start_runner(
    folder: str, config: LerobotConfig, interpreter: str | None, timeout_s: float = 60.0, start_timeout_s: float = 300.0
) -> LocalRunner | WorkerRunner:
    """Load a folder in this process, or in the Python chosen by ``interpreter_for``."""
    python = interpreter_for(interpreter)
    if python is None:
        return LocalRunner(folder, config)
    return WorkerRunner(python, folder, config, timeout_s, start_timeout_s)


def batch_of(inputs: Inputs) -> dict[str, Any]:
    """Convert the result of ``preprocess`` to the input of a runner."""
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in inputs.items() if name != PROMPT}
    return {**arrays, PROMPT: as_text(inputs[PROMPT])}


def as_bytes(texts: Sequence[str]) -> Tensor:
    """Encode texts as int16 ``[B, L]`` with one byte per value, padded with -1."""
    rows = [torch.tensor(list(text.encode()), dtype=torch.int16) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def as_text(rows: Tensor) -> list[str]:
    return [bytes(row[row >= 0].tolist()).decode() for row in rows.cpu()]


def numbers(scale: float | list[float]) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32)


def _check_sizes(config: LerobotConfig, action_dim: int, action_chunks_len: int) -> None:
    if (action_dim, action_chunks_len) != (config.action_dim, config.n_action_steps):
        raise ConfigError(
            f"model.action_token_len={action_dim} model.action_chunks_len={action_chunks_len}, but the folder's policy has "
            f"{config.action_dim} dimensions and executes {config.n_action_steps} actions per chunk of {config.chunk_size}. Set "
            f"model.action_token_len={config.action_dim} model.action_chunks_len={config.n_action_steps}, or change the number of "
            "actions by model.override_config.n_action_steps=<number>"
        )


def load_processor(tokenizer_config: TokenizerConfig, model_config: LerobotConfig, path: str | None) -> None:
    """Return None, because the runner loads the processors."""
