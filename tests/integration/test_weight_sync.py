"""What is played, evaluated and updated is the trained policy: stale weights, one stale layer, a stale value head stop the run."""

from pathlib import Path

import pytest
import torch
from run_results import SMALL_RUN, metrics_of, run_config

from rlinf.commands import train as run_module
from rlinf.commands.train import _execute_rank, build, train
from rlinf.config.schema import RunConfig
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor, grad_norm
from rlinf.distributed.process_group import rank
from rlinf.engines.weight_transfer import ModuleReceiver
from rlinf.envs.episodes import EVAL_INIT_STATE_OFFSET
from rlinf.errors import ConfigError, ParityError, RLinfError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction
from rlinf.rollout.weight_push import WeightPush
from rlinf.training import evaluator
from rlinf.training.train_worker import TrainWorker

SMALL = [*SMALL_RUN, "trainer.max_steps=3", "algorithm.critic_warmup_steps=0"]
SHARDED = "trainer.sharding=fsdp2"
WHOLE = ModuleReceiver._copy
REPLICA = "differs from the trained policy after the weight push"


@pytest.fixture(autouse=True)
def shardable(monkeypatch):
    """Let the small policy be sharded, which has no repeated blocks."""
    monkeypatch.setattr(MLPForRLActionPrediction, "fsdp_wrap_modules", ("Linear",))


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


def skipping(part: str):
    """A ``ModuleReceiver._copy`` that later leaves out the tensors with ``part`` in their names; the empty string is in all."""
    held = set()

    def copy(self, name, tensor):
        if part not in name or name not in held:
            WHOLE(self, name, tensor)
        held.add(name)

    return copy


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in metrics_of(folder) if "rollout/return_mean" in line]


@pytest.mark.parametrize(("part", "what"), [
    ("", "log-probabilities"), ("policy.2", "log-probabilities"), ("value_head", "values"),
])  # fmt: skip
def test_a_replica_that_lacks_an_update_is_refused_at_the_push_by_name_and_else_by_the_gate(
    tmp_path, monkeypatch, part, what
):
    """The first push is one of equal weights."""
    monkeypatch.setattr(ModuleReceiver, "_copy", skipping(part))
    with pytest.raises(RLinfError, match=rf"{REPLICA} in .*{part or 'log_std'}"):
        train(config_of(tmp_path / "push", SHARDED, "trainer.max_steps=2"))
    monkeypatch.setattr(ModuleReceiver, "_copy", skipping(part))
    monkeypatch.setattr(WeightPush, "_check_replica", lambda self, tensors: None)
    with pytest.raises(ParityError, match=f"{what} differ by .* at step 1 .*agreed until .* were updated"):
        train(config_of(tmp_path / "gate", SHARDED, "trainer.max_steps=2"))
    assert steps_of(tmp_path / "push") == steps_of(tmp_path / "gate") == [0]


def test_a_replica_that_gets_every_update_runs_to_the_end(tmp_path):
    train(config_of(tmp_path, SHARDED))
    gaps = [line for line in metrics_of(tmp_path) if "rollout/logprob_gap_max" in line]
    assert len(gaps) == 3
    assert max(line["rollout/logprob_gap_max"] for line in gaps) < 1e-4
    assert max(line["rollout/value_gap_max"] for line in gaps) < 1e-4
    assert not any(line["rollout/parity_exceeded"] for line in gaps)


def run_with_a_stale_layer_on_the_second_rank(config):
    MLPForRLActionPrediction.fsdp_wrap_modules = ("Linear",)
    if rank() == 1:
        ModuleReceiver._copy = skipping("policy.0")
    _execute_rank((config, None))


def test_one_stale_layer_on_one_of_two_ranks_stops_the_run(tmp_path):
    config = config_of(tmp_path, SHARDED, "cluster.num_processes=2")
    with pytest.raises(RLinfError, match=f"{REPLICA} in .*policy.0"):
        launch(run_with_a_stale_layer_on_the_second_rank, config, 2, "cpu")
    assert steps_of(tmp_path) == [0]


def test_evaluations_are_greedy_on_held_out_episodes_and_of_the_newest_weights(tmp_path, monkeypatch):
    runs, seen, episodes = [], [], []

    def evaluate(model, env, specs, **kwargs):
        trained = runs[0].parts.worker.model.state_dict()
        seen.append([torch.equal(held, full_tensor(trained[name])) for name, held in model.state_dict().items()])
        episodes.extend((kwargs["greedy"], spec.init_state_id >= EVAL_INIT_STATE_OFFSET) for spec in specs)
        return evaluate_policy(model, env, specs, **kwargs)

    def recorded(config, reservation):
        runs.append(build(config, reservation))
        return runs[-1]

    monkeypatch.setattr(evaluator, "evaluate_policy", evaluate)
    monkeypatch.setattr(run_module, "build", recorded)
    train(config_of(tmp_path, SHARDED, "trainer.eval_every=1", "trainer.max_steps=2"))
    assert len(seen) == 3 and all(map(all, seen))  # before RL, after the first and the last step
    assert episodes == [(True, True)] * 24


def test_an_update_at_another_temperature_than_the_rollout_is_stopped(tmp_path, monkeypatch):
    update = TrainWorker.update

    def hotter(self, *args):
        self.temperature = 1.3
        try:
            return update(self, *args)
        finally:
            self.temperature = 1.0

    monkeypatch.setattr(TrainWorker, "update", hotter)
    with pytest.raises(ParityError, match="first minibatch of step 0 .*a different temperature"):
        train(config_of(tmp_path))


def test_a_model_that_computes_something_else_in_training_mode_is_stopped(tmp_path, monkeypatch):
    features = MLPForRLActionPrediction._features

    def noisy(self, state):
        return features(self, state) + (3.0 if self.training else 0.0)

    monkeypatch.setattr(MLPForRLActionPrediction, "_features", noisy)
    with pytest.raises(ParityError, match="first minibatch of step 0 .*training mode"):
        train(config_of(tmp_path, "model.init_config.initial_log_std=-3.0"))


@pytest.mark.parametrize("phase", ["rl", "sft"])
def test_a_loss_without_a_gradient_for_the_policy_is_refused(tmp_path, monkeypatch, phase):
    model = MLPForRLActionPrediction
    loss, without_gradient = model.sft_loss, torch.no_grad()(model._distribution)
    monkeypatch.setattr(model, "_distribution", without_gradient)
    if phase == "sft":  # a loss that requires a gradient, of which nothing arrives
        monkeypatch.setattr(model, "sft_loss", lambda self, *args: loss(self, *args) + 0.0 * self.log_std.sum())
    cloning = ["sft.max_steps=1", "sft.num_demonstrations=4", "sft.batch_size=8"] if phase == "sft" else []
    with pytest.raises(ConfigError, match=f"No gradient reaches the policy in the first update of {phase}"):
        train(config_of(tmp_path, *cloning))


def test_every_trained_tensor_moves_and_gradients_are_clipped_for_policy_and_value_head_apart(tmp_path, monkeypatch):
    run = build(config_of(tmp_path, "trainer.max_steps=1", "trainer.max_grad_norm=1e-4"))
    before = {name: p.detach().clone() for name, p in run.parts.worker.model.named_parameters()}
    norms, step = [], torch.optim.AdamW.step

    def recorded(self, *args):
        worker = run.parts.worker
        norms.append([float(grad_norm(part)) for part in (worker.policy_masters, worker.value_masters)])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    run.execute()
    assert norms and all(norm == pytest.approx(1e-4, rel=1e-3) for pair in norms for norm in pair)
    assert all(p.requires_grad for p in run.parts.worker.model.parameters())
    assert not [name for name, p in run.parts.worker.model.named_parameters() if torch.equal(p, before[name])]
