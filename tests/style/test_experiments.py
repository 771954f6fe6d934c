"""The experiment files: short, composed, valid, and holding only what differs from the defaults."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.config.search import packaged_experiments
from rlinf.envs import ENVS
from rlinf.errors import MissingDependencyError
from rlinf.preflight.derived import format_derived
from rlinf.preflight.validation import validate

EXPERIMENTS = sorted(packaged_experiments().glob("*.yaml"))
MAX_LINES = 30
MUST_EXIST = {
    "quickstart", "quickstart_grpo", "tabletop_ppo_mlp", "tabletop_sft_openvla_tiny", "openvla_tabletop_lora", "your_config",
    "quickstart_vllm",
}  # fmt: skip
# What a user has to add before an experiment can run, as its own comment says.
COMPLETED_BY = {
    path.stem: ["model.model_path=organisation/model"]
    for path in EXPERIMENTS
    if "Add model.model_path=" in path.read_text(encoding="utf-8")
}
TEMPLATE = "your_config"


def described_dataset(folder: Path, config: RunConfig) -> str:
    """A folder that describes itself as demonstrations of the env, which is what the check before a run reads."""
    env, pixels = config.env, [config.env.image_size, config.env.image_size, 3]
    widths = {"action": config.model.action_token_len, "observation.state": ENVS.get(env.name).state_width(env)}
    features = {name: {"dtype": "float32", "shape": [width]} for name, width in widths.items() if width}
    names = ["height", "width", "channels"]
    features |= {name: {"dtype": "bool", "shape": [1]} for name in ("next.success", "intervention")}
    features |= {
        f"observation.images.{name}": {"dtype": "image", "shape": pixels, "names": names} for name in env.cameras
    }
    (folder / "meta").mkdir()
    info = {"codebase_version": "v3.0", "total_episodes": 1, "total_frames": 1, "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return str(folder)


def test_the_experiments_of_the_documentation_exist():
    assert {path.stem for path in EXPERIMENTS} >= MUST_EXIST


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_short_composes_and_is_valid(path: Path, tmp_path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    config = build_config(compose_config([f"experiment={path.stem}", *COMPLETED_BY.get(path.stem, [])]))
    assert config.experiment_name == path.stem
    if "sft.dataset=<" in text:
        config.sft.dataset = described_dataset(tmp_path, config)
    if "offline_dataset=<" in text:
        config.algorithm.offline_dataset = described_dataset(tmp_path, config)
    if path.stem != TEMPLATE:  # a template for a model of the user's own; its keys have their own tests
        try:
            validate(config)
        except MissingDependencyError as missing:
            pytest.skip(str(missing))
        assert "seed" in format_derived(config)


def test_experiments_say_what_they_are_for_and_have_only_known_sections():
    known = {"defaults", *OmegaConf.to_container(compose_config(), resolve=False)}
    for path in EXPERIMENTS:
        text = path.read_text(encoding="utf-8")
        assert set(yaml.safe_load(text)) <= known and (text.startswith("# ") or path.stem == TEMPLATE), path
