"""A policy that vLLM runs: ``rlinf diagnose`` and the parity gate compare it with torch, before and after an update."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from run_results import QUIET

from rlinf.cli import main
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.contracts.policy import NUM_ROWS, PolicyChecker
from rlinf.engines.vllm_engine import EngineError
from rlinf.errors import ParityError
from rlinf.models import build_policy
from rlinf.models.lora import merged_tensors
from rlinf.rollout.config import VllmOptions
from rlinf.rollout.vllm_policy import VllmPolicy
from rlinf.types import Observation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/setup.sh --vllm"
)
UPDATE = ["vllm: rollout against training, after an update", "vllm: before the update was sent, log-probs differed"]


@pytest.fixture(scope="module")
def worker():
    torch.manual_seed(0)
    model = build_policy(build_config(compose_config(["experiment=quickstart_vllm"]))).eval()
    with torch.no_grad():
        model.language_model.lm_head.weight.mul_(5.0)  # tokens that are far from equally likely
    worker = VllmPolicy(model, VllmOptions(), num_envs=NUM_ROWS)
    yield worker
    worker.close()


@pytest.fixture
def checker(worker):
    images = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, 64, 64, 3), dtype=np.uint8)
    instructions = ["reach the red block", "push the blue block into the zone"] * (NUM_ROWS // 2)
    observation = Observation({"front": images}, None, instructions)
    return PolicyChecker(worker.model, observation, torch.full((2,), 0.1), temperature=1.3, is_exact=True)


def failed(checks):
    return [check.name for check in checks if not check.passed]


def test_a_sound_engine_passes_greedy_and_sampled_before_and_after_an_update(checker, worker):
    checks = checker.vllm_checks(worker)
    assert not failed(checks) and len(checks) == 10 + 2 + 3 + 1 + 2
    for word in ("batch 1, short prompts, greedy", "batch 4, full prompts, sampled", "temperature 0.867, greedy"):
        assert any(word in check.name for check in checks)
    assert {check.name for check in checks} >= set(UPDATE)


def test_an_engine_at_another_temperature_is_found(checker, worker, monkeypatch):
    act = worker.predict_action_batch

    def hotter(temperature=1.0, **inputs):
        return act(temperature=1.2 * temperature, **inputs)

    worker.update_weights(3)
    monkeypatch.setattr(worker, "predict_action_batch", hotter)
    names = failed(checker.rollout_checks(worker, "vllm"))
    assert len(names) == 10 and all(name.startswith("vllm: rollout against training") for name in names)


def test_an_engine_that_leaves_out_unlikely_tokens_is_found(checker, worker, monkeypatch):
    act = worker.predict_action_batch

    def only_likely(**inputs):
        """Of four draws the most likely one, scored as all are."""
        if not inputs["do_sample"]:
            return act(**inputs)
        drawn = [act(**inputs | {"uniforms": (inputs["uniforms"] + shift) % 1.0}) for shift in (0.0, 0.2, 0.4, 0.6)]
        totals = torch.stack([each.logits.sum((1, 2)) for each in drawn])
        best = totals.argmax(0)
        parts = [torch.stack(each)[best, torch.arange(len(best))] for each in zip(*drawn, strict=True)]
        return type(drawn[0])(*parts)

    worker.update_weights(4)
    monkeypatch.setattr(worker, "predict_action_batch", only_likely)
    assert failed(checker.rollout_checks(worker, "vllm")) == ["vllm: samples are from the scored distribution"]


def test_an_update_that_never_arrives_is_found(checker, worker, monkeypatch):
    send = worker.update_weights
    monkeypatch.setattr(worker, "update_weights", lambda version: None if version == 2 else send(version))
    assert failed(checker.vllm_checks(worker)) == UPDATE


def test_an_engine_that_does_not_start_is_a_failed_check(capsys, monkeypatch):
    def reject(self):
        raise EngineError("no memory today")

    monkeypatch.setattr("rlinf.engines.vllm_engine.VllmEngine.start", reject)
    assert main(["diagnose", "experiment=quickstart_vllm", "cluster.num_threads=1"]) == 1
    *rows, note = capsys.readouterr().out.splitlines()
    assert [row.split()[4] for row in rows if row.startswith("vllm: runs the model")] == ["FAIL"]
    assert sum(" FAIL " in row for row in rows) == 1 and note == "vllm: no memory today"


def test_a_temperature_at_which_torch_plays_and_vllm_cannot_is_a_note(capsys, monkeypatch):
    monkeypatch.setattr("rlinf.rollout.vllm_policy.VllmEngine", lambda *_, **__: None)
    words = ["experiment=quickstart_vllm", "rollout.temperature=3", "cluster.num_threads=1"]
    assert main(["diagnose", *words, "rollout.backend=torch"]) == 0
    *rows, note = capsys.readouterr().out.splitlines()
    assert not any(" FAIL " in row for row in rows)
    assert note.startswith("vllm: not checked. rollout.temperature=3 is above 2")
    assert main(["diagnose", *words]) == 2, "an engine that is to play must be able to"


# -- the parity gate ---------------------------------------------------------------------------------------------

TRAINING = [
    "experiment=quickstart_vllm", *QUIET, "sft.max_steps=0", "trainer.max_steps=2", "trainer.minibatch_size=64", "trainer.eval_every=0",
    "rollout.num_envs=8", "evaluation.num_episodes=4", "algorithm.critic_warmup_steps=0",
]  # fmt: skip


@pytest.fixture
def sends(monkeypatch, worker):
    """Let a run play in the engine that runs already, and send what ``change(name, tensor)`` makes of each tensor."""

    class RolloutWorker(VllmPolicy):
        def __init__(self, *args):
            super().__init__(*args)
            self.engine = worker.engine

        def close(self):
            self.buckets.close()

    def use(change):
        def changed(*args):
            for name, tensor in merged_tensors(*args):
                yield name, change(name, tensor)

        monkeypatch.setattr("rlinf.models.lora.merged_tensors", changed)
        monkeypatch.setattr("rlinf.rollout.vllm_policy.VllmPolicy", RolloutWorker)
        worker.engine.version = None

    return use


def test_other_weights_in_the_engine_stop_a_run_at_the_first_step(tmp_path, sends):
    sends(lambda name, tensor: 1.1 * tensor if name == "projector.fc1.weight" else tensor)
    with pytest.raises(ParityError, match="differ by"):
        train(build_config(compose_config([*TRAINING, f"output_dir={tmp_path / 'run'}"])))


@pytest.mark.parametrize("part", ["", "layers.1.mlp.down_proj"])
def test_an_engine_that_lacks_an_update_stops_a_run_at_the_first_step_after_it(tmp_path, sends, part):
    first = {}
    sends(lambda name, tensor: first.setdefault(name, tensor.clone()) if part in name else tensor)
    overrides = [*TRAINING, "trainer.learning_rate=1e-3", f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(
        ParityError, match="log-probabilities differ by .* at step 1 .*agreed until the weights were updated"
    ):
        train(build_config(compose_config(overrides)))
