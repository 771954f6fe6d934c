"""Who plays and who updates when an actor learns off-policy: threads and ranks. What is learnt does not depend on either."""

import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from offpolicy_runs import all_tensors, collected, config_of
from run_results import untimed_metrics

from rlinf.algorithms.offpolicy_config import ActorConfig
from rlinf.commands.train import build, train
from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.launch import launch
from rlinf.errors import NonFiniteError, RLinfError
from rlinf.models.actors.kinds import ResidualActor
from rlinf.offpolicy.trainer import OffPolicyTrainer
from rlinf.offpolicy.transitions import TransitionCollector

PLUGIN = Path(__file__).parents[1] / "fixtures" / "mlp_by_rows.py"
EDIT = [
    f"plugins=[{PLUGIN}]", "model.model_type=mlp_by_rows", "algorithm.actor.name=expo", "trainer.save_every=2", "trainer.max_keep=-1"
]  # fmt: skip
"""The actor that takes most random numbers: candidates, corrections, draws of the target. Other numbers of rows are no other products."""


@pytest.fixture(scope="module", autouse=True)
def plugin_folder():
    """Spawned ranks inherit the path on which they find the plugin."""
    sys.path.append(str(PLUGIN.parent))
    yield
    sys.path.remove(str(PLUGIN.parent))


def learning(folder: Path) -> list[dict]:
    """Return the lines of the iterations; sums over all calls of a rank are rounded where others would be."""
    lines = [line for line in untimed_metrics(folder) if "rollout/return_mean" in line]
    return [
        {key: round(value, 9) if "residual_norm" in key else value for key, value in line.items()} for line in lines
    ]


def check_equal(one: Path, other: Path) -> None:
    """Check that two checkpoints hold the same bits: policy, critics, optimisers, buffer, generators, counters of the loop."""
    first, second = all_tensors(one), all_tensors(other)
    assert first.keys() == second.keys() and "replay.features" in first
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def edit(tmp_path_factory):
    """``EDIT``, with demonstrations in the batches; the answers about them cannot be cached, so each run asks."""
    folder = collected(tmp_path_factory.mktemp("demonstrations") / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        yield [*EDIT, f"algorithm.offline_dataset={folder}", "algorithm.offline_ratio=0.25"]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory, edit):
    """A run of one process that plays and updates in turn."""
    folder = tmp_path_factory.mktemp("in_turn")
    train(config_of(folder, *edit))
    return folder


def execute(configs: list[RunConfig]) -> None:
    for config in configs:
        load_plugins(config.plugins)
        build(config).execute()


def test_two_ranks_learn_what_one_process_does_bit_for_bit_and_either_goes_on(tmp_path, in_turn, edit):
    ranks, one = ["cluster.num_processes=2"], in_turn / "checkpoints"
    begun = config_of(tmp_path / "begun", *edit, *ranks, "trainer.max_steps=2")
    resumed = config_of(tmp_path / "resumed", *edit, *ranks, f"resume={one / 'rl_000002'}")
    launch(execute, [begun, resumed], 2, "cpu", process_group=True)
    train(config_of(tmp_path / "begun", *edit, f"resume={tmp_path / 'begun'}"))
    check_equal(tmp_path / "begun" / "checkpoints" / "rl_000002", one / "rl_000002")
    for name, first in (("begun", 0), ("resumed", 2)):
        check_equal(tmp_path / name / "checkpoints" / "rl_000004", one / "rl_000004")
        assert learning(tmp_path / name) == learning(in_turn)[first:]


def test_ranks_whose_heads_differ_end_the_run(tmp_path, monkeypatch):
    trainer = build(config_of(tmp_path)).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer._check_equal_on_ranks()
    monkeypatch.setattr("rlinf.offpolicy.trainer.gather_objects", lambda own: [own, own + 1])
    with pytest.raises(RLinfError, match="have diverged.*set cluster.num_processes=1"):
        trainer._check_equal_on_ranks()


class AtOnce:
    """An executor that does the work in the thread that asks for it."""

    def submit(self, work, *arguments) -> Future:
        future: Future = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, cancel_futures: bool) -> None:
        pass


def test_updates_next_to_the_envs_learn_the_same_however_long_either_takes(tmp_path, in_turn, edit, monkeypatch):
    """A thread next to the envs and, as the other extreme, updates that are done before the envs start; the latter resumed."""
    train(config_of(tmp_path / "threads", *edit, "algorithm.overlap=true"))
    init = OffPolicyTrainer.__init__

    def in_one_thread(self, *arguments):
        init(self, *arguments)
        self._updating.shutdown()
        self._updating = AtOnce()

    monkeypatch.setattr(OffPolicyTrainer, "__init__", in_one_thread)
    for more in (["trainer.max_steps=2"], [f"resume={tmp_path / 'halves'}"]):
        train(config_of(tmp_path / "halves", *edit, "algorithm.overlap=true", *more))
    check_equal(*(tmp_path / name / "checkpoints" / "rl_000004" for name in ("threads", "halves")))
    lines, others = learning(tmp_path / "threads"), learning(in_turn)
    assert lines == learning(tmp_path / "halves")
    # An action lacks the updates that the 4 env steps before it have earned, and no others.
    assert [line["rollout/staleness_updates"] for line in lines] == [2, 2, 2, 2]
    assert [line["rollout/staleness_updates"] for line in others] == [0, 0, 0, 0]
    assert lines[-1]["train/updates_total"] == others[-1]["train/updates_total"] > 50
    assert lines[-1]["train/critic_loss"] != others[-1]["train/critic_loss"]  # the control: other actions were played


def test_envs_play_while_updates_are_made(tmp_path, monkeypatch):
    """Each step of the envs with pending updates waits until one of them has started, and that one until the step has."""
    run = build(config_of(tmp_path, "algorithm.overlap=true", "trainer.max_steps=1", "evaluation.num_episodes=1"))
    trainer, met = run.rl, []
    stepping, updating = threading.Semaphore(0), threading.Semaphore(0)
    monkeypatch.setattr(run.loop, "evaluate_once", lambda tag: None)
    real_step, real_update = trainer.env.chunk_step, OffPolicyTrainer._update

    def step(actions):
        if trainer.pending_updates >= 1:
            stepping.release()
            met.append(updating.acquire(timeout=60))
        return real_step(actions)

    def update(self, updates):
        if self.pending_updates >= 1 and threading.current_thread() is not threading.main_thread():
            updating.release()
            assert stepping.acquire(timeout=60)
        real_update(self, updates)

    monkeypatch.setattr(trainer.env, "chunk_step", step)
    monkeypatch.setattr(OffPolicyTrainer, "_update", update)
    run.execute()
    assert len(met) > 0 and all(met)
    assert run.rl.rollout_workers() == "a thread next to the one that updates"


def test_a_loss_that_is_not_finite_ends_the_run_from_its_thread(tmp_path, monkeypatch):
    run = build(config_of(tmp_path, "algorithm.overlap=true", "trainer.max_steps=1"))
    real = TransitionCollector.store

    def damaged(self, actions, outcome):
        outcome.rewards[:] = float("nan")
        real(self, actions, outcome)

    monkeypatch.setattr(run.loop, "evaluate_once", lambda tag: None)
    monkeypatch.setattr(TransitionCollector, "store", damaged)
    with pytest.raises(NonFiniteError, match="The loss of the critics is nan at update 0"):
        run.execute()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("update")]


def test_env_steps_earn_updates_and_none_in_the_warm_up():
    """4 env steps at 0.5 updates each."""
    state = SimpleNamespace(env_steps=0)
    trainer = SimpleNamespace(
        loop=SimpleNamespace(state=state), config=SimpleNamespace(utd_ratio=0.5), pending_updates=0.0
    )
    for is_warm_up, pending_updates, env_steps in ((True, 0.0, 4), (False, 2.0, 8), (False, 4.0, 12)):
        OffPolicyTrainer._count_env_steps(trainer, 4, is_warm_up)
        assert (trainer.pending_updates, state.env_steps) == (pending_updates, env_steps)


def test_the_noise_of_the_warm_up_goes_to_both_sides():
    """``2 u - 1`` of uniform numbers, times the scale, around the frozen policy; the actor is not asked for it."""
    actor = ResidualActor.__new__(ResidualActor)
    torch.nn.Module.__init__(actor)
    actor.config, actor.output_dim = ActorConfig(scale=0.5), 2
    base, uniforms = torch.tensor([[[0.1, 0.2]], [[0.0, -0.9]]]), torch.tensor([[0.0, 0.25, 0.9], [0.5, 0.1, 0.9]])
    policy = SimpleNamespace(
        device="cpu",
        actor=actor,
        base_inputs=lambda chunks: base,
        select_action=lambda features, base, noise: (base[:, 0], None),
    )
    output = SimpleNamespace(features=torch.zeros(2, 1), chunks=base)
    collector = SimpleNamespace(policy=policy, _base_output=output, _uniforms={1: uniforms})
    actions = TransitionCollector.choose_actions(collector, 1, is_warm_up=True).sampled
    assert actions.tolist() == [pytest.approx([-0.4, -0.05]), pytest.approx([0.0, -1.0])], "the last one at its bound"
