"""A policy that normalises its state acts alike wherever it goes: evaluated, exported, loaded, served, and below an actor."""

import copy
import json
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_servers import in_a_thread
from run_results import run_config

import rlinf
from rlinf.algorithms.running_moments import FIRST_COUNT, RunningMoments
from rlinf.cli import main
from rlinf.commands.open_checkpoint import open_checkpoint, read_config
from rlinf.commands.serve import PolicyRows, ServeConfig, metadata_of
from rlinf.commands.train import train
from rlinf.policy import Policy
from rlinf.preflight.validation import validate
from rlinf.serving.client import PolicyClient
from rlinf.serving.server import Limits, PolicyServer
from rlinf.serving.vla_eval import Hello
from rlinf.types import Observation

ENV = ["env=gymnasium", "env.id=Pendulum-v1", "env.num_processes=0", "env.max_episode_steps=12", "env.cameras=[]"]
EVALUATION = [
    "evaluation.num_episodes=4",
    "evaluation.num_videos_per_task=0",
    "tracking.progress=false",
    "cluster.num_threads=1",
]
RUN = [
    *ENV, *EVALUATION, "model=mlp", "model.init_config.state_dim=3", "model.action_token_len=1", "rollout.num_envs=4",
    "rollout.num_chunks=12", "trainer.max_steps=2", "evaluation.probe=false", "tracking.tensorboard=false",
]  # fmt: skip
PPO = ["algorithm=ppo", "model.init_config.normalize_state=true", "algorithm.scale_rewards=true", "trainer.minibatch_size=24",
       "algorithm.critic_warmup_steps=0"]  # fmt: skip
HEAD = ["algorithm=sac", "algorithm.actor.name=residual", "algorithm.learning_starts=12", "algorithm.batch_size=8",
        "algorithm.replay_capacity=200", "algorithm.actor.hidden_size=16"]  # fmt: skip


def trained(folder: Path, *words: str) -> Path:
    config = run_config(folder, *RUN, *words)
    validate(config)
    train(config)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """PPO, and a residual actor on its policy; both in two halves."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words, source in (("ppo", PPO, "null"), ("actor", HEAD, folder / "ppo")):
        trained(folder / name, *words, f"init_from={source}", "trainer.max_steps=1")
        trained(folder / name, *words, f"resume={folder / name}")
    return {name: folder / name for name in ("ppo", "actor")}


@contextmanager
def served(folder: Path):
    """Serve a checkpoint as ``rlinf serve`` does; yield the URL."""
    config = replace(read_config(folder), checkpoint=str(folder))
    opened, settings = open_checkpoint(folder, config, []), ServeConfig()
    rows = PolicyRows(Policy(opened.policy.eval(), config), settings)
    limits = Limits(16, 0.01, 2**20, 4096, 40, 60)
    metadata, hello = metadata_of(opened, rows, settings), Hello("p", 1, True, 0, execute=1)
    server = PolicyServer(rows.read, rows.read_named, rows.act, metadata, limits, hello)
    with in_a_thread(server) as (port, _):
        yield f"ws://127.0.0.1:{port}"


def greedy(policy, seen: Observation) -> np.ndarray:
    with torch.no_grad():
        return policy.predict_action_batch(do_sample=False, **policy.preprocess(seen)).actions.numpy()


def results_of(folder: Path) -> list[dict]:
    rows = json.loads((folder / "result.json").read_text(encoding="utf-8"))["results"]
    return [row | {"states_far_fraction": None} for row in rows]  # a client does not know the statistics of its policy


@pytest.mark.parametrize("name", ["ppo", "actor"])
def test_actions_are_equal_wherever_the_policy_acts(runs, name, tmp_path):
    run, export = runs[name], tmp_path / "export"
    assert main(["export", f"checkpoint={run}", f"output={export}"]) == 0
    policy = open_checkpoint(run, read_config(run / "checkpoints" / "rl_000002")).policy.eval()
    seen = Observation({}, np.random.default_rng(0).normal(0, 3, (20, 3)).astype(np.float32), ["do the task"] * 20)
    acted = greedy(policy, seen)
    assert np.array_equal(rlinf.load_policy(export).act(seen), acted)
    with served(export) as url:
        with closing(PolicyClient(url, 20, 20)) as client:
            asked = [client.ask({"state": row, "prompt": "do the task"})["actions"] for row in seen.state]
        words = [*ENV, *EVALUATION, "model=remote", f"model.url={url}", "model.connect_timeout_s=60"]
        assert main(["evaluate", *words, f"output_dir={tmp_path / 'remote'}"]) == 0
    np.testing.assert_allclose(np.stack(asked), acted, atol=1e-6)  # calls of other sizes round otherwise
    assert main(["evaluate", f"checkpoint={export}", f"output_dir={tmp_path / 'local'}"]) == 0
    assert results_of(tmp_path / "remote") == results_of(tmp_path / "local") == results_of(run / "eval" / "after_rl")
    lost = copy.deepcopy(policy)
    (lost.base if name == "actor" else lost).input_moments.load_state_dict(RunningMoments(3).state_dict())
    assert np.abs(greedy(lost, seen) - acted).max() > 1e-4, "control: a policy that has lost its moments"


def test_a_head_leaves_the_moments_of_its_policy_as_they_are(runs):
    ppo, actor = (open_checkpoint(run, read_config(run / "checkpoints" / "rl_000002")).policy for run in runs.values())
    mine, base = (policy.input_moments.state_dict() for policy in (ppo, actor.base))
    assert all(torch.equal(base[each], tensor) for each, tensor in mine.items())
    assert mine["count"].item() == pytest.approx(2 * 48 + FIRST_COUNT) and mine["mean"].abs().min() > 0
