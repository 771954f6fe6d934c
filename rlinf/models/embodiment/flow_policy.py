"""Flow policies for reinforcement learning: run chains of denoising steps and compute their densities."""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.distributed.transfers import to_device
from rlinf.models.embodiment.base import ActionModel, Inputs
from rlinf.models.embodiment.modules.flow import denoising_times, gaussian_entropy, gaussian_logprobs, step_moments
from rlinf.models.loading import without_logprobs
from rlinf.models.sampling import draw_uniforms, standard_normal
from rlinf.types import ActionEvaluation, ActionPrediction

GREEDY_NOISE_SEED = 0


class FlowPolicy(ActionModel):
    """Generate a chunk of actions by ``n`` denoising steps from noise ``[B, H, D]``, including horizon and padding.

    **Density.** Each step ``x[i] -> x[i+1]`` is Gaussian, as set by ``noise_method`` (see ``step_moments``). With
    ``joint_logprob``, all steps are sampled, and a log-probability is the mean over ``n + 1`` terms: one per step and
    ``log N(x[0]; 0, 1)``. Otherwise, one randomly chosen step per row is sampled and scored, and the remaining ones are
    Euler steps. The ``A`` columns are the executed actions. Averaging follows public RL recipes, although the chain's density
    is the sum; it makes log-ratios ``n + 1`` times smaller. ``temperature`` multiplies the variance of the steps, but not
    of the initial noise.

    **Greedy actions** (``do_sample=False``) use Euler steps from one fixed noise for every row and call. Published
    evaluations draw new noise, which would make greedy results random.

    ``sequences`` contains the flattened chain ``[n + 1, H, D]`` and the chosen step (-1 means all). ``logits`` contains
    means and stds ``[B, n, H, D, 2]``, with the temperature applied. ``config`` must have ``num_steps``, ``noise_method``,
    ``noise_level`` and ``joint_logprob``.
    """

    noise_head: nn.Module | None

    @abstractmethod
    def encode_prefix(self, **inputs: Tensor) -> Any:
        """Compute the part of a pass common to all steps from the result of ``preprocess``."""

    @abstractmethod
    def velocity(self, prefix: Any, state: Tensor | None, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Predict ``noise - action`` at ``x [B, H, D]`` and ``t [B]`` in float32; also return the last outputs ``[B, H, W]``."""

    @abstractmethod
    def _chunk(self, x: Tensor) -> Tensor:
        """Truncate normalised actions ``[B, H, D]`` to the executed ones, in env units ``[B, C, action_dim]``."""

    def _step_values(self, prefix: Any, output: Tensor) -> Tensor:
        """Return a step's values ``[B]``, computed from its mean output."""
        return self._values(output.mean(1))

    def _graph_inputs(self, inputs: Inputs) -> Inputs:
        return inputs

    @classmethod
    def check_rl(cls, config: Any) -> None:
        if config.noise_method == "flow_ode":
            raise without_logprobs("noise_method", "flow_ode", "flow_sde")

    @property
    def predicts_values(self) -> bool:
        """Whether ``joint_logprob`` is set; otherwise, training evaluates only the chosen step and rollouts average all."""
        return self.values_in_rollouts(self.config)

    @classmethod
    def values_in_rollouts(cls, config: Any) -> bool:
        return config.joint_logprob

    @property
    def flow_shape(self) -> tuple[int, int]:
        """Shape of the initial noise: horizon and padded action dimensions."""
        return self.config.action_horizon, self.config.action_dim

    @property
    def _chunk_size(self) -> int:
        return math.prod(self.flow_shape)

    @property
    def num_sampled(self) -> int:
        return (self.config.num_steps + 1) * self._chunk_size + 1

    @property
    def num_uniforms(self) -> int:
        return (1 + (self.config.num_steps if self.config.joint_logprob else 1)) * self._chunk_size + 1

    @property
    def num_candidate_uniforms(self) -> int:
        return self._chunk_size

    def _transition(
        self, prefix: Any, state: Tensor | None, x: Tensor, step: Tensor, sampled: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, std and value of step ``step`` (int64 ``[B]``) starting at ``x [B, H, D]``.

        Rows where ``sampled`` (bool ``[B]``) is false use an Euler step without noise.
        """
        config, times = self.config, denoising_times(self.config.num_steps, x.device)
        t, t_next = times[step][:, None, None], times[step + 1][:, None, None]
        velocity, output = self.velocity(prefix, state, x, times[step])
        noise_std = None if self.noise_head is None else self.noise_head(output)
        grid = (x, velocity, t, t_next, times[1])
        mean, std = step_moments(config.noise_method, *grid, config.noise_level, noise_std)
        euler, zero = step_moments("flow_ode", *grid, config.noise_level)
        sampled = sampled[:, None, None]
        mean, std = torch.where(sampled, mean, euler), torch.where(sampled, std * temperature**0.5, zero)
        return mean, std, self._step_values(prefix, output)

    @torch.no_grad()
    def predict_action_batch(
        self, *, do_sample: bool = True, temperature: float = 1.0, uniforms: Tensor | None = None, **inputs: Tensor
    ) -> ActionPrediction:
        config = self.config
        batch, shape = len(inputs[self.main_input_name]), self.flow_shape
        if not do_sample:
            noise = self._greedy_noise(batch)
            no_step = torch.full((batch,), -1, device=self.device)
            return self.denoise(inputs, noise, torch.zeros_like(noise).unsqueeze(1), no_step, False, temperature)
        if uniforms is None:
            uniforms = draw_uniforms(batch, self.num_uniforms)
        uniforms = to_device(uniforms, self.device)
        drawn = standard_normal(uniforms[:, :-1]).unflatten(1, (-1, *shape))
        step = (uniforms[:, -1] * config.num_steps).long().clamp_max(config.num_steps - 1)
        if config.joint_logprob:
            step = torch.full_like(step, -1)
        return self.denoise(inputs, drawn[:, 0], drawn[:, 1:], step, config.joint_logprob, temperature)

    def _greedy_noise(self, num_rows: int) -> Tensor:
        """Return the fixed noise for greedy actions, ``[num_rows, H, D]``."""
        noise = torch.randn(self.flow_shape, generator=torch.Generator().manual_seed(GREEDY_NOISE_SEED))
        return to_device(noise, self.device).expand(num_rows, -1, -1)

    def _euler(self, prefix: Any, state: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Denoise ``x [B, H, D]`` without further noise; also return the last outputs."""
        times, output = denoising_times(self.config.num_steps, x.device), x
        for t, t_next in zip(times[:-1], times[1:], strict=True):
            velocity, output = self.velocity(prefix, state, x, t.expand(len(x)))
            x, _ = step_moments("flow_ode", x, velocity, t, t_next, times[1], self.config.noise_level)
        return x, output

    @torch.no_grad()
    def denoise(
        self, inputs: Inputs, noise: Tensor, step_noise: Tensor, step: Tensor, joint: bool, temperature: float
    ) -> ActionPrediction:
        """Run the chain from ``noise [B, H, D]`` and ``step_noise [B, n or 1, H, D]``.

        ``step`` (int64 ``[B]``) is the sampled step; -1 means none or, with ``joint``, all.
        """
        settings = (tuple(inputs), joint, temperature)
        if self._graphs is None:
            chain, moments, value = self._run_chain(noise, step_noise, step, *inputs.values(), *settings)
        else:
            tensors = (noise, step_noise, step, *self._graph_inputs(inputs).values())
            chain, moments, value = self._graphs.run(self._run_chain, tensors, *settings, weights=self.parameters)
        sequences = torch.cat([chain, step[:, None].float()], dim=1)
        return ActionPrediction(self.decode_actions(sequences), sequences, moments, value)

    def _run_chain(
        self, noise: Tensor, step_noise: Tensor, step: Tensor, *observed: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flattened chain, its means and stds, and values, for ``denoise``; non-tensor arguments are last."""
        # This function may be recorded as a CUDA graph, so its kernels must not depend on tensor values.
        *tensors, names, joint, temperature = observed
        inputs = dict(zip(names, tensors, strict=True))
        prefix, state = self.encode_prefix(**inputs), inputs.get("state")
        num_steps, chain, moments, values = self.config.num_steps, [noise], [], []
        for i, eps in enumerate(step_noise.expand(-1, num_steps, -1, -1).unbind(1)):
            present = torch.full_like(step, i)
            mean, std, value = self._transition(prefix, state, chain[-1], present, (step == i) | joint, temperature)
            chain.append(mean + std * eps)
            moments.append(torch.stack([mean, std], dim=-1))
            values.append(value)
        return torch.stack(chain, 1).flatten(1), torch.stack(moments, 1), torch.stack(values, 1).mean(1)

    def rollout_logprobs(self, prediction: ActionPrediction, temperature: float = 1.0) -> Tensor:
        chain, _ = self._split(prediction.sequences)
        terms = gaussian_logprobs(chain[:, 1:], *prediction.logits.unbind(-1))
        if self.config.joint_logprob:
            terms = torch.cat([_standard_logprobs(chain[:, :1]), terms], dim=1)
            return self._executed(terms.mean(1))
        return self._executed(terms.sum(1))  # all but the sampled step are 0

    def score_chain(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Score a complete chain, including horizon and padding, with gradients.

        With ``joint_logprob``, return log-densities and entropies ``[B, n + 1, H, D]`` and values ``[B, n]``; otherwise
        only those of the chosen step, ``[B, 1, H, D]`` and ``[B, 1]``. Entropies are 0 unless the std is learned
        (``flow_noise``). If no step was chosen (-1, a greedy chain), densities are 0 and the value is the first step's.
        """
        chain, chosen = self._split(sequences)
        prefix, state = self.encode_prefix(**inputs), inputs.get("state")
        joint, rows = self.config.joint_logprob, torch.arange(len(chain), device=chain.device)
        sampled = torch.ones_like(chosen, dtype=torch.bool) if joint else chosen >= 0
        steps = [torch.full_like(chosen, i) for i in range(self.config.num_steps)] if joint else [chosen.clamp_min(0)]
        initial = chain[:, 0]
        logprobs = [_standard_logprobs(initial)] if joint else []
        stds, values = [torch.ones_like(initial)] if joint else [], []
        for step in steps:
            mean, std, value = self._transition(prefix, state, chain[rows, step], step, sampled, temperature)
            logprobs.append(gaussian_logprobs(chain[rows, step + 1], mean, std))
            stds.append(std)
            values.append(value)
        entropy = gaussian_entropy(torch.stack(stds, 1))
        if self.config.noise_method != "flow_noise":
            entropy = torch.zeros_like(entropy)
        return torch.stack(logprobs, 1), entropy, torch.stack(values, 1)

    def evaluate_actions(self, inputs: Inputs, sequences: Tensor, temperature: float = 1.0) -> ActionEvaluation:
        logprobs, entropy, values = self.score_chain(inputs, sequences, temperature)
        return ActionEvaluation(self._executed(logprobs.mean(1)), self._executed(entropy.mean(1)), values.mean(1))

    def decode_actions(self, sequences: Tensor) -> Tensor:
        return self._chunk(self._split(sequences)[0][:, -1])

    def _split(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chain ``[B, n + 1, H, D]`` and the chosen step int64 ``[B]``."""
        sampled = sequences[:, -self.num_sampled :].float()
        return sampled[:, :-1].unflatten(1, (self.config.num_steps + 1, *self.flow_shape)), sampled[:, -1].long()

    def _executed(self, terms: Tensor) -> Tensor:
        """Truncate ``[B, H, D]`` to the executed actions, ``[B, A]``."""
        return terms[:, : self.action_chunks_len, : self.action_dim].flatten(1)


def _standard_logprobs(x: Tensor) -> Tensor:
    return gaussian_logprobs(x, torch.zeros_like(x), torch.ones_like(x))
