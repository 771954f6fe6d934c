"""`rlinf distil`: a base policy and its actor become one ordinary policy, with the numbers of all three."""

import itertools
import json
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from run_results import QUIET, run_config

import rlinf
from rlinf.cli import main
from rlinf.commands.train import train
from rlinf.errors import ConfigError
from rlinf.evaluation.compare import mcnemar_exact
from rlinf.preflight.validation import validate

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

# The demonstrator misses by 7 cm, which the actor corrects.
TRAINED = [
    *QUIET, "env=tabletop", "env.tasks=[reach,reach_zone]", "env.max_episode_steps=16", "env.cameras=[]", "env.state=full", "model=mlp",
    "sft.max_steps=150", "sft.num_demonstrations=60", "sft.learning_rate=0.003", "sft.expert.aim_offset_m=[0.07,0]",
    "algorithm=sac", "algorithm.learning_starts=500", "algorithm.batch_size=64", "rollout.num_envs=16", "rollout.num_chunks=16",
    "trainer.max_steps=12", "evaluation.num_episodes=40", "evaluation.num_envs=20", "evaluation.probe=false",
]  # fmt: skip
DISTILLED = ["collect.num_episodes=60", "evaluation.first_episode=40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a run and its distillation ``out``."""
    folder = tmp_path_factory.mktemp("distil")
    config = run_config(folder / "run", *TRAINED)
    validate(config)
    train(config)
    assert main(["distil", f"checkpoint={folder / 'run'}", f"output={folder / 'out'}", *DISTILLED]) == 0
    return folder


def successes(evaluation: Path) -> np.ndarray:
    results = json.loads((evaluation / "result.json").read_text(encoding="utf-8"))["results"]
    return np.array([row["success"] for row in results])


def test_the_distilled_policy_keeps_the_improvement_without_the_actor(folder, tmp_path):
    out, report = folder / "out", json.loads((folder / "out" / "distil.json").read_text(encoding="utf-8"))
    base, improved = (successes(out / "evaluations" / name) for name in ("base", "improved"))
    assert main(["evaluate", f"checkpoint={out / 'policy'}", f"output_dir={tmp_path / 'again'}"]) == 0
    distilled = successes(tmp_path / "again")
    assert base.mean() < 0.5 < 0.9 < improved.mean()
    assert report["retained"] == pytest.approx((distilled.mean() - base.mean()) / (improved.mean() - base.mean()))
    assert report["retained"] > 0.9
    assert {name: values["successes"] for name, values in report["success"].items()} == {
        "base": base.sum(), "improved": improved.sum(), "distilled": distilled.sum(),
    }  # fmt: skip
    paired = report["over_base"]["distilled"]
    assert (paired["only_a"], paired["only_b"]) == ((base & ~distilled).sum(), (distilled & ~base).sum())
    assert paired["p_value"] == pytest.approx(mcnemar_exact(paired["only_a"], paired["only_b"]))
    policy = rlinf.load_policy(out / "policy").model
    assert type(policy) is type(rlinf.load_policy(out / "base").model) and not hasattr(policy, "actor")
    about = json.loads((out / "episodes" / "meta" / "rlinf.json").read_text(encoding="utf-8"))
    outcomes = [row["success"] for row in about["episodes"]]
    assert (report["cloned"]["successes"], report["cloned"]["episodes"]) == (sum(outcomes), 60)
    assert f"{report['retained']:.0%}" in (out / "policy" / "DISTILLATION.md").read_text(encoding="utf-8")


def interrupted(function, number: int):
    """Return ``function``, of which call ``number`` is a Ctrl-C."""
    calls = itertools.count(1)

    def call(*args, **kwargs):
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


def test_an_interrupted_distillation_continues(folder, tmp_path, monkeypatch):
    """Interrupted in the middle of the rollouts, of cloning and of an evaluation, it ends with the files of the fixture."""
    out = tmp_path / "out"
    again = ["distil", f"checkpoint={folder / 'run'}", f"output={out}", *DISTILLED, "trainer.save_every=20"]
    for target, number in (
        ("rlinf.commands.collect.run_episodes", 3),
        ("rlinf.training.cloning_trainer.CloningTrainer.update", 60),
        ("rlinf.commands.distil.export", 1),
        ("rlinf.evaluation.partial.PartialResults.add", 50),
    ):
        module, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(module)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), number))
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                raise SystemExit(main(again))
    assert (out / "run" / "checkpoints").is_dir() and not (out / "distil.json").exists()
    assert main(again) == 0
    for name in ("distil.json", "policy/model.safetensors"):
        assert (out / name).read_bytes() == (folder / "out" / name).read_bytes()


def rejection(*arguments: str) -> str:
    """Return the message with which the arguments are rejected."""
    with pytest.raises(ConfigError) as error:
        from rlinf.cli.run import distil

        distil(arguments)
    return str(error.value)


def test_what_cannot_be_distilled_is_rejected_before_an_episode(folder, tmp_path):
    run, out = f"checkpoint={folder / 'run'}", f"output={tmp_path / 'out'}"
    assert "without an actor" in rejection(f"checkpoint={folder / 'out' / 'base'}", out)
    assert "output=<folder>" in rejection(run)
    assert "sft.max_steps=0" in rejection(run, out, "sft.max_steps=0")
    assert "collect.num_episodes 60 -> 61" in rejection(
        run, f"output={folder / 'out'}", *DISTILLED, "collect.num_episodes=61"
    )
    assert "collect.extends=null" in rejection(run, out, "collect.extends=data")
    assert "Set collect.num_episodes=" in rejection(run, out, "collect.num_episodes=10000000")
    assert not (tmp_path / "out").exists()
    (tmp_path / "own" / "episodes").mkdir(parents=True)
    assert "is not a distillation's" in rejection(run, f"output={tmp_path / 'own'}")
    assert (tmp_path / "own" / "episodes").is_dir()
    few_steps = ["env.max_episode_steps=1", "evaluation.allow_mismatch=[env]", "collect.num_episodes=3"]
    assert "None of 3 episodes succeeded" in rejection(run, out, *few_steps)
    assert not (tmp_path / "out" / "policy").exists()
