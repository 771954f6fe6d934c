"""The commands on a policy with an actor: what is exported, evaluated, compared, collected and diagnosed is what was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from run_results import QUIET, run_config

import rlinf
from rlinf.cli import main
from rlinf.cli.diagnose import _checker
from rlinf.cli.doctor import check_choice
from rlinf.commands.open_checkpoint import open_checkpoint, read_config
from rlinf.commands.train import train
from rlinf.data.lerobot_dataset import open_dataset
from rlinf.envs import make_env
from rlinf.evaluation.evaluator import BatchedPolicy, episode_list, evaluate_policy
from rlinf.models.embodiment.actor_policy import ActorPolicy
from rlinf.preflight.validation import validate
from rlinf.types import Observation

RUN = [
    *QUIET, "env=tabletop", "env.tasks=[reach,reach_zone]", "env.max_episode_steps=8", "rollout.num_envs=4", "rollout.num_chunks=10",
    "evaluation.num_episodes=12", "evaluation.num_envs=8", "evaluation.probe=false", "trainer.max_steps=3",
]  # fmt: skip
HEAD = [
    "algorithm=sac",
    "algorithm.actor.name=residual",
    "algorithm.learning_starts=40",
    "algorithm.batch_size=16",
    "algorithm.replay_capacity=1000",
]
CLONED = ["model=mlp", "env.cameras=[]", "env.state=full", "sft.max_steps=80", "sft.num_demonstrations=40", "sft.batch_size=64",
          "sft.learning_rate=0.003"]  # fmt: skip


def trained(folder: Path, *overrides: str) -> Path:
    config = run_config(folder, *RUN, *overrides)
    validate(config)
    train(config)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose frozen policy was cloned, and its export next to it."""
    folder = trained(tmp_path_factory.mktemp("headed") / "run", *HEAD, *CLONED)
    assert main(["export", f"checkpoint={folder}", f"output={folder.parent / 'export'}"]) == 0
    return folder


def results_of(folder: Path) -> list[dict]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))["results"]


def recorded(policy: ActorPolicy, folder: Path, num_episodes: int = 12) -> tuple[list[Observation], list[np.ndarray]]:
    """Return what a policy saw in its evaluation, row by row, and the actions that it took."""
    config, seen, taken = read_config(folder), [], []

    class Recorder(BatchedPolicy):
        def act(self, observation, streams):
            actions = super().act(observation, streams)
            seen.extend(observation.select([row]) for row in range(len(observation)))
            taken.extend(actions)
            return actions

    env = make_env(config.env, 8, auto_reset=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlinf.evaluation.evaluator.BatchedPolicy", Recorder)
        evaluate_policy(policy, env, episode_list(env, "eval", num_episodes))
    env.close()
    return seen, taken


def test_checkpoint_and_export_take_the_same_actions_and_end_the_same_episodes_alike(run, tmp_path):
    export = run.parent / "export"
    policy = open_checkpoint(run, read_config(run / "checkpoints" / "rl_000003")).policy
    loaded, again = rlinf.load_policy(export), open_checkpoint(export, read_config(export)).policy
    assert isinstance(policy, ActorPolicy) and isinstance(loaded.model, ActorPolicy)
    seen, taken = recorded(policy, export)
    assert len(seen) > 50 and np.array_equal(recorded(again, export)[1], taken)
    rows = Observation.concatenate(seen)
    with torch.no_grad():
        before = policy.predict_action_batch(do_sample=False, **policy.preprocess(rows)).actions.numpy()
        base = policy.base.predict_action_batch(do_sample=False, **policy.preprocess(rows)).actions.numpy()
    assert np.array_equal(loaded.act(rows), before)
    assert not np.allclose(base, before, atol=1e-2), "control: the actor does something"
    for name, source in (("checkpoint", run), ("export", export)):
        assert main(["evaluate", f"checkpoint={source}", f"output_dir={tmp_path / name}"]) == 0
        assert results_of(tmp_path / name) == results_of(run / "eval" / "after_rl")
    assert results_of(run / "eval" / "before_rl") != results_of(run / "eval" / "after_rl"), "control"


def test_an_export_of_an_export_is_the_same_policy_and_compare_pairs_it_with_its_frozen_one(run, tmp_path, capsys):
    assert main(["export", f"checkpoint={run.parent / 'export'}", f"output={tmp_path / 'again'}"]) == 0
    for name in ("actor.safetensors", "actor.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (run.parent / "export" / name).read_bytes()
    folders = [run / "eval" / tag for tag in ("before_rl", "after_rl")]
    assert main(["evaluate", "--compare", *map(str, folders)]) == 0
    table = capsys.readouterr().out
    assert all(f"{sum(one['success'] for one in results_of(folder))}/12" in table for folder in folders)


def test_a_dataset_of_a_headed_policy_holds_what_it_executed(run, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")
    words = ["collect.num_episodes=4", "collect.only_success=false"]
    assert main(["collect", f"checkpoint={run.parent / 'export'}", f"dataset={tmp_path / 'data'}", *words]) == 0
    dataset = open_dataset(tmp_path / "data", {}, "observation.state")
    dataset.chunk_len = 1
    observation, actions = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_allclose(rlinf.load_policy(run).act(observation), actions, atol=1e-5)
    base = open_checkpoint(run, read_config(run / "checkpoints" / "rl_000003")).policy.base
    other = base.predict_action_batch(do_sample=False, **base.preprocess(observation)).actions.detach().numpy()
    assert not np.allclose(other, actions, atol=1e-2), "control: not what the frozen policy says"


def test_doctor_and_diagnose_take_a_headed_policy(run, capsys, monkeypatch):
    assert check_choice([f"checkpoint={run.parent / 'export'}"]) == []
    capsys.readouterr()
    assert main(["diagnose", str(run.parent / "export")]) == 0
    out = capsys.readouterr().out
    assert "a single row and in a batch, sampled actions" in out and "not available" in out and "FAIL" not in out
    real = ActorPolicy.predict_action_batch

    def shaken(self, **options):
        found = real(self, **options)
        return found._replace(actions=found.actions + 0.01 * torch.rand_like(found.actions))

    monkeypatch.setattr(ActorPolicy, "predict_action_batch", shaken)
    config = read_config(run / "checkpoints" / "rl_000003")
    config.checkpoint = str(run)
    with _checker(config) as checker:
        failed = [check.name for check in checker.torch_checks() if check.passed is False]
    assert "torch: repeatable, greedy" in failed, "control: greedy actions that do not repeat"


def test_a_head_on_merged_adapters_is_exported_like_any_other(tmp_path):
    """Adapters are merged first, an actor learns on the result, and its export acts as it does."""
    lora = ["model=openvla_tiny", "model.is_lora=true", "model.lora.rank=4", "sft.max_steps=2", "sft.num_demonstrations=4",
            "sft.batch_size=8", "trainer.max_steps=0", "evaluation.num_episodes=2"]  # fmt: skip
    trained(tmp_path / "lora", *lora)
    assert main(["export", f"checkpoint={tmp_path / 'lora'}", f"output={tmp_path / 'merged'}", "merge_lora=true"]) == 0
    headed = [
        "model=openvla_tiny",
        f"init_from={tmp_path / 'merged'}",
        "evaluation.num_episodes=2",
        "trainer.max_steps=2",
    ]
    run = trained(tmp_path / "run", *HEAD, *headed)
    assert main(["export", f"checkpoint={run}", f"output={tmp_path / 'export'}"]) == 0
    policy = open_checkpoint(run, read_config(run / "checkpoints" / "rl_000002")).policy
    loaded = open_checkpoint(tmp_path / "export", read_config(tmp_path / "export")).policy
    seen, taken = recorded(policy, tmp_path / "export", 4)
    assert np.array_equal(recorded(loaded, tmp_path / "export", 4)[1], taken) and len(seen) > 16
    merged = open_checkpoint(tmp_path / "merged", read_config(tmp_path / "merged")).policy
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, loaded.base.state_dict()[name]), name
