"""A policy on a server that uses openpi's protocol: ours (``rlinf serve``) or a third-party server."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlinf.errors import ConfigError, PolicyServerError
from rlinf.manifest import Manifest
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment.base import ActionModel, Inputs
from rlinf.models.sampling import draw_uniforms
from rlinf.options import override_text
from rlinf.serving import require_packages
from rlinf.serving.layouts import MessageLayout, check_layout, layout_of
from rlinf.types import ActionEvaluation, ActionPrediction, EnvSpec, Observation, Statistics

OWN = "rlinf"
"""Metadata key for the policy description sent by our servers."""
PROTOCOL = 1


class RemoteConfig(PreTrainedConfig):
    """How to connect to the policy; see ``ModelConfig``. The server returns actions in env units."""

    model_type = "remote"

    url: str | None = None
    keys: str | dict[str, Any] | None = None
    timeout_s: float = 60.0
    connect_timeout_s: float = 300.0
    api_key_env: str | None = None
    norm_stats: Statistics | None = None

    @classmethod
    def from_section(cls, section: ModelConfig) -> RemoteConfig:
        require_packages(f"model.url={section.url}")
        names = ("url", "keys", "timeout_s", "connect_timeout_s", "api_key_env")
        return cls(**{name: getattr(section, name) for name in names})


class RemotePolicy(ActionModel, nn.Module):
    """A client that requests actions from a server; it has no local weights, log-probabilities or gradients.

    Args:
        action_dim, action_chunks_len: Sizes for a third-party server; ours sends its own. Surplus actions are ignored.

    Attributes:
        manifest: Training conditions of the policy, or None if unknown.
        present: Conditions under which the server runs the policy, or None if unknown.
        rows_of_call: Batch size of our server's policy calls, or None if unknown.
    """

    config_class = RemoteConfig
    main_input_name = "observation"
    predicts_values: ClassVar[bool] = False
    has_logprobs: ClassVar[bool] = False
    fills_calls: ClassVar[bool] = False
    float32_modules: ClassVar[tuple[str, ...]] = ()
    value_head = None
    detach_value = True
    manifest: Manifest | None = None
    present: Manifest | None = None
    rows_of_call: int | None = None

    @classmethod
    def check_env(cls, config: RemoteConfig, env: EnvSpec) -> None:
        if config.keys is not None:
            layout = layout_of(config.keys, env.cameras)
            fix = f"model.keys=<other keys>, or env.cameras={override_text(list(env.cameras)[: len(layout.images)])}"
            check_layout(config.keys, layout, env.cameras, env.state_dim, f"env={env.name}", fix)

    @classmethod
    def check_rl(cls, config: RemoteConfig) -> None:
        raise ConfigError(
            f"model.url={config.url} is a remote policy; expected a policy with local weights to train. "
            "Set model.url=null model=openvla_tiny"
        )

    @classmethod
    def _from_config(cls, config: RemoteConfig, **arguments: Any) -> RemotePolicy:
        return cls(config, arguments["action_dim"], arguments["action_chunks_len"])

    def __init__(self, config: RemoteConfig, action_dim: int, action_chunks_len: int) -> None:
        from rlinf.serving.client import PolicyClient  # imports websockets, which is optional

        nn.Module.__init__(self)
        self.config = config
        key = _api_key(config.api_key_env)
        self.client = PolicyClient(config.url, config.timeout_s, config.connect_timeout_s, key)
        info = self.client.metadata.get(OWN)
        self.is_ours = isinstance(info, Mapping)
        self.action_dim, self.action_chunks_len = action_dim, action_chunks_len
        self._num_uniforms, self._batch_key = 0, None
        self.layout: MessageLayout | None = None
        if self.is_ours:
            self._take(info)
        elif config.keys is None:
            raise ConfigError(
                f"{config.url} does not describe its observation keys, so it is not `rlinf serve`; expected model.keys and action "
                "sizes. Set e.g. model.keys=libero model.action_token_len=7 model.action_chunks_len=5"
            )

    def _take(self, info: Mapping[str, Any]) -> None:
        if info.get("protocol") != PROTOCOL:
            problem = f"{self.config.url} uses version {info.get('protocol')} of our protocol"
            raise PolicyServerError(f"{problem}; expected {PROTOCOL}. Install the same version of rlinf on both sides")
        try:
            self.manifest = Manifest.from_text(info["manifest"], f"The manifest of {self.config.url}")
            self.present = Manifest.from_text(info["present"], f"The present of {self.config.url}")
            self.rows_of_call = int(info["max_batch"])
            self.action_dim, self.action_chunks_len = int(info["action_dim"]), int(info["action_chunks_len"])
            self._num_uniforms, self._batch_key = int(info["num_uniforms"]), str(info["batch_key"])
            self.layout = layout_of(info["keys"], [str(name) for name in info["client_cameras"]])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{self.config.url} sent incomplete policy information ({type(error).__name__}: {error})"
            raise PolicyServerError(f"{problem}. Install the same version of rlinf on both sides") from error

    @property
    def num_uniforms(self) -> int:
        return self._num_uniforms

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # received actions are on the CPU

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def preprocess(self, observation: Observation) -> dict[str, Any]:
        # The server does the preprocessing; the client only completes the instruction.
        return {"observation": replace(observation, instruction=self.instructions(observation))}

    def prompt_lengths(self, observation: Observation) -> Sequence[Hashable]:
        # The server groups rows by prompt.
        return [0] * len(observation)

    def predict_action_batch(
        self,
        *,
        do_sample: bool = True,
        temperature: float = 1.0,
        uniforms: Tensor | None = None,
        observation: Observation,
    ) -> ActionPrediction:
        layout = self.layout or layout_of(self.config.keys, list(observation.images))
        requests = [layout.request(observation, row) for row in range(len(observation))]
        if do_sample:
            self._add_draws(requests, temperature, uniforms)
        shape = (self.action_chunks_len, self.action_dim)
        if self._batch_key is None:
            actions = np.stack([self._actions(self.client.ask(request), shape) for request in requests])
        else:
            # Our server's limit of requests per message equals its number of rows per policy call.
            firsts = range(0, len(requests), self.rows_of_call)
            calls = [requests[first : first + self.rows_of_call] for first in firsts]
            replies = ((self.client.ask({self._batch_key: call}), len(call)) for call in calls)
            actions = np.concatenate([self._actions(reply, (count, *shape)) for reply, count in replies])
        empty = torch.zeros(len(actions), 0)
        return ActionPrediction(torch.from_numpy(actions), empty, empty, torch.zeros(len(actions)))

    def _add_draws(self, requests: Sequence[dict[str, Any]], temperature: float, uniforms: Tensor | None) -> None:
        if not self.is_ours:
            problem = f"{self.config.url} samples its actions itself"
            raise ConfigError(f"{problem}; expected no sampling by the client. Set evaluation.greedy=true")
        if uniforms is None:
            uniforms = draw_uniforms(len(requests), self.num_uniforms)
        for request, draws in zip(requests, uniforms.float().numpy(), strict=True):
            request |= {"uniforms": draws, "temperature": float(temperature)}

    def _actions(self, reply: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
        """Return the actions in a reply as float32 of ``shape``; the received chunk may be longer."""
        actions = reply.get("actions")
        if not isinstance(actions, np.ndarray):
            keys = ", ".join(map(str, reply)) or "nothing"
            raise PolicyServerError(f"{self.config.url} sent no actions, but {keys}")
        if actions.ndim != len(shape) or actions.shape[-1] != self.action_dim or actions.shape[:-2] != shape[:-2]:
            raise PolicyServerError(
                f"{self.config.url} sent actions of shape {list(actions.shape)}; expected {list(shape)}, {self.action_dim} dimensions per "
                f"action. Set model.action_token_len={actions.shape[-1] if actions.ndim else 0} and an env with such actions"
            )
        if actions.shape[-2] < self.action_chunks_len:
            raise PolicyServerError(
                f"{self.config.url} sent chunks of {actions.shape[-2]} actions; expected {self.action_chunks_len} "
                f"(model.action_chunks_len). Set model.action_chunks_len={actions.shape[-2]}"
            )
        actions = np.ascontiguousarray(actions[..., : self.action_chunks_len, :], dtype=np.float32)
        if not np.isfinite(actions).all():
            number = int((~np.isfinite(actions)).sum())
            raise PolicyServerError(
                f"{self.config.url} sent {number} values that are NaN or infinite. Check the server's log, or set "
                "model.url=<a different one>"
            )
        return actions

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        raise ConfigError(f"{self.config.url} returns no log-probabilities. Set model.url=null model=openvla_tiny")

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        raise ConfigError(f"{self.config.url} returns no log-probabilities. Set model.url=null model=openvla_tiny")


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"model.api_key_env={name}, but this variable is not set. Set export {name}=<server's key>")
    return None if name is None else os.environ[name]
