"""The core works without the wings: in a copy of the package that lacks their folders, its commands run, and the missing ones say why."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.cli import EXIT_USER_ERROR
from rlinf.wings import WINGS

ROOT = Path(__file__).parents[2]
FOLDERS = [folder for wing in WINGS.values() for folder in wing.folders]
TINY = [
    "experiment=quickstart", "trainer.max_steps=2", "sft.max_steps=2", "sft.num_demonstrations=8", "sft.batch_size=8",
    "env.max_episode_steps=4", "rollout.num_envs=4", "rollout.num_chunks=4", "trainer.minibatch_size=8",
    "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.num_videos_per_task=0", "evaluation.probe=false",
    "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """Return a folder with a copy of the package, without the wings, and of its experiments."""
    folder = tmp_path_factory.mktemp("core")
    package = folder / "rlinf"
    shutil.copytree(ROOT / "rlinf", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in FOLDERS:
        shutil.rmtree(package / path)
    shutil.copytree(ROOT / "examples/embodiment/config", package / "experiments")
    return folder


def run(core: Path, *commands: list[str]) -> tuple[list[int], str, str]:
    """Run ``rlinf`` commands one after the other in one process; return their exit statuses, and the process's output and errors."""
    code = f"import json; from rlinf.cli import main; print(json.dumps([main(command) for command in {commands!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    *lines, last = done.stdout.splitlines() or [""]
    return json.loads(last) if done.returncode == 0 else [], "\n".join(lines), done.stderr


def test_without_wings_the_core_lists_trains_evaluates_exports_and_reports(core):
    folder = core / "outputs" / "run"
    statuses, output, errors = run(
        core,
        ["--help"],
        ["models"],
        ["doctor", "env=tabletop"],
        ["train", *TINY, f"output_dir={folder}"],
        ["evaluate", f"checkpoint={folder}", f"output_dir={core / 'evaluation'}"],
        ["export", f"checkpoint={folder}", f"output={core / 'export'}"],
        ["report", str(folder), f"output={core / 'runs.html'}"],
        ["why", str(folder)],
    )
    assert statuses == [0] * 8, output + errors
    pages = (folder / "report.html", core / "evaluation" / "report.html", core / "runs.html")
    assert all(page.stat().st_size > 1000 for page in pages)
    assert (core / "export" / "config.json").is_file() or (core / "export" / "policy.json").is_file()
    listed = set(re.findall(r"^(?:  |model type +|env +)([\w-]+)", output, re.MULTILINE))
    assert {"train", "tabletop", "openvla"} <= listed
    assert listed.isdisjoint(
        name for wing in WINGS.values() for kind in (wing.commands, wing.models, wing.envs) for name in kind
    )


def test_a_command_model_or_env_of_a_missing_wing_is_an_error_that_names_its_folder(core):
    cases = [([name], wing) for wing in WINGS.values() for name in wing.commands]
    cases += [(["check", f"env={name}"], wing) for wing in WINGS.values() for name in wing.envs]
    cases += [(["train", f"model={name}", "env=tabletop"], wing) for wing in WINGS.values() for name in wing.models]
    cases += [(["train", "model=mlp", "model.model_type=llama", "env=tabletop"], WINGS["tokens"])]
    recipe = core / "recipe"
    (recipe / "model").mkdir(parents=True)
    for name, text in (("state.json", "{}"), ("config.yaml", "policy: {}\ntrain: {}\n")):
        (recipe / name).write_text(text)
    export = ["export", f"checkpoint={recipe}", f"output={core / 'exported'}"]
    cases += [([*export, *words], WINGS["tokens"]) for words in ([], ["policy.model_name_or_path=m"])]
    statuses, _, errors = run(core, *(command for command, _ in cases))
    assert statuses == [EXIT_USER_ERROR] * len(cases), errors
    lines = errors.splitlines()
    assert len(lines) == len(cases), errors
    for line, (command, wing) in zip(lines, cases, strict=True):
        assert all(f"rlinf/{folder}" in line for folder in wing.folders), (command, line)


def test_a_module_of_the_core_that_imports_a_wing_is_seen(core):
    """Control."""
    listing = core / "rlinf" / "cli" / "listing.py"
    text = listing.read_text(encoding="utf-8")
    listing.write_text(f"{text}\nimport rlinf.robot.config\n", encoding="utf-8")
    statuses, _, errors = run(core, ["models"])
    listing.write_text(text, encoding="utf-8")
    assert not statuses and "No module named 'rlinf.robot'" in errors
