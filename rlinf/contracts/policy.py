"""Check that an action model's actions follow its scored distribution; ``rlinf diagnose model=... env=...`` prints the checks.

The checks use the first observations of four episodes. In float32, log-probabilities may differ by ``MAX_GAP``; in all remaining number
formats, ``mean(exp|difference|)`` may be at most ``MAX_EXP_GAP``.
"""

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
"""Maximum accepted difference in float32: in nat for log-probabilities, and as a fraction of their range for actions."""
ROUNDED = 0.02
"""Maximum accepted median difference in lower-precision formats, in which rounding may change individual tokens."""
NUM_DRAWS = 24
"""Number of policy calls whose samples are compared with the scored distribution."""
MAX_DEVIATIONS = 5.0
"""Maximum accepted error of a mean, in standard errors."""
WARMER = 1.01
"""Ratio between the two temperatures whose entropies are compared."""


@dataclass
class PolicyChecker:
    """Checks a policy in torch (``torch_checks``), in vLLM (``vllm_checks``) or on a server (``remote_checks``).

    Attributes:
        action_range: The env's maximum minus minimum action, float32 ``[D]``.
        is_exact: Whether weights and computation are in float32.
        num_trained_rows: Batch size of the backward pass, at most ``NUM_ROWS``.
    """

    model: ActionModel
    observation: Observation
    action_range: Tensor
    temperature: float
    is_exact: bool
    num_trained_rows: int = NUM_ROWS

    @property
    def other_temperature(self) -> float:
        """A second temperature within vLLM's bounds, used to detect whether the temperature is ignored."""
        return self.temperature * 1.5 if self.temperature <= 1 else self.temperature / 1.5

    @property
    def prompts(self) -> dict[str, Observation]:
        """The observation with full instructions and, unless identical, with instructions truncated to half their length."""
        words = [text.split() for text in self.observation.instruction]
        short = [" ".join(row[: -(-len(row) // 2)]) for row in words]
        prompts = {"short": replace(self.observation, instruction=short), "full": self.observation}
        return {"full": self.observation} if short == list(map(" ".join, words)) else prompts

    @property
    def mixed(self) -> Observation:
        """The observation with a shortened instruction in every second row, so that prompt lengths differ."""
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
        """Return inputs and prediction for some rows; ``drawn [NUM_ROWS, U]`` are the random numbers, by default drawn from ``seed``."""
        # Draw for all rows, so that a row's random numbers do not depend on which rows are in the batch.
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
        """Score samples like the trainer, using the columns of ``sequences`` that a rollout stores."""
        sampled = sequences[:, -self.model.num_sampled :]
        return self.model.evaluate_actions(inputs, sampled, temperature or self.temperature)

    def agreement(self, name: str, actual: Tensor, expected: Tensor) -> Check:
        """Compare log-probabilities."""
        gap = (actual - expected).abs()
        if self.is_exact:
            return _bounded(name, gap.max(), MAX_GAP, "largest gap {:.1e}")
        return _bounded(name, gap.exp().mean(), MAX_EXP_GAP, "mean exp|gap| {:.4f}")

    def closeness(self, name: str, actual: Tensor, expected: Tensor, scale: Tensor) -> Check:
        """Compare values ``[..., D]`` as fractions of ``scale [D]``."""
        difference = (actual - expected).abs() / scale.to(actual.device)
        if self.is_exact:
            return _bounded(name, difference.max(), MAX_GAP, "largest difference {:.1e}")
        return _bounded(name, difference.median(), ROUNDED, "median difference {:.1e}")

    @torch.no_grad()
    def torch_checks(self) -> list[Check]:
        """Run all checks of the policy in torch; stop if the first check fails, because the remaining checks rely on it."""
        if not self.model.has_logprobs:
            return self.acting_checks()
        checks = [self.type_check()]
        if checks[0].passed:
            checks += [*self.rollout_checks(self.model, "torch"), self.transform_check(), *self.score_checks()]
            checks += [*self.input_checks(), *self.training_checks()]
        return checks

    def acting_checks(self) -> list[Check]:
        """Check action shapes, independence of rows and repeatable samples for a policy without log-probabilities."""
        actions, model = self.act(self.model, self.mixed)[1].actions, self.model
        shape = (NUM_ROWS, model.action_chunks_len, len(self.action_range))
        passed = actions.shape == shape and actions.dtype == torch.float32 and bool(actions.isfinite().all())
        actual = f"{str(actions.dtype).removeprefix('torch.')} {list(actions.shape)}"
        detail = "as required" if passed else f"{actual}; expected finite float32 {list(shape)}"
        checks = [Check("torch: shapes, number formats", passed, detail)]
        if passed:
            checks += [*self.row_checks(model, "torch"), *self.repeat_checks(model, "torch")]
        return [*checks, Check("torch: log-probabilities", None, "not available, so actions cannot be scored")]

    def remote_checks(self) -> list[Check]:
        """Check that the actions of a policy on a server are repeatable and do not depend on the rest of the batch."""
        checks = []
        for kind, do_sample in (
            (("greedy", False), ("sampled", True)) if self.model.num_uniforms else (("greedy", False),)
        ):
            first, second = (self.act(self.model, self.mixed, do_sample=do_sample)[1].actions for _ in range(2))
            single = [self.act(self.model, self.mixed, [row], do_sample)[1].actions for row in range(NUM_ROWS)]
            checks.append(self.closeness(f"remote: repeatable, {kind} actions", second, first, self.action_range))
            name = f"remote: a single row and in a batch, {kind} actions"
            checks.append(self.closeness(name, torch.cat(single), first, self.action_range))
        return checks

    def type_check(self) -> Check:
        """Check the shapes and dtypes of ``ActionModel``, and that ``decode_actions``, if implemented, returns the same actions."""
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
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, expected float32 {list(shape)}"
            for name, (tensor, shape) in wanted.items()
            if (tensor.shape, tensor.dtype) != (shape, float32)
        ]
        faults += [f"{name} not finite" for name, (tensor, _) in wanted.items() if not tensor.isfinite().all()]
        for sequences in (prediction.sequences, prediction.sequences[:, -model.num_sampled :]):
            if faults or not model.implements("decode_actions"):
                break
            if not torch.equal(model.decode_actions(sequences), prediction.actions):
                faults.append("decode_actions(sequences) differs from the actions")
        return Check("torch: shapes, number formats, decoding", not faults, "; ".join(faults) or "as required")

    @torch.no_grad()
    def rollout_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Check a rollout policy's parity with the trainer, independence of rows, and repeatable samples."""
        checks = self.parity_checks(policy, engine) + self.row_checks(policy, engine)
        return [*checks, *self.repeat_checks(policy, engine), self.draw_check(policy, engine)]

    def parity_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Compare log-probabilities of samples and greedy tokens with the model's; continuous greedy actions have no log-probability."""
        name, checks, other = f"{engine}: rollout against training", [], self.other_temperature
        settings = [
            (observation, size, self.temperature, f"batch {size}, {length} prompts")
            for size, (length, observation) in itertools.product(BATCH_SIZES, self.prompts.items())
        ]
        settings.append((self.mixed, NUM_ROWS, other, f"batch {NUM_ROWS}, temperature {other:.3g}"))
        for (observation, size, temperature, setting), do_sample in itertools.product(settings, (False, True)):
            inputs, prediction = self.act(policy, observation, range(size), do_sample, temperature)
            if do_sample or not prediction.sequences.is_floating_point():
                actual = policy.rollout_logprobs(prediction, temperature)
                expected = self.score(inputs, prediction.sequences, temperature).logprobs
                kind = "sampled" if do_sample else "greedy"
                checks.append(self.agreement(f"{name}, {setting}, {kind}", actual, expected))
        if prediction.sequences.is_floating_point():
            checks.append(Check(f"{name}, greedy", None, "no tokens, so only samples are scored"))
        return checks

    def row_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Compare a row's actions when it is run alone and in a batch with different prompt lengths."""
        checks = []
        for do_sample in (False, True):
            batch = self.act(policy, self.mixed, do_sample=do_sample)[1].actions
            single = [self.act(policy, self.mixed, [row], do_sample)[1].actions for row in range(NUM_ROWS)]
            name = f"{engine}: a single row and in a batch, {'sampled' if do_sample else 'greedy'} actions"
            checks.append(self.closeness(name, torch.cat(single), batch, self.action_range))
        return checks

    def repeat_checks(self, policy: ActionModel | VllmPolicy, engine: str) -> list[Check]:
        """Check that greedy actions are repeatable, and that sampled actions are repeatable only with the same uniforms."""
        checks = []
        for kind, do_sample in (("greedy", False), ("sampled, same uniforms", True)):
            first, second = (self.act(policy, self.mixed, do_sample=do_sample)[1].actions for _ in range(2))
            checks.append(self.closeness(f"{engine}: repeatable, {kind}", second, first, self.action_range))
        first, second = (
            self.act(policy, self.mixed, seed=seed)[1].sequences[:, -policy.num_sampled :] for seed in (0, 1)
        )
        num_equal = int((first == second).all(-1).sum())
        detail = f"{num_equal} of {NUM_ROWS} rows have the same sample"
        return [*checks, Check(f"{engine}: different uniforms, different samples", num_equal < NUM_ROWS, detail)]

    def draw_check(self, policy: ActionModel | VllmPolicy, engine: str) -> Check:
        """Check that samples come from the scored distribution: the mean of ``-log p(sample)`` must equal the entropy."""
        # If a sampler uses a different distribution (top-k, top-p, its own temperature), its log-probabilities still agree, so only this
        # check detects it. Each column's entropy is conditioned on the preceding columns, so the differences are uncorrelated and their
        # mean has the same standard error as for independent values. If the sample contains no rare tokens, its variance is too small, so
        # also use the variance of log p: T dH/dT if logits are divided by T (for a Gaussian, half the number of dimensions).
        # Accept two more rare tokens than expected.
        differences, variances = [], []
        for seed in range(1, 1 + NUM_DRAWS):
            inputs, prediction = self.act(policy, self.observation, seed=seed)
            scored = self.score(inputs, prediction.sequences)
            warmer = self.score(inputs, prediction.sequences, WARMER * self.temperature)
            has_entropy = scored.entropy != 0
            differences.append((-scored.logprobs - scored.entropy)[has_entropy])
            variances.append(((warmer.entropy - scored.entropy) / (WARMER - 1))[has_entropy])
        name, difference = f"{engine}: samples are from the scored distribution", torch.cat(differences).double()
        if not len(difference):
            return Check(name, None, "the model has no entropy")
        variance = max(float(difference.var()), float(torch.cat(variances).double().mean()))
        error = (variance / difference.numel()) ** 0.5
        two_rare = 2 * float(difference.abs().max()) / difference.numel()
        mean = float(difference.mean())
        detail = f"{mean:+.1e} nat from the entropy, error {error:.0e}"
        return Check(name, abs(mean) <= MAX_DEVIATIONS * error + two_rare + MAX_GAP, detail)

    def transform_check(self) -> Check:
        """Compare samples with the inverse transform of the scored distribution; half of the random numbers are in its tails."""
        model, name = self.model, "torch: samples are the inverse transform of the random numbers"
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_DRAWS // 4, NUM_ROWS, model.num_uniforms)
        drawn, tails = torch.rand(shape, generator=generator), 10.0 ** -(4.0 * torch.rand(shape, generator=generator))
        drawn[::4], drawn[2::4] = tails[::4], 1.0 - tails[2::4]
        actual, expected = [], []
        for numbers in drawn:
            inputs, prediction = self.act(model, self.observation, drawn=numbers)
            logits, sequences = prediction.logits, prediction.sequences
            logprobs = model.rollout_logprobs(prediction, self.temperature)
            if model.num_uniforms != model.num_logprobs:
                return Check(name, None, "needs one random number per log-prob")
            if sequences.is_floating_point():
                # For a Gaussian, log p = 1/2 - entropy - z^2 / 2, where z is the standardised sample.
                actual.append(logprobs + self.score(inputs, sequences).entropy - 0.5)
                expected.append(-0.5 * torch.special.ndtri(numbers.double()).square().to(logprobs))
            else:
                if isinstance(model, TokenActionModel):  # ``logits`` may be over the complete vocabulary
                    logits = logits[..., -model.action_tokenizer.num_bins :]
                tokens = sample_tokens(logits, True, self.temperature, numbers.to(logits.device))
                actual.append(logprobs)
                expected.append(token_logprobs(logits, tokens, self.temperature)[0])
        return self.agreement(name, torch.cat(actual), torch.cat(expected))

    def score_checks(self) -> list[Check]:
        """Compare a row's scores and values when it is run alone and in a batch with different prompt lengths."""
        inputs, prediction = self.act(self.model, self.mixed)
        batch, single = self.score(inputs, prediction.sequences), []
        for row in range(NUM_ROWS):
            row_inputs = self.model.preprocess(self.mixed.select([row]))
            single.append(self.score(row_inputs, prediction.sequences[row : row + 1]))
        logprobs, entropy, values = map(torch.cat, zip(*single, strict=True))
        name, scale = "torch: a single row and in a batch", batch.values.abs().max().clamp_min(1.0)
        actual, expected = torch.cat([logprobs, entropy], 1), torch.cat([batch.logprobs, batch.entropy], 1)
        return [
            self.agreement(f"{name}, log-probs", actual, expected),
            self.closeness(f"{name}, values", values[:, None], batch.values[:, None], scale),
        ]

    def input_checks(self) -> list[Check]:
        """Check that log-probabilities of the same samples change when images, state or instruction are taken from a different row."""
        model, observation = self.model, self.mixed
        inputs, prediction = self.act(model, observation)
        before = self.score(inputs, prediction.sequences).logprobs
        shifted = observation.select(np.roll(np.arange(NUM_ROWS), 1))
        parts = {"images": observation.images, "state": observation.state, "instruction": observation.instruction}
        checks = []
        for part in [part for part, given in parts.items() if given is not None and len(given)]:
            name = f"torch: log-probs with a different row's {part} differ"
            changed = model.preprocess(replace(observation, **{part: getattr(shifted, part)}))
            # If ``preprocess`` omits an input, it is intentionally unused, so this is not a failure.
            if all(torch.equal(changed[key], inputs[key]) for key in inputs):
                checks.append(Check(name, None, "not used, or equal in all rows"))
            else:
                checks.append(_difference(name, self.score(changed, prediction.sequences).logprobs, before))
        changed = self.score(inputs, prediction.sequences, self.other_temperature).logprobs
        return [*checks, _difference("torch: log-probs at a different temperature differ", changed, before)]

    def training_checks(self) -> list[Check]:
        """Compare scores in training and evaluation mode, and check gradients; leaves the model in evaluation mode without gradients."""
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
            passed, detail = False, f"{len(faulty)} of {len(trained)} not finite, e.g. {_abridged(faulty[0])}"
        elif len(idle) == len(trained):
            passed = False
        elif idle:
            passed, detail = None, f"{detail}, not {_abridged(idle[0])}"
        name = "torch: training mode against evaluation mode, log-probs"
        return [
            self.agreement(name, evaluation.logprobs.detach(), expected),
            Check("torch: gradients reach the trained tensors", passed, detail),
        ]

    @torch.no_grad()
    def vllm_checks(self, policy: VllmPolicy) -> list[Check]:
        """Check the engine with the model's weights, and again after an update, which permanently changes ``self.model``."""
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

        # Negative control: if stale weights also passed, the check after the update would be meaningless.
        actual, expected = logprobs()
        stale = float((actual - expected).abs().mean())
        policy.update_weights(2)
        actual, expected = logprobs()
        fresh = float((actual - expected).abs().mean())
        checks.append(self.agreement("vllm: rollout against training, after an update", actual, expected))
        name, detail = "before the update was sent, log-probs differed", f"mean gap {stale:.1e}, afterwards {fresh:.1e}"
        return [*checks, Check(f"vllm: {name}", stale > max(MAX_GAP, 2 * fresh), detail)]


def _bounded(name: str, number: Tensor, limit: float, text: str) -> Check:
    return Check(name, float(number) <= limit, f"{text.format(float(number))}, limit {limit:g}")


def _difference(name: str, actual: Tensor, expected: Tensor) -> Check:
    """Check that log-probabilities differ (a negative control)."""
    change = float((actual - expected).abs().max())
    return Check(name, change > MAX_GAP, f"by {change:.1e}, expected more than {MAX_GAP:g}")


def _abridged(name: str, length: int = 28) -> str:
    """Return both ends of a parameter name."""
    return name if len(name) <= length else f"{name[: length // 2 - 2]}..{name[-length // 2 :]}"
