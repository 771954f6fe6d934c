"""docs/adding_an_algorithm.md and the example that it names are executed, and the algorithms train."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rollout_batches import rollout_batch
from run_results import differing_weights, metrics_of, untimed_metrics, weights_of

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import Algorithm, LossCounts
from rlinf.cli import main
from rlinf.commands.train import build, train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.preflight.derived import format_derived
from rlinf.preflight.validation import validate
from rlinf.tracking import METRICS
from rlinf.training.loop import Loop
from rlinf.types import ActionEvaluation, RolloutBatch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8")
FILE, PLAIN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SEARCH = (ROOT / "examples" / "embodiment" / "plugins" / "random_search.py").read_text(encoding="utf-8")
YAML = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL).group(1)
COMMAND = re.search(r"rlinf train (--config-dir.*?)\n```", PAGE, re.DOTALL).group(1)
SMALL = [
    "env.cameras=[]", "env.max_episode_steps=8", "rollout.num_envs=8", "rollout.num_chunks=8", "trainer.max_steps=2",
    "trainer.minibatch_size=32", "model.micro_batch_size=32", "evaluation.num_episodes=4", "evaluation.num_envs=4",
    "evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files where the page says that they lie; what they register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "my_reinforce.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "my_configs" / "algorithm").mkdir(parents=True)
    (tmp_path / "my_configs" / "algorithm" / "my_reinforce.yaml").write_text(YAML, encoding="utf-8")
    known = set(METRICS)
    yield tmp_path
    for name in set(METRICS) - known:
        del METRICS[name]


@pytest.fixture
def page(folder):
    """What the page's two Python blocks define."""
    scope: dict = {"__name__": "my_reinforce"}
    for code in (FILE, PLAIN):
        exec(compile(code, "adding_an_algorithm.md", "exec", dont_inherit=True), scope)
    return SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})


def composed(folder: Path, *more: str):
    """The configuration of the page's command line, made small."""
    words = COMMAND.replace("\\\n", " ").split()
    flag, config_dir, *overrides = words
    assert flag == "--config-dir"
    config = build_config(compose_config([*overrides, *SMALL, *more], config_dir))
    config.output_dir = str(folder / "run")
    return config


def test_the_command_of_the_page_trains_two_iterations(folder):
    config = composed(folder)
    validate(config)
    assert config.algorithm.name == "my_reinforce" and config.model.model_type == "mlp"
    run = build(config)
    before = {name: parameter.detach().clone() for name, parameter in run.parts.worker.model.named_parameters()}
    run.execute()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [0, 1]
    assert all(line["train/baseline"] != 0 and line["train/grad_norm"] > 0 for line in steps)
    for name, parameter in run.parts.worker.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("value_head" in name), name


SEARCHES = (
    "experiment=tabletop_ppo_mlp",
    "algorithm=random_search",
    "algorithm.std=0.3",
    "sft.max_steps=0",
    "trainer.eval_every=2",
)


def test_two_ranks_load_the_plugin_and_log_the_same_baselines(folder):
    def baselines(name: str, *more: str) -> list[float]:
        config = composed(folder, *more)
        config.output_dir = str(folder / name)
        train(config)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return [line["train/baseline"] for line in lines if "train/baseline" in line]

    one = baselines("one")
    assert baselines("two", "cluster.num_processes=2") == pytest.approx(one, abs=1e-5)
    assert len(one) == 2 and one[0] != one[1], "control: the number changes from one iteration to the next"


@pytest.fixture
def search(folder):
    """Configure the random search of the page for the policy of ``tabletop_ppo_mlp``."""
    (folder / "random_search.py").write_text(SEARCH, encoding="utf-8")
    (folder / "my_configs" / "algorithm" / "random_search.yaml").write_text("name: random_search\n", encoding="utf-8")

    def configured(name: str, *more: str):
        words = [
            "plugins=[random_search.py]",
            *SEARCHES,
            *SMALL,
            "env.reward_mode=shaped",
            "trainer.max_steps=6",
            *more,
        ]
        config = build_config(compose_config(words, "my_configs"))
        config.output_dir = str(folder / name)
        return config

    return configured


def test_a_trainer_of_its_own_keeps_only_changes_that_are_better(folder, search):
    assert len(SEARCH.splitlines()) <= 80
    config = search("run")
    validate(config)
    assert f"0 optimiser steps, up to {6 * 8 * 8 * config.model.action_chunks_len:,} env steps" in format_derived(
        config
    )
    run, trace = build(config), []
    model, iteration = run.parts.worker.model, run.rl.iteration

    def traced(step: int) -> dict[str, float]:
        before, best = torch.cat([each.flatten() for each in model.parameters()]).detach(), run.rl.best.item()
        metrics = iteration(step)
        is_kept = not torch.equal(torch.cat([each.flatten() for each in model.parameters()]), before)
        trace.append((is_kept, metrics["rollout/return_mean"] > best))
        return metrics

    run.rl.iteration = traced
    run.execute()
    assert trace[0] == (False, True), "the first rollout is that of the weights as they are"
    assert [kept for kept, _ in trace[1:]] == [better for _, better in trace[1:]]
    assert len(set(trace[1:])) == 2, "control: of the changes, some are better and some are not"
    lines = metrics_of(folder / "run")
    assert sum("rollout/return_mean" in line for line in lines) == 6
    assert (folder / "run" / "checkpoints" / "rl_000006").is_dir()


def test_a_trainer_of_its_own_resumes_bit_for_bit(folder, search, monkeypatch):
    train(search("whole"))
    for name in ("halves", "forgetful"):
        train(search(name, "trainer.max_steps=3"))
    train(search("halves", f"resume={folder / 'halves'}"))
    assert untimed_metrics(folder / "halves") == untimed_metrics(folder / "whole")
    assert not differing_weights(*(weights_of(folder / name, "rl_000006") for name in ("halves", "whole")))
    monkeypatch.setattr(Loop, "restore", lambda *_: None)
    train(search("forgetful", f"resume={folder / 'forgetful'}"))
    assert untimed_metrics(folder / "forgetful") != untimed_metrics(folder / "whole"), "control"


@pytest.mark.parametrize("command", ["models", "doctor"])
def test_a_trainer_of_its_own_is_listed(search, capsys, monkeypatch, command):
    monkeypatch.delitem(ALGORITHMS._entries, "random_search", raising=False)
    main([command])
    assert "random_search" not in capsys.readouterr().out, "control"
    main([command, "plugins=[random_search.py]"])
    assert "random_search" in capsys.readouterr().out


def rollout(**fields: torch.Tensor) -> RolloutBatch:
    """Two envs, three policy calls of one action of two tokens: env 0 ends at the second call, and its third is not part."""
    ended = torch.tensor([[False, False], [True, False], [False, False]])
    batch = rollout_batch(
        3, 2, width=2,
        action_rewards=torch.tensor([[[1.0], [0.0]], [[2.0], [0.0]], [[0.0], [4.0]]]),
        action_mask=torch.tensor([[[True], [True]], [[True], [True]], [[False], [True]]]),
        loss_mask=torch.tensor([[True, True], [True, True], [False, True]]),
        terminated=ended, old_logprobs=torch.zeros(3, 2, 2), values=torch.full((3, 2), 7.0),  # values must not matter
    )  # fmt: skip
    return replace(batch, **fields)


def test_returns_and_baseline_by_hand(page):
    batch = rollout()
    metrics = page.MyReinforce(page.MyReinforceConfig(gamma=0.5)).compute_advantages(batch)
    assert batch.returns.tolist() == [[2.0, 1.0], [2.0, 2.0], [0.0, 4.0]]  # 1 + 0.5 * 2; 0.5^2 * 4, 0.5 * 4, 4
    assert metrics == {"train/baseline": pytest.approx(11 / 5)}
    assert batch.advantages[batch.action_mask].sum() == pytest.approx(0.0, abs=1e-6)
    bare = rollout()
    page.MyReinforce(page.MyReinforceConfig(gamma=0.5, baseline="none")).compute_advantages(bare)
    assert bare.advantages[..., 0].tolist() == bare.returns.tolist(), "control: without a baseline the mean is not 0"


def gradient(algorithm: Algorithm, shift: float) -> torch.Tensor:
    """Gradient with respect to the log-probabilities of a policy that has moved by ``shift`` since the rollout."""
    batch = rollout()
    algorithm.compute_advantages(batch)
    flat = batch.flatten()
    logprobs = torch.full((6, 2), shift, requires_grad=True)
    evaluation = ActionEvaluation(logprobs, torch.zeros(6, 2), torch.zeros(6))
    algorithm.loss(flat, evaluation, LossCounts.of(flat, algorithm.config), iteration=0).loss.backward()
    return logprobs.grad


def test_both_losses_agree_on_policy_and_differ_off_policy(page):
    config = page.MyReinforceConfig()
    clipped, plain = page.MyReinforce(config), page.PlainReinforce(config)
    torch.testing.assert_close(gradient(plain, 0.0), gradient(clipped, 0.0))
    assert gradient(plain, 0.0).abs().sum() > 0 and not gradient(plain, 0.0)[4].any(), "the masked call has no gradient"
    assert not torch.allclose(gradient(plain, 0.05), gradient(clipped, 0.05)), "control"
