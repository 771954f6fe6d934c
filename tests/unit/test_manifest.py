"""Manifest: what must match is rejected with both values and the override to type; what only informs is reported."""

import copy
import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.manifest import (
    Manifest,
    changed_files,
    check,
    compare,
    git_revision,
    hash_files,
    library_versions,
    package_versions,
    verify_files,
)
from rlinf.models.base_weights import weights_digest
from rlinf.preflight.conditions import build_manifest

STATISTICS = {"action": {"q01": [-0.05, -0.05], "q99": [0.05, 0.05], "mask": [True, True]}}


def manifest(**changes) -> Manifest:
    values = dict(
        versions={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.19.0", "numpy": "2.1.0"},
        model={"model_type": "openvla", "class": "OpenVLAForRLActionPrediction"},
        normalization={"unnorm_key": "tabletop", "statistics": copy.deepcopy(STATISTICS)},
        preprocessing={"image_size": [64, 64], "cameras": ["front"], "processor": {"means": [[0.5, 0.5, 0.5]]}},
        actions={"action_token_len": 2, "action_chunks_len": 1, "n_action_bins": 21},
        lora={"state": "none"},
        precision="fp32",
        env={"name": "tabletop", "cameras": ["front"], "image_size": 64,
             "max_episode_steps": {"reach": 16, "push": 48}, "terminate_on_success": True, "suite": "libero_spatial", "gripper": "env"},
        renderer="egl",
        simulators={"mujoco": "3.3.0"},
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
    "versions.transformers": "5.20.0", "simulators.mujoco": "3.3.3", "renderer": "osmesa", "precision": "bf16", "lora.state": "merged",
    "model.model_type": "mlp", "model.class": "Other", "actions.action_chunks_len": 4, "actions.n_action_bins": 256,
    "normalization.unnorm_key": "bridge_orig", "normalization.statistics.action.q01": [-0.05, -0.06],
    "normalization.statistics.action.mask": [True, False], "preprocessing.image_size": [224, 224],
    "preprocessing.cameras": ["front", "wrist"], "preprocessing.processor.means": [[0.4, 0.5, 0.5]], "env.name": "libero",
    "env.cameras": ["wrist"], "env.image_size": 128, "env.max_episode_steps.push": 49, "env.suite": "libero_goal",
    "env.gripper": "openvla", "env.terminate_on_success": False,
}  # fmt: skip
INFORMATIVE = {
    "versions.python": "3.13.0", "versions.torch": "2.14.0", "versions.numpy": "2.2.0", "versions.transformers": "5.19.3",
    "policy_version": 8, "seed": 1, "git_revision": "def-dirty",
}  # fmt: skip


def test_equal_manifests_match():
    assert compare(manifest(), manifest()) == []
    assert check(manifest(), manifest()) == []


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_field_that_changes_results_is_refused(field):
    with pytest.raises(ManifestMismatchError) as caught:
        check(manifest(), changed(field, MUST_MATCH[field]))
    message = str(caught.value)
    assert (
        f"{field}: saved {json.dumps(manifest().flatten()[field])}, present {json.dumps(MUST_MATCH[field])}" in message
    )
    assert f"evaluation.allow_mismatch=[{field}]" in message
    allowed = check(manifest(), changed(field, MUST_MATCH[field]), [field])
    assert [mismatch.field for mismatch in allowed] == [field]


@pytest.mark.parametrize("field", INFORMATIVE)
def test_a_field_that_informs_is_reported_and_not_refused(field):
    (mismatch,) = check(manifest(), changed(field, INFORMATIVE[field]))
    assert mismatch.field == field and not mismatch.must_match


def test_the_rate_of_the_data_is_kept_and_not_compared(tmp_path):
    manifest(fps=12.5).save(tmp_path)
    saved = Manifest.load(tmp_path)
    assert saved.fps == 12.5 and compare(saved, manifest()) == []


def test_all_differences_are_listed_with_one_override():
    present = replace(changed("env.image_size", 128), precision="bf16", seed=5)
    with pytest.raises(ManifestMismatchError, match=r"allow_mismatch=\[precision,env.image_size\]") as caught:
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


def test_adapters_belong_to_their_base_weights():
    adapter = {"state": "adapter", "rank": 8}
    bound = manifest(lora=adapter | {"base_sha256": "ab"})
    for other in ({"base_sha256": "cd"}, {}):
        with pytest.raises(ManifestMismatchError, match=r"lora.base_sha256: saved \"ab\".*\n.*=\[lora.base_sha256\]"):
            check(bound, manifest(lora=adapter | other))
    assert not check(manifest(lora=adapter), bound)[0].must_match, "of a version that did not record it"


def test_the_digest_of_base_weights_is_that_of_their_files(tmp_path):
    for name, content in (("model-1.safetensors", b"a"), ("model-2.safetensors", b"b"), ("config.json", b"{}")):
        (tmp_path / name).write_bytes(content)
    before = weights_digest(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"{ }")
    assert weights_digest(str(tmp_path)) == before and weights_digest(None) is None
    (tmp_path / "model-2.safetensors").write_bytes(b"bb")
    assert weights_digest(str(tmp_path)) != before
    (tmp_path / "model-2.safetensors").write_bytes(b"b")
    assert weights_digest(str(tmp_path)) == before
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-3.safetensors")
    assert weights_digest(str(tmp_path)) != before


def test_what_only_one_side_recorded_is_reported_and_not_refused_but_missing_statistics_are():
    without = manifest(simulators={}, renderer=None)
    del without.env["gripper"], without.env["max_episode_steps"]["push"]
    names = {"simulators", "simulators.mujoco", "renderer", "env.gripper", "env.max_episode_steps.push"}
    mismatches = compare(manifest(), without)
    assert {m.field for m in mismatches} == names and not any(m.must_match for m in mismatches)
    with pytest.raises(ManifestMismatchError, match="statistics"):
        check(manifest(), manifest(normalization={"unnorm_key": "tabletop", "statistics": None}))


def test_a_fork_is_not_the_published_library():
    fork = "5.19.0 (https://host.example/fork.git@0123abc)"
    with pytest.raises(ManifestMismatchError, match="versions.transformers: .*fork.git@0123abc"):
        check(manifest(), changed("versions.transformers", fork))
    assert check(changed("versions.transformers", fork), changed("versions.transformers", fork)) == []


def test_the_origin_of_a_package_from_a_repository_is_part_of_its_version(tmp_path, monkeypatch):
    for name, origin in (("forked", {"url": "https://h/f.git", "vcs_info": {"vcs": "git", "commit_id": "abc1"}}),
                         ("local", {"url": "file:///src", "dir_info": {"editable": True}}), ("plain", None)):  # fmt: skip
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = package_versions(["forked", "local", "plain", "absent"])
    assert found == {"forked": "1.2 (https://h/f.git@abc1)", "local": "1.2", "plain": "1.2"}


def test_round_trip(tmp_path):
    original = manifest(files={"a": "0" * 64}, probe={"num_actions": 1, "episodes": []})
    original.save(tmp_path)
    assert Manifest.load(tmp_path) == original
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_is_refused(tmp_path, number):
    (tmp_path / "manifest.json").write_text(json.dumps({"format": number}))
    with pytest.raises(CheckpointError, match=f"format {number}; this version of rlinf reads 2. Install the version"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "unknown": 3}', '{"format": 2, "unknown": 3}'])
def test_unreadable_manifests_are_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="manifest.json cannot be read.*UnicodeDecodeError"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no manifest.json"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": ["tabletop"]}, "'env' is a list, not a mapping"),
        ({"normalization": None}, "'normalization' is a NoneType, not a mapping"),
        ({"probe": [1]}, "'probe' is a list, not a mapping"),
        ({"files": {"/etc/passwd": "0" * 64}}, "'files' lists '/etc/passwd'"),
        ({"files": {"../other": "0" * 64}}, "'files' lists '../other'"),
        ({"files": {"model/a.bin": 7}}, "'files' lists 'model/a.bin'"),
    ],
)
def test_a_manifest_of_other_kinds_of_values_is_refused(tmp_path, change, words):
    values = json.loads(manifest(files={"model/a.bin": "0" * 64}, probe=None).save(tmp_path).read_text())
    Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=f"cannot be read as a manifest .*{words}"):
        Manifest.load(tmp_path)


def test_any_part_of_the_way_to_a_field_can_be_allowed_and_nothing_else():
    present = changed("normalization.statistics.action.q01", [-0.05, -0.06])
    for name in ("normalization", "normalization.statistics", "normalization.statistics.action"):
        assert len(check(manifest(), present, [name])) == 1
    for name in ("action", "q01", "statistics.action", "norm", "normalization.stat"):
        with pytest.raises(ConfigError, match=f"'{name}', which is not a manifest field"):
            check(manifest(), present, [name])
    with pytest.raises(ManifestMismatchError):  # the start of a name is not a section of it
        check(manifest(), changed("env.image_size", 128), ["env.suite", "lora"])


def test_the_order_of_settings_is_no_difference():
    first, other = ([dict(pairs) for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])][k] for k in (0, 1))
    steps = manifest(preprocessing={"processor": {"steps": [first], "none": {}}})
    assert compare(steps, manifest(preprocessing={"processor": {"none": {}, "steps": [other]}})) == []
    assert steps.flatten()["preprocessing.processor.none"] == {}


def test_a_manifest_that_lists_no_files_vouches_for_none(tmp_path):
    with pytest.raises(CheckpointError, match="lists no files"):
        verify_files(tmp_path, manifest())


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


def test_manifest_of_a_policy_records_the_conditions(mlp, tmp_path):
    config, model = mlp
    built = build_manifest(config, model, policy_version=3)
    assert built.model == {"model_type": "mlp", "class": "MLPForRLActionPrediction"}
    assert built.normalization == {"unnorm_key": "tabletop", "statistics": STATISTICS}
    assert built.env["max_episode_steps"] == {"reach": 16, "reach_zone": 16, "touch_two": 28, "push": 48}
    assert built.env.keys().isdisjoint({"tasks", "reward_mode", "success_bonus", "num_eval_init_states"})
    assert built.simulators.keys() == {"mujoco"} and built.probe is None
    assert built.env["image_size"] == config.env.image_size and built.preprocessing["cameras"] == list(
        config.env.cameras
    )
    assert built.lora == {"state": "none"} and built.policy_version == 3 and built.seed == config.seed
    assert {"python", "rlinf", "torch", "transformers"} <= built.versions.keys()
    assert check(Manifest.load(built.save(tmp_path).parent), build_manifest(config, model, policy_version=3)) == []
    other = replace(config, env=replace(config.env, image_size=config.env.image_size + 8))
    with pytest.raises(ManifestMismatchError, match="env.image_size"):
        check(built, build_manifest(other, model, policy_version=3))


def test_the_horizon_in_the_manifest_is_the_one_that_holds(mlp):
    """However it is set: a null that stands for 16 steps equals a 16, and is not a 32."""
    config, model = mlp

    def built(max_episode_steps):
        env = replace(config.env, tasks=["reach"], max_episode_steps=max_episode_steps)
        return build_manifest(replace(config, env=env), model, policy_version=0)

    assert not [m for m in compare(built(None), built(16)) if m.must_match]
    with pytest.raises(ManifestMismatchError, match="env.max_episode_steps.reach: saved 16, present 32"):
        check(built(None), built(32), [])


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


def test_versions_are_those_of_the_packages():
    import torch
    import transformers

    versions = library_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["transformers"].split()[0] == transformers.__version__


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 0123-dirty", "0123-dirty"),
        ("echo 0123; exit 1", None),
        ("echo", None),
        ("echo 0123; echo no >&2", "0123"),
    ],
)
def test_git_revision_is_what_git_says_where_it_succeeds(tmp_path, monkeypatch, capfd, script, expected):
    (tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("statistics", "unnorm_key", "expected"),
    [
        ({"a": 1, "b": 2}, None, {"unnorm_key": None, "statistics": None}),
        ({"a": 1, "b": 2}, "b", {"unnorm_key": "b", "statistics": 2}),
        ({"a": 1}, None, {"unnorm_key": "a", "statistics": 1}),
        ({"a": 1}, "b", {"unnorm_key": "b", "statistics": None}),
        (None, None, {"unnorm_key": None, "statistics": None}),
    ],
)
def test_statistics_in_the_manifest_are_those_of_the_key_or_the_only_ones(mlp, statistics, unnorm_key, expected):
    config, _ = mlp
    config = replace(config, model=replace(config.model, unnorm_key=unnorm_key))
    assert build_manifest(config, model_with(norm_stats=statistics), policy_version=0).normalization == expected


def model_with(processor=None, **settings):
    """What a manifest asks of a model."""
    return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: settings), processor=processor)


def test_settings_of_model_and_processor_are_recorded(mlp, tmp_path):
    config, _ = mlp

    class ImageProcessor:
        def to_dict(self):
            return {"size": (8, 8), "transformers_version": "5.0", "name_or_path": "here"}

    processor = SimpleNamespace(
        image_processor=ImageProcessor(), tokenizer=SimpleNamespace(get_vocab=lambda: {"b": 1, "a": 0})
    )
    settings = {"image_sizes": [8, 8], "prompt_template": "go", "n_action_bins": 21, "other": 1}
    model = model_with(processor, **settings)
    built = build_manifest(replace(config, model=replace(config.model, image_size=None)), model, policy_version=0)
    assert built.preprocessing == {
        "image_size": [8, 8],
        "cameras": list(config.env.cameras),
        "prompt_template": "go",
        "processor": {"size": [8, 8], "vocabulary_sha256": hashlib.sha256(b'[["a", 0], ["b", 1]]').hexdigest()},
    }
    assert built.actions == {
        "action_token_len": config.model.action_token_len,
        "action_chunks_len": config.model.action_chunks_len,
        "n_action_bins": 21,
    }
    bare = SimpleNamespace(image_processor=None, tokenizer=None)
    sized = build_manifest(
        replace(config, model=replace(config.model, image_size=[4, 4])), model_with(bare, **settings), policy_version=0
    )
    assert sized.preprocessing["image_size"] == [4, 4] and sized.preprocessing["processor"] == {}
    assert build_manifest(config, model_with(), policy_version=0).preprocessing["processor"] is None


def test_adapters_are_recorded_with_their_base_weights(mlp, tmp_path):
    config, _ = mlp
    (tmp_path / "model.safetensors").write_bytes(b"a")
    for path, more in ((None, {}), (str(tmp_path), {"base_sha256": weights_digest(str(tmp_path))})):
        adapted = replace(config, model=replace(config.model, is_lora=True, model_path=path))
        lora = build_manifest(adapted, model_with(), policy_version=0).lora
        assert lora == {"state": "adapter", "rank": 32, "alpha": 32, "dropout": 0.0, "target_modules": None} | more
