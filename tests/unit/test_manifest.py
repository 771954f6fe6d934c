"""Manifest: what must match is refused with both values and the override to type; what only informs is reported."""

import copy
import json
import subprocess
from dataclasses import replace

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.manifest import (
    Manifest,
    build_manifest,
    changed_files,
    check,
    compare,
    hash_files,
    package_versions,
    verify_files,
)  # fmt: skip

STATISTICS = {"action": {"q01": [-0.05, -0.05], "q99": [0.05, 0.05], "mask": [True, True]}}


def manifest(**changes) -> Manifest:
    values = dict(
        versions={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.19.0", "mujoco": "3.3.0", "numpy": "2.1.0"},
        model={"model_type": "openvla", "class": "OpenVLAForRLActionPrediction"},
        normalization={"unnorm_key": "tabletop", "statistics": copy.deepcopy(STATISTICS)},
        preprocessing={"image_size": [64, 64], "cameras": ["front"], "processor": {"means": [[0.5, 0.5, 0.5]]}},
        actions={"action_token_len": 2, "action_chunks_len": 1, "n_action_bins": 21},
        lora={"state": "none"},
        precision="fp32",
        env={"name": "tabletop", "cameras": ["front"], "image_size": 64, "max_episode_steps": 16,
             "reward_mode": "shaped", "terminate_on_success": True},
        renderer="egl",
        policy_version=7,
        seed=0,
        git_revision="abc",
    )  # fmt: skip
    return Manifest(**(values | changes))


def changed(path: str, value) -> Manifest:
    """Return a manifest in which one dotted field has another value."""
    result = manifest()
    section, *keys = path.split(".")
    if not keys:
        return replace(result, **{section: value})
    node = getattr(result, section)
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return result


MUST_MATCH = {
    "versions.transformers": "5.20.0",
    "versions.mujoco": "3.4.0",
    "model.model_type": "mlp",
    "model.class": "Other",
    "normalization.unnorm_key": "bridge_orig",
    "normalization.statistics.action.q01": [-0.05, -0.06],
    "normalization.statistics.action.mask": [True, False],
    "preprocessing.image_size": [224, 224],
    "preprocessing.cameras": ["front", "wrist"],
    "preprocessing.processor.means": [[0.4, 0.5, 0.5]],
    "actions.action_chunks_len": 4,
    "actions.n_action_bins": 256,
    "lora.state": "merged",
    "precision": "bf16",
    "env.name": "libero",
    "env.cameras": ["wrist"],
    "env.image_size": 128,
    "env.max_episode_steps": 32,
    "env.terminate_on_success": False,
}
INFORMATIVE = {
    "versions.python": "3.13.0",
    "versions.torch": "2.14.0",
    "versions.numpy": "2.2.0",
    "versions.transformers": "5.19.3",
    "versions.mujoco": "3.3.9",
    "env.reward_mode": "sparse",
    "renderer": "osmesa",
    "policy_version": 8,
    "seed": 1,
    "git_revision": "def-dirty",
}


def test_equal_manifests_match():
    assert compare(manifest(), manifest()) == []
    assert check(manifest(), manifest()) == []


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_field_that_changes_results_is_refused(field):
    with pytest.raises(ManifestMismatchError) as caught:
        check(manifest(), changed(field, MUST_MATCH[field]))
    message = str(caught.value)
    assert f"{field}: saved {json.dumps(manifest().facts()[field])}, present {json.dumps(MUST_MATCH[field])}" in message
    assert f"evaluation.allow_mismatch=[{field}]" in message
    allowed = check(manifest(), changed(field, MUST_MATCH[field]), [field])
    assert [mismatch.field for mismatch in allowed] == [field]


@pytest.mark.parametrize("field", INFORMATIVE)
def test_a_field_that_informs_is_reported_and_not_refused(field):
    (mismatch,) = check(manifest(), changed(field, INFORMATIVE[field]))
    assert mismatch.field == field and not mismatch.must_match


def test_all_differences_are_listed_with_one_override():
    present = replace(changed("env.image_size", 128), precision="bf16", seed=5)
    with pytest.raises(
        ManifestMismatchError, match=r"(?s)precision.*env.image_size.*allow_mismatch=\[precision,env.image_size\]"
    ) as caught:
        check(manifest(), present)
    assert "seed" not in str(caught.value)
    with pytest.raises(ManifestMismatchError, match=r"allow_mismatch=\[precision,env.image_size\]"):
        check(manifest(), present, ["precision"])
    assert len(check(manifest(), present, ["precision", "env"])) == 3


def test_allowing_an_unknown_field_is_an_error():
    with pytest.raises(ConfigError, match="'env.image_sise'.*Did you mean 'env.image_size'"):
        check(manifest(), manifest(), ["env.image_sise"])


def test_adapter_settings_must_match():
    adapter = manifest(lora={"state": "adapter", "rank": 8, "alpha": 16})
    with pytest.raises(ManifestMismatchError, match="lora.rank: saved 8, present 16"):
        check(adapter, manifest(lora={"state": "adapter", "rank": 16, "alpha": 16}))
    with pytest.raises(ManifestMismatchError, match="lora.state"):
        check(adapter, manifest())


def test_a_missing_simulator_is_no_mismatch_but_missing_statistics_are():
    without = changed("env.reward_mode", "shaped")
    del without.versions["mujoco"]
    assert [m.must_match for m in compare(manifest(), without)] == [False]
    with pytest.raises(ManifestMismatchError, match="statistics"):
        check(manifest(), manifest(normalization={"unnorm_key": "tabletop", "statistics": None}))


def test_round_trip(tmp_path):
    original = manifest(files={"a": "0" * 64})
    original.save(tmp_path)
    assert Manifest.load(tmp_path) == original
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "unknown": 3}'])
def test_unreadable_manifests_are_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no manifest.json"):
        Manifest.load(tmp_path)


def test_files_are_verified(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.bin").write_bytes(b"abc")
    (tmp_path / "b.txt").write_text("b")
    files = hash_files(tmp_path)
    # sha256("abc"), from FIPS 180-2
    assert files["model/a.bin"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    saved = manifest(files=files)
    saved.save(tmp_path)
    verify_files(tmp_path, saved)
    (tmp_path / "model" / "a.bin").write_bytes(b"abd")
    (tmp_path / "b.txt").unlink()
    assert sorted(changed_files(tmp_path, saved)) == ["b.txt", "model/a.bin"]
    with pytest.raises(CheckpointError, match="2 of 2 files.*copy it again"):
        verify_files(tmp_path, saved)


@pytest.fixture(scope="module")
def mlp():
    from rlinf.models import build_policy

    config = build_config(compose_config(["model=mlp", "env=tabletop", "output_dir=unused"]))
    return config, build_policy(config, {"norm_stats": {"tabletop": STATISTICS}})


def test_manifest_of_a_policy_records_the_conditions(mlp):
    config, model = mlp
    built = build_manifest(config, model, policy_version=3)
    assert built.model == {"model_type": "mlp", "class": "MLPForRLActionPrediction"}
    assert built.normalization == {"unnorm_key": "tabletop", "statistics": STATISTICS}
    assert built.env["image_size"] == config.env.image_size and built.preprocessing["cameras"] == list(
        config.env.cameras
    )
    assert built.lora == {"state": "none"} and built.policy_version == 3 and built.seed == config.seed
    assert {"python", "rlinf", "torch", "transformers", "mujoco"} <= built.versions.keys()
    assert check(built, build_manifest(config, model, policy_version=3)) == []
    other = replace(config, env=replace(config.env, image_size=config.env.image_size + 8))
    with pytest.raises(ManifestMismatchError, match="env.image_size"):
        check(built, build_manifest(other, model, policy_version=3))


def test_merged_adapters_are_recorded(mlp):
    config, model = mlp
    model.config.merged_adapters = ["0123"]
    try:
        merged = build_manifest(config, model, policy_version=0)
    finally:
        del model.config.merged_adapters
    assert merged.lora == {"state": "merged"}
    with pytest.raises(ManifestMismatchError, match='lora.state: saved "merged", present "none"'):
        check(merged, build_manifest(config, model, policy_version=0))


def test_manifest_survives_json(mlp, tmp_path):
    config, model = mlp
    built = build_manifest(config, model, policy_version=3)
    built.save(tmp_path)
    assert compare(Manifest.load(tmp_path), built) == []


def test_versions_are_those_of_the_packages():
    import torch
    import transformers

    versions = package_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["transformers"] == transformers.__version__
    assert "no-such-simulator" not in package_versions(["no-such-simulator"])


def test_git_revision_is_none_outside_a_repository(monkeypatch):
    from rlinf.manifest import git_revision

    def fail(*_, **__):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert git_revision() is None
