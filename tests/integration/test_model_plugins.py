"""Models, envs and algorithms from outside of the package: an installed one, and a folder of one's own.

Training uses two processes, because a name that only the parent knows is of no use.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests" / "fixtures" / "rlinf_sample_plugin"
PROCESSES = {"MainProcess", "SpawnProcess-1", "SpawnProcess-2"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which pip has installed the sample package."""
    for module in ("pip", "setuptools"):
        # find_spec("pip") would keep setuptools from being imported later.
        if not list(importlib.metadata.distributions(name=module)):
            pytest.skip(f"{module} is not in this Python environment, so no package can be built and installed")
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, folder / "source")  # setuptools leaves its build files there
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", "site", "./source"]
    subprocess.run(command, check=True, timeout=280, cwd=folder)
    return folder / "site"


def rlinf(folder, *arguments, site=None, **environment):
    """Run the command in ``folder``; returns the finished process."""
    path = os.pathsep.join([str(ROOT), *([str(site)] if site else [])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "rlinf", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def rows_of(text):
    """Return ``(kind, name) -> from`` of the table that `rlinf models` prints."""
    cells = [re.split(r" {2,}", line.strip()) for line in text.split("\n\n")[0].splitlines()[2:]]
    return {(kind, name): origin for kind, name, origin in cells}


def losses_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def saved_config(run):
    (path,) = run.glob("checkpoints/rl_000001/config.yaml")
    return path.read_text(encoding="utf-8")


def test_installed_package_is_listed_with_its_name_and_version(installed, tmp_path):
    result = rlinf(tmp_path, "models", site=installed)
    rows = rows_of(result.stdout)
    for key in (("model type", "sample_policy"), ("env", "sample_line"), ("algorithm", "sample_reinforce")):
        assert rows[key] == "rlinf-sample-plugin 0.3"
    assert rows["model type", "openvla"] == rows["env", "tabletop"] == rows["algorithm", "ppo"] == "rlinf"
    assert "sample" in next(line for line in result.stdout.splitlines() if line.startswith("model=")).split()
    without = rlinf(tmp_path, "models")
    assert without.returncode == 0 and not re.search(r"\bsample(_|\b)", without.stdout.split("experiment=")[0]), (
        "control: not installed, not listed"
    )


OWN_FILES = {
    "policy": """
from rlinf.models import register_model
register_model("own_policy", model=SamplePolicy, load_processor=load_processor)
Path(os.environ["OWN_LOG"], multiprocessing.current_process().name).touch()
""",
    "reinforce": """
from rlinf.algorithms import register_algorithm
register_algorithm("own_reinforce", Reinforce)
""",
}
"""Lines at the end of a copy of a file of the sample package."""


def test_an_installed_env_and_files_of_ones_own_train_together_in_every_process(installed, tmp_path):
    """``--config-dir`` with an experiment, its groups, and the files that it names in ``plugins``, next to it."""
    mine, source = tmp_path / "mine", PACKAGE / "rlinf_sample"
    for group, file in {"model": "model/own.yaml", "algorithm": "algorithm/own.yaml", "experiment": "own.yaml"}.items():
        text = (source / "config" / group / "sample.yaml").read_text(encoding="utf-8").replace("sample", "own")
        text += "plugins: [my_policy.py, my_reinforce]\n" if group == "experiment" else ""
        (mine / file).parent.mkdir(parents=True, exist_ok=True)
        (mine / file).write_text(text.replace("/env: own", "/env: sample"), encoding="utf-8")
    for name, registration in OWN_FILES.items():
        text = (source / f"{name}.py").read_text(encoding="utf-8").replace("sample_policy", "own_policy")
        text = text.replace(
            "import annotations", "import annotations\nimport multiprocessing, os\nfrom pathlib import Path"
        )
        (mine / f"my_{name}.py").write_text(text + registration, encoding="utf-8")
    logs = {"SAMPLE_PLUGIN_LOG": tmp_path / "installed", "OWN_LOG": tmp_path / "own"}
    for folder in logs.values():
        folder.mkdir()
    arguments = ["experiment=own", "cluster.num_processes=2", "cluster.num_threads=1", "output_dir=run"]
    environment = {name: str(folder) for name, folder in logs.items()}
    result = rlinf(tmp_path, "train", "--config-dir", "mine", *arguments, site=installed, **environment)
    assert result.returncode == 0, result.stderr
    for folder in logs.values():
        assert {path.name for path in folder.iterdir()} == PROCESSES
    assert len(losses_of(tmp_path / "run")) == 1
    saved = saved_config(tmp_path / "run")
    assert all(line in saved for line in ("num_bins: 3", "stride: 0.25", "gamma: 0.8")), "keys of the YAML files"
    assert str(mine / "my_policy.py") in saved, "the file is found again from any folder"
