"""Does a policy act as it is scored? ``rlinf diagnose model=... env=...`` prints the answers for an action model.

The first observations of four episodes are enough: nothing is played and nothing is learned. In float32 log-probabilities may
differ by ``MAX_GAP``, else ``mean(exp|difference|)`` by ``THRESHOLD``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlinf.checks.language_model import BATCH_SIZES, THRESHOLD, DiagnosticCheck
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.sampling import sample_tokens, token_logprobs
from rlinf.rollout.vllm_policy import VllmPolicy
from rlinf.types import ActionEvaluation, ActionPrediction, Observation

NUM_ROWS = max(BATCH_SIZES)
MAX_GAP = 1e-4
"""Largest accepted difference in float32: of log-probabilities in nats, of actions in shares of their range."""
ROUNDED = 0.02
"""The same for the median of other number formats, where single tokens may be drawn again."""
NUM_DRAWS = 24
"""Calls whose samples are compared with the distribution that scores them."""
MAX_DEVIATIONS = 5.0
"""Standard errors by which a mean may be off."""
WARMER = 1.01
"""Temperatures whose entropies are compared differ by this factor."""


@dataclass
class Trial:
    """A policy, and what it is tried on.

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
        """Another temperature, at which a faulty one shows; no higher than vLLM samples."""
        return self.temperature * 1.5 if self.temperature <= 1 else self.temperature / 1.5

    @property
    def prompts(self) -> dict[str, Observation]:
        """The observation with its instructions cut to half of their words, and as it is; one only, where these are equal."""
        words = [text.split() for text in self.observation.instruction]
        short = [" ".join(row[: -(-len(row) // 2)]) for row in words]
        whole = {"whole": self.observation}
        return (
            whole
            if short == list(map(" ".join, words))
            else {"short": replace(self.observation, instruction=short)} | whole
        )

    @property
    def mixed(self) -> Observation:
        """The observation with a short instruction in every second row, so that rows differ in length."""
        short = next(iter(self.prompts.values())).instruction
        rows = enumerate(zip(short, self.observation.instruction, strict=True))
        return replace(self.observation, instruction=[pair[row % 2] for row, pair in rows])

    def act(
        self,
        player: ActionModel | VllmPolicy,
        observation: Observation,
        rows: Sequence[int] = range(NUM_ROWS),
        do_sample: bool = True,
        temperature: float | None = None,
        seed: int = 0,
        drawn: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], ActionPrediction]:
        """Inputs and prediction of some rows; a row's random numbers do not depend on the others.

        ``drawn [NUM_ROWS, U]`` are these numbers; None: those of ``seed``.
        """
        inputs = player.preprocess(observation.select(rows))
        if drawn is None:
            drawn = torch.rand(NUM_ROWS, player.num_uniforms, generator=torch.Generator().manual_seed(seed))
        prediction = player.predict_action_batch(
            do_sample=do_sample,
            temperature=temperature or self.temperature,
            uniforms=drawn.clamp_min(torch.finfo(torch.float32).tiny)[list(rows)] if do_sample else None,
            **inputs,
        )
        return inputs, prediction

    def score(self, inputs: dict[str, Tensor], sequences: Tensor, temperature: float | None = None) -> ActionEvaluation:
        """Score what was sampled as the trainer does, from the columns of ``sequences`` that a rollout keeps."""
        sampled = sequences[:, -self.model.num_sampled :]
        return self.model.evaluate_actions(inputs, sampled, temperature or self.temperature)

    def agreement(self, name: str, found: Tensor, expected: Tensor) -> DiagnosticCheck:
        """Compare log-probabilities."""
        gap = (found - expected).abs()
        if self.is_exact:
            number, limit, text = float(gap.max()), MAX_GAP, "largest gap {:.1e}, limit {:g}"
        else:
            number, limit, text = float(gap.exp().mean()), THRESHOLD, "mean exp|gap| {:.4f}, limit {:g}"
        return DiagnosticCheck(name, number <= limit, text.format(number, limit))

    def closeness(self, name: str, found: Tensor, expected: Tensor, scale: Tensor) -> DiagnosticCheck:
        """Compare numbers ``[..., D]`` in shares of ``scale [D]``."""
        difference = (found - expected).abs() / scale.to(found.device)
        if self.is_exact:
            number, limit, text = float(difference.max()), MAX_GAP, "largest difference {:.1e}, limit {:g}"
        else:
            number, limit, text = float(difference.median()), ROUNDED, "median difference {:.1e}, limit {:g}"
        return DiagnosticCheck(name, number <= limit, text.format(number, limit))


def torch_checks(trial: Trial) -> list[DiagnosticCheck]:
    """All checks of the policy in torch, once it has passed ``type_check``."""
    return [
        *player_checks(trial, trial.model, "torch"),
        transform_check(trial),
        *score_checks(trial),
        *input_checks(trial),
        *training_checks(trial),
    ]


@torch.no_grad()
def type_check(trial: Trial) -> DiagnosticCheck:
    """Shapes and number formats that ``ActionModel`` promises, and actions that ``decode_actions`` gives again."""
    model = trial.model
    inputs, prediction = trial.act(model, trial.mixed)
    evaluation = trial.score(inputs, prediction.sequences)
    columns, float32 = (NUM_ROWS, model.num_logprobs), torch.float32
    wanted = {
        "actions": (prediction.actions, (NUM_ROWS, model.action_chunks_len, len(trial.action_range))),
        "values": (prediction.values, (NUM_ROWS,)),
        "rollout_logprobs": (model.rollout_logprobs(prediction, trial.temperature), columns),
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
    if not faults and not torch.equal(model.decode_actions(prediction.sequences), prediction.actions):
        faults.append("decode_actions(sequences) are other actions")
    return DiagnosticCheck("torch: shapes, number formats, decoding", not faults, "; ".join(faults) or "as promised")


@torch.no_grad()
def player_checks(trial: Trial, player: ActionModel | VllmPolicy, engine: str) -> list[DiagnosticCheck]:
    """Checks of what acts: scores as the trainer's, rows that are independent, draws that repeat."""
    return [
        *parity_checks(trial, player, engine),
        *row_checks(trial, player, engine),
        *repeat_checks(trial, player, engine),
        draw_check(trial, player, engine),
    ]


@torch.no_grad()
def parity_checks(trial: Trial, player: ActionModel | VllmPolicy, engine: str) -> list[DiagnosticCheck]:
    """Log-probabilities of ``player`` against those of ``trial.model`` on the same samples.

    The most likely tokens are compared as well. Greedy actions that are not tokens have no log-probabilities.
    """
    name, checks, other = f"{engine}: rollout against training", [], trial.other_temperature
    settings = [
        (observation, size, trial.temperature, f"batch {size}, {length} prompts")
        for size, (length, observation) in itertools.product(BATCH_SIZES, trial.prompts.items())
    ]
    settings.append((trial.mixed, NUM_ROWS, other, f"batch {NUM_ROWS}, temperature {other:.3g}"))
    for (observation, size, temperature, setting), do_sample in itertools.product(settings, (False, True)):
        inputs, prediction = trial.act(player, observation, range(size), do_sample, temperature)
        if do_sample or not prediction.sequences.is_floating_point():
            found = player.rollout_logprobs(prediction, temperature)
            expected = trial.score(inputs, prediction.sequences, temperature).logprobs
            kind = "sampled" if do_sample else "greedy"
            checks.append(trial.agreement(f"{name}, {setting}, {kind}", found, expected))
    if prediction.sequences.is_floating_point():
        checks.append(DiagnosticCheck(f"{name}, greedy", None, "no tokens: only samples are scored"))
    return checks


@torch.no_grad()
def row_checks(trial: Trial, player: ActionModel | VllmPolicy, engine: str) -> list[DiagnosticCheck]:
    """Actions of a row alone, and next to rows of other lengths."""
    checks = []
    for do_sample in (False, True):
        batch = trial.act(player, trial.mixed, do_sample=do_sample)[1].actions
        alone = [trial.act(player, trial.mixed, [row], do_sample)[1].actions for row in range(NUM_ROWS)]
        name = f"{engine}: a row alone and in a batch, {'sampled' if do_sample else 'greedy'} actions"
        checks.append(trial.closeness(name, torch.cat(alone), batch, trial.action_range))
    return checks


@torch.no_grad()
def repeat_checks(trial: Trial, player: ActionModel | VllmPolicy, engine: str) -> list[DiagnosticCheck]:
    """Greedy actions repeat; sampled ones repeat with the same uniforms, and with these only."""
    checks = []
    for kind, do_sample in (("greedy", False), ("sampled, same uniforms", True)):
        first, second = (trial.act(player, trial.mixed, do_sample=do_sample)[1].actions for _ in range(2))
        checks.append(trial.closeness(f"{engine}: the same again, {kind}", second, first, trial.action_range))
    one, other = (trial.act(player, trial.mixed, seed=seed)[1].sequences[:, -player.num_sampled :] for seed in (0, 1))
    num_equal = int((one == other).all(-1).sum())
    detail = f"{num_equal} of {NUM_ROWS} rows drew the same"
    return [*checks, DiagnosticCheck(f"{engine}: other uniforms, other samples", num_equal < NUM_ROWS, detail)]


@torch.no_grad()
def draw_check(trial: Trial, player: ActionModel | VllmPolicy, engine: str) -> DiagnosticCheck:
    """Whether samples are as surprising as their distribution says: the mean of ``-log p(sample)`` is its entropy.

    Rollout and training score the whole distribution, so a sampler that draws from another one (top-k, top-p, a temperature of its
    own) agrees with both. The entropy is that of each column given the columns before it, so the differences are uncorrelated,
    and their mean has the standard error of independent ones. That of the sample is near 0 where no rare token was drawn, so the
    distribution's own counts as well: the variance of ``log p``, which is ``T dH/dT`` where the logits are divided by ``T``, and is
    half the number of dimensions of a Gaussian. Rare tokens are few, and two more of them than expected accuse nobody.
    """
    differences, variances = [], []
    for seed in range(1, 1 + NUM_DRAWS):
        inputs, prediction = trial.act(player, trial.observation, seed=seed)
        scored = trial.score(inputs, prediction.sequences)
        warmer = trial.score(inputs, prediction.sequences, WARMER * trial.temperature)
        has_entropy = scored.entropy != 0
        differences.append((-scored.logprobs - scored.entropy)[has_entropy])
        variances.append(((warmer.entropy - scored.entropy) / (WARMER - 1))[has_entropy])
    name, difference = f"{engine}: samples are as surprising as scored", torch.cat(differences).double()
    if not len(difference):
        return DiagnosticCheck(name, None, "the model gives no entropy")
    variance = max(float(difference.var()), float(torch.cat(variances).double().mean()))
    error = (variance / difference.numel()) ** 0.5
    two_rare = 2 * float(difference.abs().max()) / difference.numel()
    mean = float(difference.mean())
    return DiagnosticCheck(
        name,
        abs(mean) <= MAX_DEVIATIONS * error + two_rare + MAX_GAP,
        f"{mean:+.1e} nat from the entropy, error {error:.0e}",
    )


@torch.no_grad()
def transform_check(trial: Trial) -> DiagnosticCheck:
    """Compare samples with the inverse transform of the scored distribution at the given random numbers, half of them in its tails."""
    model, name = trial.model, "torch: samples are those of the random numbers"
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_DRAWS // 4, NUM_ROWS, model.num_uniforms)
    drawn, tails = torch.rand(shape, generator=generator), 10.0 ** -(4.0 * torch.rand(shape, generator=generator))
    drawn[::4], drawn[2::4] = tails[::4], 1.0 - tails[2::4]
    found, expected = [], []
    for numbers in drawn:
        inputs, prediction = trial.act(model, trial.observation, drawn=numbers)
        logits, sequences = prediction.logits, prediction.sequences
        logprobs = model.rollout_logprobs(prediction, trial.temperature)
        if model.num_uniforms != model.num_logprobs:
            return DiagnosticCheck(name, None, "not one number for each log-probability")
        if sequences.is_floating_point():
            # Of a Gaussian: log p = 1/2 - entropy - deviation^2 / 2.
            found.append(logprobs + trial.score(inputs, sequences).entropy - 0.5)
            expected.append(-0.5 * torch.special.ndtri(numbers.double()).square().to(logprobs))
        else:
            tokens = sample_tokens(logits, True, trial.temperature, numbers.to(logits.device))
            found.append(logprobs)
            expected.append(token_logprobs(logits, tokens, trial.temperature)[0])
    return trial.agreement(name, torch.cat(found), torch.cat(expected))


@torch.no_grad()
def score_checks(trial: Trial) -> list[DiagnosticCheck]:
    """Scores and values of a row alone, and next to rows of other lengths."""
    inputs, prediction = trial.act(trial.model, trial.mixed)
    batch, alone = trial.score(inputs, prediction.sequences), []
    for row in range(NUM_ROWS):
        single = trial.model.preprocess(trial.mixed.select([row]))
        alone.append(trial.score(single, prediction.sequences[row : row + 1]))
    name = "torch: a row alone and in a batch"
    values = torch.cat([each.values for each in alone])[:, None]
    scale = batch.values.abs().max().clamp_min(1.0)
    return [
        trial.agreement(f"{name}, log-probs", torch.cat([each.logprobs for each in alone]), batch.logprobs),
        trial.closeness(f"{name}, values", values, batch.values[:, None], scale),
    ]


@torch.no_grad()
def input_checks(trial: Trial) -> list[DiagnosticCheck]:
    """Whether log-probabilities of the same samples change with another row's images, state or instruction.

    An input that ``preprocess`` leaves out is one that the policy is not meant to read.
    """
    model, observation = trial.model, trial.mixed
    inputs, prediction = trial.act(model, observation)
    before = trial.score(inputs, prediction.sequences).logprobs
    others = observation.select(np.roll(np.arange(NUM_ROWS), 1))
    parts = {"images": observation.images, "state": observation.state, "instruction": observation.instruction}
    checks = []
    for part in [part for part, given in parts.items() if given is not None and len(given)]:
        name = f"torch: log-probs with another row's {part} differ"
        changed = model.preprocess(replace(observation, **{part: getattr(others, part)}))
        if all(torch.equal(changed[key], inputs[key]) for key in inputs):
            checks.append(DiagnosticCheck(name, None, "not read, or equal in all rows"))
        else:
            checks.append(_difference(name, trial.score(changed, prediction.sequences).logprobs, before))
    other = trial.score(inputs, prediction.sequences, trial.other_temperature).logprobs
    return [*checks, _difference("torch: log-probs at another temperature differ", other, before)]


def _difference(name: str, found: Tensor, expected: Tensor) -> DiagnosticCheck:
    """A control: log-probabilities that must differ."""
    change = float((found - expected).abs().max())
    return DiagnosticCheck(name, change > MAX_GAP, f"by {change:.1e}, required: more than {MAX_GAP:g}")


def training_checks(trial: Trial) -> list[DiagnosticCheck]:
    """Scores in training mode, where dropout and the like are on, and gradients; leaves the model in evaluation mode."""
    model, rows = trial.model, range(trial.num_trained_rows)
    inputs, prediction = trial.act(model, trial.mixed, rows)
    with torch.no_grad():
        expected = trial.score(inputs, prediction.sequences).logprobs
    model.train()
    evaluation = trial.score(inputs, prediction.sequences)
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
    return [
        trial.agreement(
            "torch: training mode against evaluation mode, log-probs", evaluation.logprobs.detach(), expected
        ),
        DiagnosticCheck("torch: gradients reach the tensors that are trained", passed, detail),
    ]


def _abridged(name: str, length: int = 28) -> str:
    """Both ends of the name of a parameter."""
    return name if len(name) <= length else f"{name[: length // 2 - 2]}..{name[-length // 2 :]}"


@torch.no_grad()
def vllm_checks(trial: Trial, player: VllmPolicy) -> list[DiagnosticCheck]:
    """Checks of the engine with the model's weights, and again after an update, which changes ``trial.model`` for good."""
    trial = replace(trial, is_exact=trial.is_exact and player.engine.spec.engine_args["dtype"] == "float32")
    player.update_weights(1)
    checks = player_checks(trial, player, "vllm")
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * (0.2 * float(parameter.float().std(correction=0)) or 0.01))

    def logprobs() -> tuple[Tensor, Tensor]:
        inputs, prediction = trial.act(player, trial.mixed)
        scored = trial.score(inputs, prediction.sequences)
        return player.rollout_logprobs(prediction, trial.temperature), scored.logprobs

    found, expected = logprobs()
    stale = float((found - expected).abs().mean())
    player.update_weights(2)
    found, expected = logprobs()
    fresh = float((found - expected).abs().mean())
    return [
        *checks,
        trial.agreement("vllm: rollout against training, after an update", found, expected),
        DiagnosticCheck(
            "vllm: before the update was sent, log-probs differed",
            stale > max(MAX_GAP, 2 * fresh),
            f"mean gap {stale:.1e}, afterwards {fresh:.1e}",
        ),
    ]
