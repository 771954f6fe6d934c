"""Defines ``ActionModel``, the base class of every policy that acts in an env."""

from abc import ABCMeta, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.algorithms.running_moments import RunningMoments
from rlinf.distributed.transfers import to_device
from rlinf.errors import ConfigError
from rlinf.models.cuda_graph import CudaGraphs
from rlinf.models.embodiment.modules.ranges import Range
from rlinf.models.embodiment.modules.readout_token import NAME, KeyframeReadout, ReadoutToken, make_readout, masked_mean
from rlinf.models.loading import field_error
from rlinf.models.sampling import draw_uniforms
from rlinf.options import override_text
from rlinf.types import ActionEvaluation, ActionPrediction, BaseActions, EnvSpec, Observation

if TYPE_CHECKING:
    Module = nn.Module  # every action model inherits it, e.g. through PreTrainedModel
else:
    Module = object

Inputs = dict[str, Tensor]
"""Result of ``ActionModel.preprocess``."""


class ActionModel(Module, metaclass=ABCMeta):
    """Base class of every policy that acts in an env; policies usually also inherit from ``PreTrainedModel``.

    Model code is single-device code. Class attributes declare how to shard the model and which modules to adapt.

    Args:
        config: The model's own configuration.
        hidden_size: Required width of the language model; None skips this check.
        unnorm_key: Data set whose statistics normalise the actions; None uses the only one.
        action_dim: ``D``, the number of action dimensions (``model.action_token_len``).
        action_chunks_len: ``C``, the number of actions per call.
        value_head: Add a value head; without one, values are 0.
        detach_value: Stop gradients at the value head's input.
        features: Sets ``feature_kind`` in classes with a language model, which add ``readout_token`` for ``token`` and ``keyframe``.

    Attributes:
        fsdp_wrap_modules: Class names of the layers that are sharded as units, recomputed and compiled.
        lora_target_modules: Default name suffixes (or a regular expression) of the linear layers to adapt.
        trained_in_full: Top-level modules that are trained directly, alongside the LoRA adapters.
        lora_exclude_modules: Regular expression of modules not to adapt, because they receive no gradient.
        processor: Converts prompts and images to tensors; set by ``build_policy``.
        has_logprobs: Whether actions have log-probabilities, which policy gradients need.
        predicts_values: Whether ``ActionPrediction.values`` equal ``evaluate_actions``' values for the same sample.
        float32_modules: Top-level modules (heads) that stay float32 under ``model.precision=bf16``.
        feature_kind: Features that ``propose`` returns; see ``model.features``.
        prompt_suffix: Text appended to each instruction (``model.prompt_suffix``).
        readout_token: Module that computes the ``token`` or ``keyframe`` features from the states of images and prompt.
        fills_calls: Whether evaluations pad calls to a fixed batch size, so that all calls round identically.
        num_observations: Number of stacked observations (``n_obs_steps``). If above 1, the caller tracks the history.
        state_range: Range of the state statistics in env units, or None without statistics.
        other_statistics: Overrides to suggest if the statistics do not fit an env or a dataset.
        manifest: Training conditions of a remote policy, or None if unknown.
        without_state: Overrides that select a model without state input.
        training_options: Entries of ``model.override_config`` that make the weights of a policy that only acts trainable.
        vllm_adapter: Class that runs the model in vLLM (see ``OpenVLAVllmAdapter``); None if unsupported.
    """

    fsdp_wrap_modules: ClassVar[tuple[str, ...]] = ()
    lora_target_modules: ClassVar[tuple[str, ...] | str] = ()
    trained_in_full: ClassVar[tuple[str, ...]] = ("value_head", NAME)
    lora_exclude_modules: ClassVar[str | None] = None
    has_logprobs: ClassVar[bool] = True
    predicts_values: ClassVar[bool] = True
    float32_modules: ClassVar[tuple[str, ...]] = ("value_head", NAME)
    fills_calls: ClassVar[bool] = True
    vllm_adapter: ClassVar[type | None] = None
    without_state: ClassVar[str] = "model=openvla_tiny"
    training_options: ClassVar[dict[str, Any]] = {}
    other_statistics: ClassVar[str] = "model.unnorm_key={} 'model.override_config.norm_stats={{}}'"
    num_observations: int = 1
    manifest: Any = None
    processor: Any = None
    feature_kind: str = "hidden"
    prompt_suffix: str = ""
    _graphs: CudaGraphs | None = None
    state_range: Range | None = None
    readout_token: ReadoutToken | KeyframeReadout | None
    # Unless a class declares this, transformers rejects the default attention kernel.
    _supports_sdpa: ClassVar[bool] = True
    config: Any
    dtype: torch.dtype
    action_dim: int
    action_chunks_len: int = 1
    value_head: nn.Module | None
    detach_value: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # transformers loads the modules listed in this attribute in float32, even if the rest is loaded in 16 bits.
        name = "_keep_in_fp32_modules_strict"
        bases = [base for base in cls.__mro__ if not issubclass(base, ActionModel)]
        inherited = {part for base in bases for part in vars(base).get(name) or ()}
        setattr(cls, name, inherited | set(cls.float32_modules))

    # -- checks of a configuration before the model is built --------------------------------------------------------

    @classmethod
    def num_cameras(cls, config: Any) -> int | None:
        """Return how many images of an observation the model reads, starting at the first; None means all."""
        return getattr(config, "num_images_in_input", None)

    @classmethod
    def reads_state(cls, config: Any) -> bool:
        """Return whether the model reads ``Observation.state``; by default, whether ``config.state_dim`` is positive."""
        return bool(getattr(config, "state_dim", None))

    @classmethod
    def check_env(cls, config: Any, env: EnvSpec) -> None:
        """Reject an env that does not provide the model's inputs; called before either is built.

        By default, compare ``num_cameras``, and ``config.state_dim`` if it is positive.
        """
        wanted, given = cls.num_cameras(config), len(env.cameras)
        num_images = vars(config).get("num_images_in_input", 1)
        if not isinstance(num_images, int) or num_images < 1:
            problem = f"num_images_in_input={override_text(num_images)}; expected 1 or more cameras"
            raise field_error(problem, f"num_images_in_input={given or 1}")
        if wanted and given != wanted:
            known = list(env.cameras or env.default_cameras)
            fix = f"model.init_config.num_images_in_input={len(known)} for random weights, or {wanted} env.cameras"
            if not known:
                fix = "model=mlp, which reads no images, or env.cameras to cameras that the environment can render"
            if len(known) >= wanted:
                fix = f"env.cameras={override_text(known[:wanted])}"
            raise ConfigError(
                f"The model expects {wanted} camera{'s' * (wanted > 1)} (num_images_in_input={wanted}), but env.cameras lists "
                f"{given}: {override_text(list(env.cameras))}. Set {fix}"
            )
        width = getattr(config, "state_dim", None)
        if width and env.state_dim not in (None, width):
            fix = f"model.init_config.state_dim={env.state_dim} for random weights, or model.model_path=<a different folder>"
            fix = env.override_for_state(width, width) or (fix if env.state_dim else cls.without_state)
            raise ConfigError(
                f"The model reads a state of width {width} (state_dim), but env.name={env.name} provides "
                f"{f'one of width {env.state_dim}' if env.state_dim else 'no state'}. Set {fix}"
            )

    @classmethod
    def check_rl(cls, config: Any) -> None:
        """Reject settings without log-probabilities, which RL needs but cloning and evaluation do not."""

    @classmethod
    def check_sft(cls, config: Any) -> None:
        """Reject settings for which ``sft_loss`` is unavailable, although the class implements it."""

    @classmethod
    def values_in_rollouts(cls, config: Any) -> bool:
        """Return ``predicts_values`` of a model with this configuration, before it is built."""
        return bool(cls.predicts_values)

    @classmethod
    def check_cuda_graph(cls, config: Any, attn_implementation: str) -> None:
        """Reject ``model.cuda_graph`` by default; classes that accept it must run calls through ``_graphs`` if set."""
        raise ConfigError(
            f"model.cuda_graph=true is supported by OpenVLA, OpenVLA-OFT and pi0, but not by {cls.__name__}. "
            "Set model.cuda_graph=false"
        )

    def use_cuda_graph(self) -> None:
        """Enable CUDA graphs for policy calls."""
        self._graphs = CudaGraphs()

    # -- properties ---------------------------------------------------------------------------------------------------

    def check_actions(self, low: np.ndarray, high: np.ndarray) -> None:
        """Raise ConfigError if the policy's action units differ from the units of the env's bounds, ``[D]`` each."""

    @property
    def action_range(self) -> Range | None:
        """Range of the action statistics in env units, or None without statistics."""
        return getattr(getattr(self, "action_normalizer", None), "range", None)

    @property
    def num_logprobs(self) -> int:
        """``A``, the number of log-probability columns per policy call."""
        return self.action_dim * self.action_chunks_len

    @property
    def num_sampled(self) -> int:
        """``K``, the number of values describing one call's sample: the last columns of ``sequences``."""
        return self.num_logprobs

    @property
    def num_uniforms(self) -> int:
        """``U``, the number of random numbers needed per sampled call."""
        return self.num_logprobs

    @property
    def num_candidate_uniforms(self) -> int:
        """Number of random numbers per sampled candidate in ``propose``; 0 if only the greedy one exists."""
        return self.num_logprobs

    @property
    def steering_dim(self) -> int:
        """Dimensions of the noise with which an actor steers a candidate in ``propose`` (see ``steering_uniforms``)."""
        return self.num_candidate_uniforms

    def steering_uniforms(self, noise: Tensor) -> Tensor:
        """Map noise ``[B, steering_dim]`` in units of std to uniforms ``[B, num_candidate_uniforms]``; 0 maps to the median."""
        return torch.special.ndtr(noise.double()).float()

    @property
    def input_moments(self) -> RunningMoments | None:
        """Running moments used to normalise the state and updated by RL after each iteration, or None if unused."""
        # No class attribute: it would hide the module of the same name.
        return getattr(self, "state_moments", None)

    @property
    def feature_dim(self) -> int:
        """``F``, the number of feature dimensions in ``propose``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement propose")

    @property
    def feature_dtype(self) -> torch.dtype:
        """Number format in which replay buffers store the features."""
        return torch.float32

    def make_encoder(self) -> tuple[nn.Module, int]:
        """Return a new trainable encoder for the ``inputs`` features, and its output width.

        With ``feature_kind=inputs``, ``propose`` returns the policy's inputs as one vector, and a mid-range chunk.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder of its own")

    @property
    def num_sft_uniforms(self) -> int:
        """Number of random numbers per row that ``sft_loss`` needs."""
        return 0

    @property
    def sft_chunk_len(self) -> int:
        """Number of actions per row that ``sft_loss`` reads; models with a horizon execute fewer."""
        return max(self.action_chunks_len, 0 if self._readout is None else self._readout.num_actions)

    @abstractmethod
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Convert an observation of ``B`` envs to tensors on the model's device: keyword arguments for the calls below."""

    def resize_images(self, observation: Observation) -> Observation:
        """Return the observation with resized images, so that ``preprocess`` returns the same values with less work.

        Rollouts call this once per observation and store the result in memory, so images must not grow.
        """
        return observation

    def instructions(self, observation: Observation) -> list[str]:
        """Return each row's instruction with its own suffix appended or, without one, ``prompt_suffix``."""
        suffixes = observation.suffixes or [self.prompt_suffix] * len(observation)
        pairs = zip(observation.instruction, suffixes, strict=True)
        return [f"{text}. {suffix}" if suffix else text for text, suffix in pairs]

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        """Return a value per row that is equal only for rows with equally long prompts; by default, the instructions.

        Evaluations batch rows with equal values, so that no row is padded. A model whose prompt includes the state
        must override this method.
        """
        return self.instructions(observation)

    @abstractmethod
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs
    ) -> ActionPrediction:
        """Predict actions, without gradients.

        Args:
            do_sample: Sample actions; if False, return the most likely ones.
            temperature: Divisor of the logits.
            uniforms: float32 ``[B, U]`` in (0, 1) for inverse transform sampling, so that an action depends only on its
                own row; None draws them from torch's global generator.
            **inputs: Result of ``preprocess``.
        """

    def predict_values(self, **inputs: Tensor) -> Tensor:
        """Return values float32 ``[B]`` for the result of ``preprocess``, without gradients."""
        return self.predict_action_batch(do_sample=False, **inputs).values

    @abstractmethod
    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        """Return log-probabilities float32 ``[B, A]`` of a prediction, computed from its logits and sequences."""

    @abstractmethod
    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        """Score given actions, with gradients; of ``sequences``, only the last ``K`` columns are read."""

    # -- optional methods, needed for cloning, vLLM, and actors on top of the policy -------------------------------------

    @torch.no_grad()
    def propose(
        self, inputs: Inputs, num_candidates: int = 1, uniforms: Tensor | None = None, *, resumable: bool = False
    ) -> BaseActions:
        """Return candidate chunks and features for each observation, from one pass over its images and prompt.

        The first candidate equals ``predict_action_batch(do_sample=False)`` bit for bit. ``hidden`` features are the
        concatenated states from which this action is read, ``pooled`` and ``keyframe`` are the mean state of images and
        prompt, and ``token`` is the output of ``readout_token`` for these states.

        Args:
            inputs: Result of ``preprocess``.
            num_candidates: ``N``, at least 1.
            uniforms: float32 ``[B, N - 1, num_candidate_uniforms]`` in (0, 1) for inverse transform sampling of the
                remaining candidates (in a flow, only the initial noise); None uses torch's global generator.
            resumable: Also return ``BaseActions.sample``, which can sample further chunks later.
        """
        shape = (len(inputs[self.main_input_name]), num_candidates - 1, self.num_candidate_uniforms)
        if num_candidates < 1:
            raise ValueError(f"num_candidates is {num_candidates}; expected at least 1, for the greedy candidate.")
        if uniforms is None:
            uniforms = draw_uniforms(*shape)
        if uniforms.shape != shape:
            raise ValueError(
                f"uniforms has the shape {list(uniforms.shape)}; expected {list(shape)}, i.e. rows, candidates except the greedy one, "
                f"and random numbers per candidate of {type(self).__name__}."
            )
        chunks, features, sample = self._propose(inputs, num_candidates > 1 or resumable)
        if sample is not None and num_candidates > 1:
            chunks = torch.cat([chunks, sample(to_device(uniforms, self.device))], dim=1)
        return BaseActions(chunks, features, sample if resumable else None)

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        """Implement ``propose``: return the greedy chunk ``[B, 1, C, D]``, the features, and ``sample`` if ``samples``.

        ``sample`` expects uniforms on the model's device and may be called several times.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement propose")

    def _prefix_features(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return features other than ``hidden`` for states ``[B, P, H]``; for ``mask`` see ``masked_mean``."""
        readout = self._readout
        return masked_mean(states, mask) if readout is None else readout(states, mask)

    @property
    def _readout(self) -> ReadoutToken | KeyframeReadout | None:
        """``readout_token``, or None, including for classes that never call ``_add_readout_token``."""
        # No class attribute: it would hide the module of the same name.
        return getattr(self, NAME, None)

    def _add_readout_token(self, features: str, hidden_size: int, action_dim: int, state_dim: int = 0) -> None:
        """Set ``feature_kind`` and add the module it needs; constructors call this."""
        self.feature_kind = features
        self.readout_token = make_readout(features, hidden_size, action_dim, state_dim)

    def _motion(self, actions: Tensor) -> Tensor:
        """Normalise actions ``[B, N, D]`` so that a zero action stays 0."""
        normalize = self.action_normalizer.normalize
        return to_device((normalize(actions) - normalize(torch.zeros_like(actions))).float(), self.device)

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the cloning loss per row, float32 ``[B]``, for ``actions [B, sft_chunk_len, D]`` in env units.

        With ``token`` and ``keyframe`` features, the loss of ``readout_token`` is added. ``uniforms`` are float32
        ``[B, num_sft_uniforms]`` in (0, 1); None draws them from torch's global generator.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement sft_loss")

    def decode_actions(self, sequences: Tensor) -> Tensor:
        """Decode the last ``K`` columns of ``sequences`` into actions in env units, float32 ``[B, C, D]``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement decode_actions")

    @classmethod
    def implements(cls, method: str) -> bool:
        """Return whether the class overrides an optional method (for ``propose``, whether it overrides ``_propose``)."""
        return getattr(cls, method) is not getattr(ActionModel, method)

    def _camera_images(self, observation: Observation, count: int) -> list[np.ndarray]:
        """Return the images of the first ``count`` cameras, each uint8 ``[B, H, W, 3]``."""
        images = observation.images
        if len(images) < count:
            raise ConfigError(
                f"The model reads {count} cameras, but the environment provides {len(images)} ({', '.join(images)}). "
                "Set env.cameras to include more"
            )
        return list(images.values())[:count]

    def _ready_processor(self) -> Any:
        """Return ``processor``, or raise ConfigError if it is not set."""
        if self.processor is None:
            raise ConfigError("The model has no processor. Use rlinf.models.build_policy, or set model.processor")
        return self.processor

    def _values(self, hidden_states: Tensor) -> Tensor:
        """Return values float32 ``[B]`` for hidden states ``[B, H]``."""
        if self.value_head is None:
            return hidden_states.new_zeros(len(hidden_states), dtype=torch.float32)
        inputs = hidden_states.detach() if self.detach_value else hidden_states
        return self.value_head(inputs.to(next(self.value_head.parameters()).dtype))


def check_hidden_size(given: int | None, actual: int) -> None:
    """Reject a ``hidden_size`` that differs from the model's."""
    if given not in (None, actual):
        raise ConfigError(
            f"model.hidden_size is {given}, but the model has {actual}. "
            f"Set model.hidden_size={actual} or model.hidden_size=null"
        )
