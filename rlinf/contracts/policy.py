"""Check that an action model acts as it is scored; ``rlinf diagnose model=... env=...`` prints the checks.

The first observations of four episodes are enough: no episode is played and nothing is learned. Log-probabilities may differ by
``MAX_GAP`` in float32; in other number formats ``mean(exp|difference|)`` is at most ``MAX_EXP_GAP``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlinf.contracts.report import BATCH_SIZES, Check
from rlinf.models.config import MAX_EXP_GAP
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.token_action_model import TokenActionModel
from rlinf.models.sampling import sample_tokens, token_logprobs
from rlinf.rollout.vllm_policy import VllmPolicy
from rlinf.types import ActionEvaluation, ActionPrediction, Observation

NUM_ROWS = max(BATCH_SIZES)
MAX_GAP = 1e-4
"""Largest accepted difference in float32: of log-probabilities in nats, of actions in fractions of their range."""
ROUNDED = 0.02
"""The same for the median of other number formats, where single tokens may be drawn again."""
NUM_DRAWS = 24
"""Calls whose samples are compared with the distribution that scores them."""
MAX_DEVIATIONS = 5.0
"""Standard errors by which a mean may be off."""
WARMER = 1.01
"""Temperatures whose entropies are compared differ by this factor."""


@dataclass
class PolicyChecker:
    """The checks of one policy. ``torch_checks`` needs the model only, ``vllm_checks`` an engine that runs it, ``remote_checks``
    a policy that acts elsewhere.

    Attributes:
        model: The policy as it is trained, in evaluation mode.
        observation: ``NUM_ROWS`` rows of the env.
        action_range: Largest minus smallest action of the env, float32 ``[D]``.
        temperature: Of the action distribution.
        is_exact: Weights and computation are float32.
        num_trained_rows: Rows of the backward pass, ``NUM_ROWS`` at most.
    """

    model: ActionModel
    observation: Observation
    action_range: Tensor
    temperature: float
    is_exact: bool
    num_trained_rows: int = NUM_ROWS

    @property
    def other_temperature(self) -> float:
        """A second temperature, which shows a temperature that is ignored; within the bounds of vLLM."""
        return self.temperature * 1.5 if self.temperature <= 1 else self.temperature / 1.5

    @property
    def prompts(self) -> dict[str, Observation]:
        """The observation with its instructions cut to half of their words, unless that changes nothing, and as it is."""
        words = [text.split() for text in self.observation.instruction]
        short = [" ".join(row[: -(-len(row) // 2)]) for row in words]
        prompts = {"short": replace(self.observation, instruction=short), "whole": self.observation}
        return {"whole": self.observation} if short == list(map(" ".join, words)) else prompts

    @property
    def mixed(self) -> Observation:
        """The observation with a short instruction in every second row, so that rows differ in length."""
        short = next(iter(self.prompts.values())).instruction
        rows = enumerate(zip(short, self.observation.instruction, strict=True))
        return replace(self.observation, instruction=[pair[row % 2] for row, pair in rows])

    def act(
        self,
        policy: ActionModel | VllmPolicy,
        observation: Observation,
        rows: Sequence[int] = range(NUM_ROWS),
        do_sample: bool = True,
        temperature: float | None = None,
        seed: int = 0,
        drawn: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], ActionPrediction]:
        """Return inputs and prediction of some rows. A row's random numbers do not depend on the others.

        ``drawn [NUM_ROWS, U]`` are the random numbers; None draws them from ``seed``.
        """
        inputs = policy.preprocess(observation.select(rows))
        if drawn is None:
            drawn = torch.rand(NUM_ROWS, policy.num_uniforms, generator=torch.Generator().manual_seed(seed))
        prediction = policy.predict_action_batch(
            do_sample=do_sample,
            temperature=temperature or self.temperature,
            uniforms=drawn.clamp_min(torch.finfo(torch.float32).tiny)[list(rows)] if do_sample else None,
            **inputs,
        )
        return inputs, prediction

    def score(self, inputs: dict[str, Tensor], sequences: Tensor, temperature: float | None = None) -> ActionEvaluation:
        """Score samples as the trainer does, from the columns of ``sequences`` that a rollout keeps."""
        sampled = sequences[:, -self.model.num_sampled :]
        return self.model.evaluate_actions(inputs, sampled, temperature or self.temperature)

    def agreement(self, name: str, found: Tensor, expected: Tensor) -> Check:
        """Compare log-probabilities."""
        gap = (found - expected).abs()
        if self.is_exact:
            return _bounded(name, gap.max(), MAX_GAP, "largest gap {:.1e}")
        return _bounded(name, gap.exp().mean(), MAX_EXP_GAP, "mean exp|gap| {:.4f}")

    def closeness(self, name: str, found: Tensor, expected: Tensor, scale: Tensor) -> Check:
        """Compare numbers ``[..., D]`` in fractions of ``scale [D]``."""
        difference = (found - expected).abs() / scale.to(found.device)
        if self.is_exact:
            return _bounded(name, difference.max(), MAX_GAP, "largest difference {:.1e}")
        return _bounded(name, difference.median(), ROUNDED, "median difference {:.1e}")

    @torch.no_grad()
    def torch_checks(self) -> list[Check]:
        """Run all checks of the policy in torch; only the first one, on which the others build, if it fails."""
        if not self.model.has_logprobs:
            return self.acting_checks()
        checks = [self.type_check()]
        if checks[0].passed:
            checks += [*self.rollout_checks(self.model, "torch"), self.transform_check(), *self.score_checks()]
            checks += [*self.input_checks(), *self.training_checks()]
        return checks

    def acting_checks(self) -> list[Check]:
        """Check a policy without log-probabilities: the shape of its actions, independent rows, draws that repeat."""
        actions, model = self.act(self.model, self.mixed)[1].actions, self.model
        shape = (NUM_ROWS, model.action_chunks_len, len(self.action_range))
        passed = actions.shape == shape and actions.dtype == torch.float32 and bool(actions.isfinite().all())
        found = f"{str(actions.dtype).removeprefix('torch.')} {list(actions.shape)}"
        detail = "as promised" if passed else f"{found}; required: finite float32 {list(shape)}"
        checks = [Check("torch: shapes, number formats", passed, detail)]
        if passed:
            checks += [*self.row_checks(model, "torch"), *self.repeat_checks(model, "torch")]
        return [*checks, Check("torch: log-probabilities", None, "it has none: nothing is compared with a score")]

    def remote_checks(self) -> list[Check]:
        """Check a policy that only acts, because it is elsewhere: its actions repeat and do not depend on other rows."""
        checks = []
        for kind, do_sample in (
            (("greedy", False), ("sampled", True)) if self.model.num_uniforms else (("greedy", False),)
        ):
            first, second = (self.act(self.model, self.mixed, do_sample=do_sample)[1].actions for _ in range(2))
            alone = [self.act(self.model, self.mixed, [row], do_sample)[1].actions for row in range(NUM_ROWS)]
            checks.append(self.closeness(f"remote: the same again, {kind} actions", second, first, self.action_range))
            name = f"remote: a row alone and in a batch, {kind} actions"
            checks.append(self.closeness(name, torch.cat(alone), first, self.action_range))
        return checks

    def type_check(self) -> Check:
        """Check the shapes and number formats that ``ActionModel`` promises, and that ``decode_actions``, if any, repeats the actions."""
        model = self.model
        inputs, prediction = self.act(model, self.mixed)
        evaluation = self.score(inputs, prediction.sequences)
        columns, float32 = (NUM_ROWS, model.num_logprobs), torch.float32
        wanted = {
            "actions": (prediction.actions, (NUM_ROWS, model.action_chunks_len, len(self.action_range))),
            "values": (prediction.values, (NUM_ROWS,)),
            "rollout_logprobs": (model.rollout_logprobs(prediction, self.temperature), columns),
            "evaluate_actions: logprobs": (evaluation.logprobs, columns),
            "evaluate_actions: entropy": (evaluation.entropy, columns),
            "evaluate_actions: values": (evaluation.values, (NUM_ROWS,)),
        }
        faults = [
            f"{name} {str(found.dtype).removeprefix('torch.')} {list(found.shape)}, required: float32 {list(shape)}"
            for name, (found, shape) in wanted.items()
            if (found.shape, found.dtype) != (shape, float32)
        ]
        faults += [f"{name} not finite" for name, (found, _) in wanted.items() if not found.isfinite().all()]
        for sequences in (prediction.sequences, prediction.sequences[:, -model.num_sampled :]):
            if faults or not model.implements("decode_actions"):
                break
            if not torch.equal(model.decode_actions(sequences), prediction.actions):
                faults.append("decode_actions(sequences) are other actions")
        return Check("torch: shapes, number formats, decoding", not faults, "; ".join(faults) or "as promised")

    @torch.no_grad()
    def rollout_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Check a policy that acts: it scores as the trainer does, its rows are independent, its draws repeat."""
        checks = self.parity_checks(policy, engine) + self.row_checks(policy, engine)
        return [*checks, *self.repeat_checks(policy, engine), self.draw_check(policy, engine)]

    def parity_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Compare log-probabilities of samples, and of greedy tokens (other greedy actions have none), with the model's."""
        name, checks, other = f"{engine}: rollout against training", [], self.other_temperature
        settings = [
            (observation, size, self.temperature, f"batch {size}, {length} prompts")
            for size, (length, observation) in itertools.product(BATCH_SIZES, self.prompts.items())
        ]
        settings.append((self.mixed, NUM_ROWS, other, f"batch {NUM_ROWS}, temperature {other:.3g}"))
        for (observation, size, temperature, setting), do_sample in itertools.product(settings, (False, True)):
            inputs, prediction = self.act(policy, observation, range(size), do_sample, temperature)
            if do_sample or not prediction.sequences.is_floating_point():
                found = policy.rollout_logprobs(prediction, temperature)
                expected = self.score(inputs, prediction.sequences, temperature).logprobs
                kind = "sampled" if do_sample else "greedy"
                checks.append(self.agreement(f"{name}, {setting}, {kind}", found, expected))
        if prediction.sequences.is_floating_point():
            checks.append(Check(f"{name}, greedy", None, "no tokens: only samples are scored"))
        return checks

    def row_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Compare the actions of a row alone and next to rows of other lengths."""
        checks = []
        for do_sample in (False, True):
            batch = self.act(policy, self.mixed, do_sample=do_sample)[1].actions
            alone = [self.act(policy, self.mixed, [row], do_sample)[1].actions for row in range(NUM_ROWS)]
            name = f"{engine}: a row alone and in a batch, {'sampled' if do_sample else 'greedy'} actions"
            checks.append(self.closeness(name, torch.cat(alone), batch, self.action_range))
        return checks

    def repeat_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Check that greedy actions repeat, and sampled ones with the same uniforms only."""
        checks = []
        for kind, do_sample in (("greedy", False), ("sampled, same uniforms", True)):
            first, second = (self.act(policy, self.mixed, do_sample=do_sample)[1].actions for _ in range(2))
            checks.append(self.closeness(f"{engine}: the same again, {kind}", second, first, self.action_range))
        one, other = (self.act(policy, self.mixed, seed=seed)[1].sequences[:, -policy.num_sampled :] for seed in (0, 1))
        num_equal = int((one == other).all(-1).sum())
        detail = f"{num_equal} of {NUM_ROWS} rows drew the same"
        return [*checks, Check(f"{engine}: other uniforms, other samples", num_equal < NUM_ROWS, detail)]

    def draw_check(self, policy: ActionModel | VllmPolicy, engine: str) -> Check:
        """Check that samples are as surprising as scored: the mean of ``-log p(sample)`` is the entropy.

        Rollout and training score the whole distribution, so both agree with a sampler that draws from another one (top-k,
        top-p, its own temperature). The entropy of a column is conditioned on the columns before it. The differences are
        therefore uncorrelated, and their mean has the standard error of a mean of independent numbers.

        Where no rare token was drawn, the variance of the sample is near 0 and says too little. So the variance of ``log p``
        counts as well: ``T dH/dT`` where logits are divided by ``T``, half the number of dimensions of a Gaussian. Two rare tokens
        more than expected are accepted.
        """
        differences, variances = [], []
        for seed in range(1, 1 + NUM_DRAWS):
            inputs, prediction = self.act(policy, self.observation, seed=seed)
            scored = self.score(inputs, prediction.sequences)
            warmer = self.score(inputs, prediction.sequences, WARMER * self.temperature)
            has_entropy = scored.entropy != 0
            differences.append((-scored.logprobs - scored.entropy)[has_entropy])
            variances.append(((warmer.entropy - scored.entropy) / (WARMER - 1))[has_entropy])
        name, difference = f"{engine}: samples are as surprising as scored", torch.cat(differences).double()
        if not len(difference):
            return Check(name, None, "the model gives no entropy")
        variance = max(float(difference.var()), float(torch.cat(variances).double().mean()))
        error = (variance / difference.numel()) ** 0.5
        two_rare = 2 * float(difference.abs().max()) / difference.numel()
        mean = float(difference.mean())
        detail = f"{mean:+.1e} nat from the entropy, error {error:.0e}"
        return Check(name, abs(mean) <= MAX_DEVIATIONS * error + two_rare + MAX_GAP, detail)

    def transform_check(self) -> Check:
        """Compare samples with the inverse transform of the scored distribution at given random numbers, half of them in its tails."""
        model, name = self.model, "torch: samples are those of the random numbers"
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_DRAWS // 4, NUM_ROWS, model.num_uniforms)
        drawn, tails = torch.rand(shape, generator=generator), 10.0 ** -(4.0 * torch.rand(shape, generator=generator))
        drawn[::4], drawn[2::4] = tails[::4], 1.0 - tails[2::4]
        found, expected = [], []
        for numbers in drawn:
            inputs, prediction = self.act(model, self.observation, drawn=numbers)
            logits, sequences = prediction.logits, prediction.sequences
            logprobs = model.rollout_logprobs(prediction, self.temperature)
            if model.num_uniforms != model.num_logprobs:
                return Check(name, None, "not one number for each log-probability")
            if sequences.is_floating_point():
                # For a Gaussian, log p = 1/2 - entropy - deviation^2 / 2.
                found.append(logprobs + self.score(inputs, sequences).entropy - 0.5)
                expected.append(-0.5 * torch.special.ndtri(numbers.double()).square().to(logprobs))
            else:
                if isinstance(model, TokenActionModel):  # ``logits`` may cover the whole vocabulary
                    logits = logits[..., -model.action_tokenizer.num_bins :]
                tokens = sample_tokens(logits, True, self.temperature, numbers.to(logits.device))
                found.append(logprobs)
                expected.append(token_logprobs(logits, tokens, self.temperature)[0])
        return self.agreement(name, torch.cat(found), torch.cat(expected))

    def score_checks(self) -> list[Check]:
        """Compare scores and values of a row alone and next to rows of other lengths."""
        inputs, prediction = self.act(self.model, self.mixed)
        batch, alone = self.score(inputs, prediction.sequences), []
        for row in range(NUM_ROWS):
            single = self.model.preprocess(self.mixed.select([row]))
            alone.append(self.score(single, prediction.sequences[row : row + 1]))
        logprobs, entropy, values = map(torch.cat, zip(*alone, strict=True))
        name, scale = "torch: a row alone and in a batch", batch.values.abs().max().clamp_min(1.0)
        found, expected = torch.cat([logprobs, entropy], 1), torch.cat([batch.logprobs, batch.entropy], 1)
        return [
            self.agreement(f"{name}, log-probs", found, expected),
            self.closeness(f"{name}, values", values[:, None], batch.values[:, None], scale),
        ]

    def input_checks(self) -> list[Check]:
        """Check that log-probabilities of the same samples change with another row's images, state or instruction.

        An input that ``preprocess`` leaves out is not read on purpose, so it is noted, not failed.
        """
        model, observation = self.model, self.mixed
        inputs, prediction = self.act(model, observation)
        before = self.score(inputs, prediction.sequences).logprobs
        others = observation.select(np.roll(np.arange(NUM_ROWS), 1))
        parts = {"images": observation.images, "state": observation.state, "instruction": observation.instruction}
        checks = []
        for part in [part for part, given in parts.items() if given is not None and len(given)]:
            name = f"torch: log-probs with another row's {part} differ"
            changed = model.preprocess(replace(observation, **{part: getattr(others, part)}))
            if all(torch.equal(changed[key], inputs[key]) for key in inputs):
                checks.append(Check(name, None, "not read, or equal in all rows"))
            else:
                checks.append(_difference(name, self.score(changed, prediction.sequences).logprobs, before))
        other = self.score(inputs, prediction.sequences, self.other_temperature).logprobs
        return [*checks, _difference("torch: log-probs at another temperature differ", other, before)]

    def training_checks(self) -> list[Check]:
        """Compare scores in training mode (dropout on) and in evaluation mode, and look for gradients.

        The model is left in evaluation mode and without gradients.
        """
        model, rows = self.model, range(self.num_trained_rows)
        inputs, prediction = self.act(model, self.mixed, rows)
        expected = self.score(inputs, prediction.sequences).logprobs
        model.train()
        with torch.enable_grad():
            evaluation = self.score(inputs, prediction.sequences)
            total = evaluation.logprobs.sum() + evaluation.entropy.sum() + evaluation.values.sum()
        if total.requires_grad:
            total.backward()
        model.eval()
        trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        idle = [name for name, gradient in trained.items() if gradient is None]
        faulty = [name for name, gradient in trained.items() if gradient is not None and not gradient.isfinite().all()]
        model.zero_grad(set_to_none=True)
        passed: bool | None = True
        detail = f"{len(trained) - len(idle)} of {len(trained)}"
        if faulty:
            passed, detail = False, f"{len(faulty)} of {len(trained)} not finite, as {_abridged(faulty[0])}"
        elif len(idle) == len(trained):
            passed = False
        elif idle:
            passed, detail = None, f"{detail}, not {_abridged(idle[0])}"
        name = "torch: training mode against evaluation mode, log-probs"
        return [
            self.agreement(name, evaluation.logprobs.detach(), expected),
            Check("torch: gradients reach the tensors that are trained", passed, detail),
        ]

    @torch.no_grad()
    def vllm_checks(self, policy: VllmPolicy) -> list[Check]:
        """Check the engine with the model's weights, and again after an update, which changes ``self.model`` for good."""
        if policy.engine.spec.engine_args["dtype"] != "float32" and self.is_exact:
            return replace(self, is_exact=False).vllm_checks(policy)
        policy.update_weights(1)
        checks = self.rollout_checks(policy, "vllm")
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * (0.2 * float(parameter.float().std(correction=0)) or 0.01))

        def logprobs() -> tuple[Tensor, Tensor]:
            inputs, prediction = self.act(policy, self.mixed)
            scored = self.score(inputs, prediction.sequences)
            return policy.rollout_logprobs(prediction, self.temperature), scored.logprobs

        found, expected = logprobs()
        stale = float((found - expected).abs().mean())
        policy.update_weights(2)
        found, expected = logprobs()
        fresh = float((found - expected).abs().mean())
        checks.append(self.agreement("vllm: rollout against training, after an update", found, expected))
        name, detail = "before the update was sent, log-probs differed", f"mean gap {stale:.1e}, afterwards {fresh:.1e}"
        return [*checks, Check(f"vllm: {name}", stale > max(MAX_GAP, 2 * fresh), detail)]


def _bounded(name: str, number: Tensor, limit: float, text: str) -> Check:
    return Check(name, float(number) <= limit, f"{text.format(float(number))}, limit {limit:g}")


def _difference(name: str, found: Tensor, expected: Tensor) -> Check:
    """Check that log-probabilities differ (a control)."""
    change = float((found - expected).abs().max())
    return Check(name, change > MAX_GAP, f"by {change:.1e}, required: more than {MAX_GAP:g}")


def _abridged(name: str, length: int = 28) -> str:
    """Return both ends of the name of a parameter."""
    return name if len(name) <= length else f"{name[: length // 2 - 2]}..{name[-length // 2 :]}"
