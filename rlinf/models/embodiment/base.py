"""The contract of an action model, and the one function that computes its log-probabilities."""

from __future__ import annotations

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
from rlinf.models.embodiment.modules.readout_token import NAME, ReadoutToken
from rlinf.models.loading import field_error
from rlinf.models.sampling import draw_uniforms
from rlinf.options import override_text
from rlinf.types import ActionEvaluation, ActionPrediction, BaseActions, EnvSpec, Observation

if TYPE_CHECKING:
    Module = nn.Module  # of every action model, by way of PreTrainedModel
else:
    Module = object

Inputs = dict[str, Tensor]
"""Result of ``ActionModel.preprocess``."""


class ActionModel(Module, metaclass=ABCMeta):
    """Mixin of every policy that acts in an environment; the other base is a Hugging Face ``PreTrainedModel``.

    Model code is single-device code. Class attributes declare how to shard it and where adapters go.

    Args:
        config: Configuration of the model.
        hidden_size: Width that the language model must have; None: not checked.
        unnorm_key: Data set whose statistics the actions are in; None: the only one.
        action_dim: ``D``, numbers of one action (``model.action_token_len``).
        action_chunks_len: ``C``, actions of one call (``model.action_chunks_len``).
        value_head: Add a value head; without one, values are 0.
        detach_value: Stop gradients at the value head's input.
        features: ``feature_kind``; a class with states of images and prompt takes it, and adds ``readout_token`` for ``token``.

    Attributes:
        fsdp_wrap_modules: Class names of the repeated blocks, which are sharded as units, recomputed and compiled.
        lora_target_modules: Default name suffixes (or a regular expression) of the linear layers to adapt.
        trained_in_full: First parts of the names of tensors that training changes, without an adapter, alongside LoRA.
        lora_exclude_modules: Regular expression of modules that never get an adapter, because no gradient reaches them.
        processor: Prompts and images to tensors; set by ``build_policy``.
        has_logprobs: Actions have log-probabilities, so policy gradients can train it.
        predicts_values: ``ActionPrediction.values`` equal the values of ``evaluate_actions`` for the same sample.
        float32_modules: First parts of the names of modules that stay float32 under ``model.precision=bf16``: heads.
        feature_kind: Which features ``propose`` returns: ``hidden``, ``pooled``, ``token`` or ``inputs`` (``model.features``).
        prompt_suffix: What it reads after each instruction (``model.prompt_suffix``).
        readout_token: Makes the features ``token`` from the states of images and prompt; None: not wanted, or no such states.
        fills_calls: An evaluation pads its calls to one number of rows, so that they round alike; a server does so itself.
        num_observations: Moments of an episode that it reads at once (``Observation.stack_history``); above 1, whoever asks remembers them.
        state_range: Where the statistics of the states that it reads lie, in env units; None: it has none.
        other_statistics: Overrides that replace statistics which do not fit the numbers of an env or a dataset.
        manifest: Of a remote policy: the conditions under which it was made; None: not known here.
        without_state: Overrides of a model that reads no state.
        vllm_adapter: ``module:Class`` that tells vLLM how to run the model (see ``OpenVLAVllmAdapter``); None: it cannot.
    """

    fsdp_wrap_modules: ClassVar[tuple[str, ...]] = ()
    lora_target_modules: ClassVar[tuple[str, ...] | str] = ()
    trained_in_full: ClassVar[tuple[str, ...]] = ("value_head", NAME)
    lora_exclude_modules: ClassVar[str | None] = None
    has_logprobs: ClassVar[bool] = True
    predicts_values: ClassVar[bool] = True
    float32_modules: ClassVar[tuple[str, ...]] = ("value_head", NAME)
    fills_calls: ClassVar[bool] = True
    vllm_adapter: ClassVar[str | None] = None
    without_state: ClassVar[str] = "model=openvla_tiny"
    other_statistics: ClassVar[str] = "model.unnorm_key={} 'model.override_config.norm_stats={{}}'"
    num_observations: int = 1
    manifest: Any = None
    processor: Any = None
    feature_kind: str = "hidden"
    prompt_suffix: str = ""
    _graphs: CudaGraphs | None = None
    state_range: Range | None = None
    readout_token: ReadoutToken | None
    _supports_sdpa: ClassVar[bool] = True  # transformers rejects the default kernel to a class that does not say so
    config: Any
    dtype: torch.dtype
    action_dim: int
    action_chunks_len: int = 1
    value_head: nn.Module | None
    detach_value: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = "_keep_in_fp32_modules_strict"  # transformers does not round these modules while it loads a folder
        bases = [base for base in cls.__mro__ if not issubclass(base, ActionModel)]
        inherited = {part for base in bases for part in vars(base).get(name) or ()}
        setattr(cls, name, inherited | set(cls.float32_modules))

    # -- checks of a configuration before the model is built --------------------------------------------------------

    @classmethod
    def num_cameras(cls, config: Any) -> int | None:
        """Return how many images the model reads, the first ones of the observation; None: all of the env's."""
        return getattr(config, "num_images_in_input", None)

    @classmethod
    def reads_state(cls, config: Any) -> bool:
        """Return whether the model reads ``Observation.state``; by default, whether ``config.state_dim`` is above 0."""
        return bool(getattr(config, "state_dim", None))

    @classmethod
    def check_env(cls, config: Any, env: EnvSpec) -> None:
        """Reject an environment that does not show the model's inputs. Neither of them is built yet.

        The default compares ``num_cameras``, and ``config.state_dim`` if it is above 0.
        """
        wanted, given = cls.num_cameras(config), len(env.cameras)
        own = vars(config).get("num_images_in_input", 1)
        if not isinstance(own, int) or own < 1:
            found = f"num_images_in_input={override_text(own)}; required: 1 or more, the cameras that the model sees"
            raise field_error(found, f"num_images_in_input={given or 1}")
        if wanted and given != wanted:
            known = list(env.cameras or env.default_cameras)
            fix = f"model.init_config.num_images_in_input={len(known)} for random weights, or {wanted} env.cameras"
            if not known:
                fix = "model=mlp, which reads no images, or env.cameras to cameras that the environment can render"
            if len(known) >= wanted:
                fix = f"env.cameras={override_text(known[:wanted])}"
            raise ConfigError(
                f"The model expects {wanted} camera{'s' * (wanted > 1)} (num_images_in_input={wanted}), but env.cameras has "
                f"{given}: {override_text(list(env.cameras))}. Set {fix}"
            )
        width = getattr(config, "state_dim", None)
        if width and env.state_dim not in (None, width):
            own = (
                f"model.init_config.state_dim={env.state_dim} for random weights, or model.model_path=<another folder>"
            )
            fix = env.override_for_state(width, width) or (own if env.state_dim else cls.without_state)
            raise ConfigError(
                f"The model reads a state of width {width} (state_dim), but env.name={env.name} gives "
                f"{f'one of width {env.state_dim}' if env.state_dim else 'no state'}. Set {fix}"
            )

    @classmethod
    def check_rl(cls, config: Any) -> None:
        """Reject settings without log-probabilities: such a policy can be cloned and evaluated, but not trained by RL."""

    @classmethod
    def check_sft(cls, config: Any) -> None:
        """Reject settings with which the policy cannot be cloned, although it has ``sft_loss``."""

    @classmethod
    def values_in_rollouts(cls, config: Any) -> bool:
        """Return ``predicts_values`` of a model with this configuration, before it is built."""
        return bool(cls.predicts_values)

    @classmethod
    def check_cuda_graph(cls, config: Any, attn_implementation: str) -> None:
        """Reject ``model.cuda_graph``, as the default does: a class that accepts it computes by ``_graphs`` if there are any."""
        raise ConfigError(
            f"model.cuda_graph=true records the policy call of OpenVLA, OpenVLA-OFT or pi0; {cls.__name__} has no part that is "
            "recorded. Set model.cuda_graph=false"
        )

    def use_cuda_graph(self) -> None:
        """Act by CUDA graphs from now on."""
        self._graphs = CudaGraphs()

    # -- properties ---------------------------------------------------------------------------------------------------

    def check_actions(self, low: np.ndarray, high: np.ndarray) -> None:
        """Raise ConfigError if the policy has learnt actions in other units than an env's, whose bounds are ``[D]`` each."""

    @property
    def action_range(self) -> Range | None:
        """Where the statistics of its actions lie, in env units; None: it has none."""
        return getattr(getattr(self, "action_normalizer", None), "range", None)

    @property
    def num_logprobs(self) -> int:
        """``A``, log-probability columns of one policy call."""
        return self.action_dim * self.action_chunks_len

    @property
    def num_sampled(self) -> int:
        """``K``, numbers that describe the sample of one call: the last columns of ``sequences``."""
        return self.num_logprobs

    @property
    def num_uniforms(self) -> int:
        """``U``, random numbers that one sampled call takes."""
        return self.num_logprobs

    @property
    def num_candidate_uniforms(self) -> int:
        """Random numbers that decide one sampled candidate of ``propose``; 0: there is only the greedy one."""
        return self.num_logprobs

    @property
    def steering_dim(self) -> int:
        """Numbers by which a head decides a candidate of ``propose`` (``steering_uniforms``)."""
        return self.num_candidate_uniforms

    def steering_uniforms(self, noise: Tensor) -> Tensor:
        """Return the uniforms ``[B, num_candidate_uniforms]`` of noise ``[B, steering_dim]``, in standard deviations.

        The default has one number for each uniform: 0 is the median of the samples.
        """
        return torch.special.ndtr(noise.double()).float()

    @property
    def input_moments(self) -> RunningMoments | None:
        """Statistics by which the policy normalises its state, which RL updates after each iteration; None: it does not."""
        return getattr(self, "state_moments", None)  # no class attribute: it would hide the module

    @property
    def feature_dim(self) -> int:
        """``F``, width of the features of ``propose``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement propose")

    @property
    def feature_dtype(self) -> torch.dtype:
        """Number format in which the features are stored."""
        return torch.float32

    def make_encoder(self) -> tuple[nn.Module, int]:
        """Return a new trainable encoder of the features ``inputs``, and the width of its output.

        Under ``feature_kind=inputs``, ``propose`` returns what the policy reads, as numbers, and a chunk in the middle of its range.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder of its own")

    @property
    def num_sft_uniforms(self) -> int:
        """Random numbers that ``sft_loss`` takes per row; 0 for a loss without any."""
        return 0

    @property
    def sft_chunk_len(self) -> int:
        """Actions per row of a demonstration for ``sft_loss``; more than are executed for models with a horizon."""
        return self.action_chunks_len

    @abstractmethod
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Turn an observation of ``B`` envs into tensors on the model's device, the keyword arguments of the two below."""

    def resize_images(self, observation: Observation) -> Observation:
        """Return the observation with its images resized, such that ``preprocess`` gives the same numbers with less work.

        Rollouts call this once for each observation, and record the result. An image must not become larger, because a
        rollout is held in memory. The default returns the observation itself.
        """
        return observation

    def instructions(self, observation: Observation) -> list[str]:
        """Return what the model reads of each row: the instruction, and the row's suffix or ``prompt_suffix``."""
        suffixes = observation.suffixes or [self.prompt_suffix] * len(observation)
        pairs = zip(observation.instruction, suffixes, strict=True)
        return [f"{sentence}. {suffix}" if suffix else sentence for sentence, suffix in pairs]

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        """Return one value per row, equal only for rows whose prompts are equally long.

        The evaluation plays such rows together, so that none is padded because of another. The default groups rows by
        instruction; a model that puts the state into its prompt must override it.
        """
        return self.instructions(observation)

    @abstractmethod
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs
    ) -> ActionPrediction:
        """Act, without gradients.

        Args:
            do_sample: False takes the most likely action.
            temperature: Divides the logits.
            uniforms: float32 ``[B, U]`` in (0, 1): the random numbers of the draw, by inverse transform sampling, so
                that an action depends on its own row only; None: drawn from torch's global generator.
            **inputs: Result of ``preprocess``.
        """

    def predict_values(self, **inputs: Tensor) -> Tensor:
        """Values float32 ``[B]`` of the result of ``preprocess``, without gradients."""
        return self.predict_action_batch(do_sample=False, **inputs).values

    @abstractmethod
    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        """Log-probabilities float32 ``[B, A]`` of a prediction, from its own logits and sequences alone."""

    @abstractmethod
    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        """Score given actions, with gradients; of ``sequences`` only the last ``K`` columns are read."""

    # -- optional: without them, a policy cannot be cloned, act through vLLM, or be the base of an off-policy head ----

    @torch.no_grad()
    def propose(
        self,
        inputs: Inputs,
        num_candidates: int = 1,
        uniforms: Tensor | None = None,
        *,
        resumable: bool = False,
    ) -> BaseActions:
        """Return candidate chunks and features of each observation, from one pass over its images and prompt.

        The first candidate equals ``predict_action_batch(do_sample=False)``, bit for bit. Under ``feature_kind=hidden``, the
        features are the states from which this action is read, one after the other; under ``pooled``, the mean over the
        positions of images and prompt; under ``token``, the output of ``readout_token`` for them.

        Args:
            inputs: Result of ``preprocess``.
            num_candidates: ``N``, at least 1.
            uniforms: float32 ``[B, N - 1, num_candidate_uniforms]`` in (0, 1). They decide the other candidates: token and
                Gaussian policies draw by inverse transform sampling, a flow policy starts with this noise and adds no other.
                None: drawn from torch's global generator. A policy that takes none repeats its greedy action.
            resumable: Return ``BaseActions.sample``, with which further chunks are drawn once the features are known.
        """
        shape = (len(inputs[self.main_input_name]), num_candidates - 1, self.num_candidate_uniforms)
        if num_candidates < 1:
            raise ValueError(f"num_candidates is {num_candidates}; required: at least 1, the greedy one.")
        if uniforms is None:
            uniforms = draw_uniforms(*shape)
        if uniforms.shape != shape:
            raise ValueError(
                f"uniforms are {list(uniforms.shape)}; required: {list(shape)}, the rows, the candidates without the greedy one, "
                f"and the random numbers that a candidate of {type(self).__name__} takes."
            )
        chunks, features, sample = self._propose(inputs, num_candidates > 1 or resumable)
        if sample is not None and num_candidates > 1:
            chunks = torch.cat([chunks, sample(to_device(uniforms, self.device))], dim=1)
        return BaseActions(chunks, features, sample if resumable else None)

    def _propose(self, inputs: Inputs, samples: bool) -> BaseActions:
        """Implement ``propose``: return the greedy chunk ``[B, 1, C, D]``, the features, and, if ``samples``, ``sample``.

        ``sample`` takes uniforms on the model's device, and may be called several times.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement propose")

    def _prefix_features(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the features ``pooled`` or ``token`` of the states ``[B, P, H]``; ``mask`` as in ``masked_mean``."""
        readout = self._readout
        return masked_mean(states, mask) if readout is None else readout(states, mask)

    @property
    def _readout(self) -> ReadoutToken | None:
        """``readout_token``; None also in a class that has never called ``_add_readout_token``."""
        return getattr(self, NAME, None)  # no class attribute: it would hide the module

    def _add_readout_token(self, features: str, hidden_size: int) -> None:
        """Set ``feature_kind``, and add the module that it needs, in the constructor."""
        self.feature_kind = features
        self.readout_token = ReadoutToken(hidden_size) if features == "token" else None

    def sft_loss(self, inputs: Inputs, actions: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Return the behaviour-cloning loss of ``actions [B, sft_chunk_len, D]`` in env units, one per row: float32 ``[B]``.

        With features ``token``, the loss of ``readout_token`` is added; it shares no weights with the other. ``uniforms`` are
        float32 ``[B, num_sft_uniforms]`` in (0, 1), its random numbers; None: drawn from torch's global generator.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement sft_loss")

    def decode_actions(self, sequences: Tensor) -> Tensor:
        """Decode the last ``K`` columns of ``sequences`` into actions in env units, float32 ``[B, C, D]``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement decode_actions")

    @classmethod
    def implements(cls, method: str) -> bool:
        """Return whether the class defines an optional method (of ``propose``: ``_propose``)."""
        return getattr(cls, method) is not getattr(ActionModel, method)

    def _camera_images(self, observation: Observation, wanted: int) -> list[np.ndarray]:
        """Return the images of the first ``wanted`` cameras, each uint8 ``[B, H, W, 3]``."""
        images = observation.images
        if len(images) < wanted:
            raise ConfigError(
                f"The model sees {wanted} cameras and the environment gives {len(images)} ({', '.join(images)}). "
                "Set env.cameras to more of them"
            )
        return list(images.values())[:wanted]

    def _ready_processor(self) -> Any:
        """Return ``processor``, or raise ConfigError without one."""
        if self.processor is None:
            raise ConfigError(
                "The model has no processor. Build it by rlinf.models.build_policy, or set model.processor"
            )
        return self.processor

    def _values(self, hidden_states: Tensor) -> Tensor:
        """Values float32 ``[B]`` of hidden states ``[B, H]``."""
        if self.value_head is None:
            return hidden_states.new_zeros(len(hidden_states), dtype=torch.float32)
        inputs = hidden_states.detach() if self.detach_value else hidden_states
        return self.value_head(inputs.to(next(self.value_head.parameters()).dtype))


def check_hidden_size(given: int | None, found: int) -> None:
    """Reject a ``hidden_size`` that is not the model's."""
    if given not in (None, found):
        raise ConfigError(
            f"model.hidden_size is {given}, but the model has {found}. "
            f"Set model.hidden_size={found} or model.hidden_size=null"
        )


def masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Mean float32 ``[B, H]`` of ``states [B, P, H]`` where ``mask``, bool ``[B, P]``, is true; None: of all."""
    if mask is None:
        return states.float().mean(1)
    weights = mask.float().unsqueeze(-1)
    return (states.float() * weights).sum(1) / weights.sum(1)
