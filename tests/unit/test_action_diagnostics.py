"""``rlinf diagnose`` of action models: sound ones pass, and every defect is found by the checks that are about it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.cli import main
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.contracts.policy import NUM_ROWS, PolicyChecker
from rlinf.models import build_policy
from rlinf.models.sampling import sample_tokens, token_logprobs
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.types import ActionEvaluation, ActionPrediction, Observation

ROLLOUT, ROWS, AGAIN = "rollout against training", "a single row and in a batch", "repeatable"
SURPRISE, TRANSFORM = (
    "samples are from the scored distribution",
    "samples are the inverse transform of the random numbers",
)


def observe(num_rows=NUM_ROWS, size=36):
    """Other images, states and instructions of other lengths in all rows."""
    random = np.random.default_rng(0)
    return Observation(
        images={"front": random.integers(0, 256, (num_rows, size, size, 3), dtype=np.uint8)},
        state=random.normal(size=(num_rows, 5)).astype(np.float32),
        instruction=["reach the red block", "push the blue block into the zone", "go", "reach the green zone slowly"],
    )


def make_checker(*overrides, temperature=1.0):
    torch.manual_seed(0)
    config = build_config(compose_config([*overrides, "model.action_chunks_len=2", "model.action_token_len=3"]))
    bounds = {"q01": [-1.0, -2.0, -3.0], "q99": [1.0, 2.0, 3.0], "mask": [True] * 3}
    model = build_policy(config, {"norm_stats": {"tabletop": {"action": bounds}}}).eval()
    is_exact = config.model.precision == "fp32"
    return PolicyChecker(model, observe(), torch.tensor([2.0, 4.0, 6.0]), temperature, is_exact)


@pytest.fixture(scope="module")
def sound():
    checker = make_checker(
        "model=cnn",
        "model.init_config.image_size=36",
        "model.init_config.state_dim=5",
        "model.init_config.hidden_sizes=[16]",
    )
    with torch.no_grad():
        checker.model.policy[-1].weight.mul_(100.0)  # else the policy barely depends on anything
    return checker


@pytest.fixture
def checker(sound):
    """A policy that may be changed: Gaussian, of images, state and words."""
    return replace(sound, model=copy.deepcopy(sound.model))


def failed(checker):
    return [check.name.removeprefix("torch: ") for check in checker.torch_checks() if check.passed is False]


def test_rows_have_prompts_of_other_lengths_unless_all_have_one_word(checker):
    short, full = checker.prompts["short"], checker.prompts["full"]
    assert short.instruction == ["reach the", "push the blue block", "go", "reach the green"]
    assert full.instruction == checker.observation.instruction
    assert checker.mixed.instruction == [short.instruction[0], full.instruction[1], "go", full.instruction[3]]
    one_word = replace(checker, observation=replace(checker.observation, instruction=["go"] * NUM_ROWS))
    assert list(one_word.prompts) == ["full"] and not failed(one_word)


def change(model, name, wrap):
    """Replace a method by ``wrap(method)``."""
    setattr(model, name, wrap(getattr(model, name)))


def test_the_command_prints_a_row_per_check(capsys):
    """tests/contracts/test_model_contract.py runs the checks of every model, in float32."""
    words = ["model=openvla_oft_tiny", "model.precision=bf16", "env.state=proprio", "model.is_lora=true"]
    assert main(["diagnose", *words, "cluster.num_threads=1", "cluster.device=cpu"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("torch: ")]
    assert len(lines) > 20 and all(" pass " in line for line in lines)


def rollout_at_another_temperature(model):
    def wrap(method):
        return lambda temperature=1.0, **inputs: method(temperature=1.2 * temperature, **inputs)

    change(model, "predict_action_batch", wrap)


def scores_that_ignore_the_temperature(model):
    change(
        model, "evaluate_actions", lambda method: lambda inputs, sequences, temperature=1.0: method(inputs, sequences)
    )


def rows_that_see_their_neighbours(model):
    change(model, "_features", lambda method: lambda **inputs: (x := method(**inputs)) + 0.1 * x.mean(0))


def padding_that_counts(model):
    def wrap(method):
        return lambda token_ids, **inputs: method(token_ids=token_ids, **inputs) * (1 + 0.1 * token_ids.shape[1])

    change(model, "_features", wrap)


def values_of_the_whole_batch(model):
    change(model, "_values", lambda method: lambda features: method(features) + features.mean() + len(features))


def greedy_that_samples(model):
    change(model, "predict_action_batch", lambda method: lambda do_sample=True, **inputs: method(**inputs))


def uniforms_that_are_ignored(model):
    def wrap(method):
        def predict(uniforms=None, **inputs):
            return method(uniforms=None if uniforms is None else torch.rand_like(uniforms), **inputs)

        return predict

    change(model, "predict_action_batch", wrap)


def samples_that_are_always_the_same(model):
    def wrap(method):
        return lambda uniforms=None, **inputs: method(
            uniforms=None if uniforms is None else uniforms * 0 + 0.3, **inputs
        )

    change(model, "predict_action_batch", wrap)


def samples_that_are_narrower_than_scored(model):
    def wrap(method):
        def predict(**inputs):
            prediction = method(**inputs)
            mean = prediction.logits[..., 0]
            narrow = mean + 0.6 * (prediction.sequences - mean)
            return prediction._replace(sequences=narrow, actions=model.decode_actions(narrow))

        return predict

    change(model, "predict_action_batch", wrap)


def uniforms_in_another_order(model):
    change(
        model, "predict_action_batch", lambda method: lambda uniforms=None, **inputs: method(
            uniforms=None if uniforms is None else uniforms.flip(1), **inputs
        )
    )  # fmt: skip


def images_without_effect(model):
    change(
        model, "_features", lambda method: lambda images, **inputs: method(images=torch.zeros_like(images), **inputs)
    )


def dropout_in_training(model):
    model.encoder.append(torch.nn.Dropout(0.2).eval())


def gradients_that_are_not_finite(model):
    model.encoder[0].weight.register_hook(lambda gradient: gradient * float("nan"))


DEFECTS = {
    rollout_at_another_temperature: [*[ROLLOUT] * 5, TRANSFORM],
    scores_that_ignore_the_temperature: [
        f"{ROLLOUT}, batch 4, temperature 1.5",
        "log-probs at a different temperature",
    ],
    rows_that_see_their_neighbours: [ROWS] * 4,
    padding_that_counts: [ROWS] * 4,
    values_of_the_whole_batch: [f"{ROWS}, values"],
    greedy_that_samples: [f"{ROWS}, greedy actions", f"{AGAIN}, greedy"],
    uniforms_that_are_ignored: [f"{ROWS}, sampled actions", f"{AGAIN}, sampled", TRANSFORM],
    samples_that_are_always_the_same: ["different uniforms, different samples", SURPRISE, TRANSFORM],
    samples_that_are_narrower_than_scored: [SURPRISE, TRANSFORM],
    uniforms_in_another_order: [TRANSFORM],
    images_without_effect: ["log-probs with a different row's images"],
    dropout_in_training: ["training mode against evaluation mode"],
    gradients_that_are_not_finite: ["gradients reach the trained tensors"],
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_fails_its_checks_and_no_others(defect, checker):
    defect(checker.model)
    names = failed(checker)
    assert len(names) == len(DEFECTS[defect]), names
    assert all(name.startswith(begin) for name, begin in zip(names, DEFECTS[defect], strict=True)), names


def test_a_rollout_at_another_temperature_is_found_in_bfloat16():
    checker = make_checker("model=openvla_tiny", "model.precision=bf16")
    with torch.no_grad():
        checker.model.language_model.lm_head.weight.mul_(5.0)
    assert not failed(checker)
    change(
        checker.model, "predict_action_batch", lambda method: lambda temperature=1.0, **x: method(temperature=2.0, **x)
    )
    change(
        checker.model, "rollout_logprobs", lambda method: lambda prediction, temperature=1.0: method(prediction, 2.0)
    )
    assert sum(name.startswith(ROLLOUT) for name in failed(checker)) >= 8


@pytest.mark.parametrize("top_k", [None, 8])
def test_a_sampler_that_leaves_out_unlikely_tokens_is_found_although_both_sides_score_it_alike(monkeypatch, top_k):
    checker = make_checker("model=openvla_tiny", temperature=1.3)

    def sample(logits, do_sample, temperature=1.0, uniforms=None):
        if do_sample and top_k:
            rank = logits.argsort(-1, descending=True).argsort(-1)
            logits = logits.masked_fill(rank >= top_k, -torch.inf)
        return sample_tokens(logits, do_sample, temperature, uniforms)

    monkeypatch.setattr("rlinf.models.embodiment.openvla.policy.sample_tokens", sample)
    assert failed(checker) == ([SURPRISE, TRANSFORM] if top_k else [])


class Table:
    """A token policy whose logits ``[B, A, n_bins]`` are a table: it looks at nothing."""

    num_uniforms = num_logprobs = num_sampled = 14

    def __init__(self, logits, seed, do_sample=True):
        self.logits, self.do_sample, self.generator = logits, do_sample, torch.Generator().manual_seed(seed)

    def preprocess(self, observation):
        return {}

    def predict_action_batch(self, do_sample, temperature, uniforms):
        numbers = torch.rand(uniforms.shape, generator=self.generator).clamp_min(1e-9)  # others in every test
        tokens = sample_tokens(self.logits, self.do_sample, temperature, numbers)
        return ActionPrediction(tokens.float(), tokens, self.logits, torch.zeros(len(tokens)))

    def evaluate_actions(self, inputs, tokens, temperature):
        return ActionEvaluation(*token_logprobs(self.logits, tokens, temperature, True), torch.zeros(len(tokens)))


def confident(mass, seed):
    """Logits of a token with all but about ``mass`` of the probability; how much that is differs from column to column."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(NUM_ROWS, Table.num_logprobs, 256, generator=generator)
    rest = (mass * torch.randn(logits.shape[:2], generator=generator).exp()).clamp(max=0.5)
    logits[..., 0] = logits[..., 1:].logsumexp(-1) + torch.log((1 - rest) / rest)
    return logits


@pytest.mark.parametrize("mass", [0.1, 1e-3, 1e-4, 1e-5])
def test_a_confident_policy_that_draws_right_is_not_accused_where_rare_tokens_come_or_do_not(mass):
    failures = []
    for seed in range(40):
        model = Table(confident(mass, seed), 1000 + seed)
        check = PolicyChecker(model, observe(), torch.ones(3), 1.0, True).draw_check(model, "torch")
        failures += [] if check.passed else [(seed, check.detail)]
    assert not failures


@pytest.mark.parametrize("mass", [0.2, 0.1])
def test_a_confident_policy_that_never_draws_rare_tokens_is_found(mass):
    for seed in range(10):
        model = Table(confident(mass, seed), 0, do_sample=False)
        assert not PolicyChecker(model, observe(), torch.ones(3), 1.0, True).draw_check(model, "torch").passed, seed


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("_values", lambda method: lambda features: method(features)[:, None], "values float32 [4, 1], expected"),
        (
            "rollout_logprobs",
            lambda method: lambda *x: method(*x).double(),
            "rollout_logprobs float64 [4, 6], expected",
        ),
        ("rollout_logprobs", lambda method: lambda *x: method(*x) - torch.inf, "rollout_logprobs not finite"),
        ("decode_actions", lambda method: lambda sequences: method(sequences) + torch.rand(1), "decode_actions"),
    ],
)
def test_wrong_types_are_named(method, wrong, message, checker):
    change(checker.model, method, wrong)
    check = checker.type_check()
    assert check.passed is False and message in check.detail


def test_a_failed_check_is_the_exit_status(capsys, monkeypatch):
    monkeypatch.setattr("rlinf.contracts.policy.MAX_GAP", -1.0)
    assert main(["diagnose", "experiment=tabletop_ppo_mlp", "cluster.num_threads=1"]) == 1
    assert " FAIL " in capsys.readouterr().out


def test_a_checkpoint_is_diagnosed_on_its_env(tmp_path, capsys):
    config = build_config(compose_config(["experiment=tabletop_ppo_mlp", "output_dir=unused", "cluster.num_threads=1"]))
    bounds = {"q01": [-0.05] * 2, "q99": [0.05] * 2, "mask": [True] * 2}
    model = build_policy(config, {"norm_stats": {"tabletop": {"action": bounds}}})
    with torch.no_grad():
        model.log_std.fill_(200.0)
    save_checkpoint(
        tmp_path / "rl_000001", model=model, optimizer=None, loop_state={"step": 1}, run_config=to_mapping(config),
        manifest=build_manifest(config, model, policy_version=1),
    )  # fmt: skip
    for words in (
        [f"checkpoint={tmp_path}"],
        [str(tmp_path)],
        ["experiment=tabletop_ppo_mlp", f"init_from={tmp_path}"],
    ):
        assert main(["diagnose", *words]) == 1
        out = capsys.readouterr().out
        assert out.startswith("mlp on tabletop, fp32") and "rollout_logprobs not finite" in out, "its weights are tried"
        assert out.count(" FAIL ") == 1 and " pass " not in out and "vllm" not in out, "nothing else can be told"
    assert main(["diagnose", str(tmp_path / "rl_000001" / "model")]) == 2
    assert "Run rlinf diagnose model.model_type=mlp model.model_path=" in capsys.readouterr().err
    assert main(["diagnose", "model=openvla_tiny", f"init_from={tmp_path}"]) == 2
    assert "Set model.model_type=mlp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=opnvla_tiny"], "Did you mean 'openvla_tiny'"),
        (["model=openvla_tiny", "rollout.backend=vllm"], "Set model.init_config.action_decoding=autoregressive"),
        (["-m", "model=openvla_tiny,mlp"], "Remove -m"),
        (["one", "two"], "needs one model, not ['one', 'two']. Run rlinf diagnose"),
        (["a_folder", "--torch_dtype=bfloat16"], "'--torch_dtype=bfloat16' is not a flag"),
    ],
)
def test_errors_come_before_any_weights(words, message, capsys, monkeypatch):
    monkeypatch.setattr("rlinf.models.building.build_policy", None)
    monkeypatch.setattr("rlinf.envs.make_env", None)
    assert main(["diagnose", *words]) == 2
    assert message in capsys.readouterr().err
