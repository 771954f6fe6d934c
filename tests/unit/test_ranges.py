"""Numbers that normalise against the numbers that pass through them: in folders, in cloning, and while a policy acts."""

import json
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf.checkpoints.checkpoint import write_policy
from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.commands.serve import PolicyRows, ServeConfig
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data.statistics import normalization_statistics
from rlinf.envs import make_env
from rlinf.errors import CheckpointError, ConfigError, RLinfError
from rlinf.evaluation.evaluator import episode_list, evaluate_policy
from rlinf.models import build_policy
from rlinf.models.embodiment.modules.ranges import STDS, Range
from rlinf.models.sampling import check_finite
from rlinf.policy import Policy
from rlinf.serving import MessageError
from rlinf.training.cloning_trainer import compare_with_statistics
from rlinf.types import Observation


def statistics(low: float, high: float, width: int) -> dict:
    """Return every list of statistics that a model may read, of uniform data between two bounds."""
    middle, half = (low + high) / 2, (high - low) / 2
    names = {"q01": low, "q99": high, "min": low, "max": high, "mean": middle, "std": half / 3**0.5}
    return {name: [number] * width for name, number in names.items()} | {"mask": [True] * width}


def test_data_never_lies_beyond_its_own_statistics():
    """Uniform, normal, binary and heavy-tailed rows, many and few, by quantiles and by mean and std: no warning."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 10, 40, 1000):
        rows = np.stack([
            rng.uniform(-1, 1, count), rng.normal(size=count), rng.exponential(size=count), rng.random(count) < 0.07,
            rng.standard_cauchy(count), np.zeros(count), np.sign(rng.normal(size=count)),
        ], 1)  # fmt: skip
        stats = normalization_statistics(rows, None)["action"]
        for names in (("q01", "q99"), ("min", "max"), ("mean", "std")):
            fraction, told = Range.of(stats, names, "rows").compare(rows, "actions", "x=1")
            assert fraction <= 0.05 and not told, (count, names, told)


def test_beyond_and_unused_by_hand():
    """Of 200 rows, 30 lie at 2 and the rest within [-1, 1]: (30 - 2) / 200; then 120 of them; a range of which 0.5 % is used."""
    rows = np.linspace(-1, 1, 200)[:, None].repeat(3, 1)
    rows[:30, 1] = 2
    rows[:, 2] /= 200
    bounds = Range([-1, -1, -1], [1, 1, 1])
    fraction, told = bounds.compare(rows, "actions", "x=1")
    assert fraction == pytest.approx(0.14) and len(told) == 2
    assert "dimension 1" in told[0] and "14.0%" in told[0] and "dimension 2" in told[1]
    assert bounds.compare(rows[:, :1], "actions", "x=1") == (0.0, [])
    rows[:120, 0] = 2
    with pytest.raises(ConfigError, match=r"imension 0 .* -1 to 1.*Set x=1"):
        bounds.compare(rows, "actions", "x=1")
    masked = Range([-1, -1], [1, 1], [False, True])
    assert masked.compare(rows[:, :2], "actions", "x=1")[0] == pytest.approx(0.14)


def test_far_states_by_hand():
    """Five half-widths of [0, 2] end at -4 and 6; statistics wider than the state are padded; mean and std span 4.5 std."""
    span = Range([0, 0, 0], [2, 2, 0])
    states = np.array([[6, 1], [6.01, 1], [1, -4.01], [1, 1e30]], np.float32)
    assert span.far(states).tolist() == [False, True, True, True]
    assert span.far(states[:, None].repeat(2, 1)).tolist() == [False, True, True, True]
    found, widths = span.farthest(states)
    assert "state[1]" in found and "0 to 2" in found and widths > 1e29
    std = Range.of({"mean": [1.0], "std": [2.0]}, ("mean", "std"), "state")
    assert (std.middle, std.half) == ([1.0], [2.0 * STDS])


def words(model: str, *more: str) -> list[str]:
    sizes = ["env.image_size=32", "env.state=proprio", "env.tasks=[reach]", "env.cameras=[front]"]
    return [f"model={model}", "env=tabletop", *sizes, *more]


MODELS = {
    "openvla_tiny": [],
    "openvla_oft_tiny": ["model.init_config.use_proprio=true"],
    "pi0_tiny": ["model.init_config.use_quantile_norm=false"],
    "hf_vla_tiny": [],
    "mlp": ["model.init_config.state_dim=4"],
    "cnn": ["model.init_config.state_dim=4", "model.init_config.image_size=64"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved folder of each model, with statistics under ``arm``; written when it is asked for."""
    place = tmp_path_factory.mktemp("folders")

    class Folders(dict):
        def __missing__(self, name: str) -> Path:
            config = build_config(compose_config(words(name, *MODELS[name])))
            policy = build_policy(
                config, {"norm_stats": {"arm": {"action": statistics(-1, 1, 2), "proprio": statistics(-1, 1, 4)}}}
            )
            write_policy(place / name, policy, policy.state_dict())
            self[name] = place / name
            return self[name]

    return Folders()


NOT_FINITE = {
    "NaN": ("q99", float("nan")),
    "infinity": ("mean", float("inf")),
    "infinite in float32": ("q01", -1e39),
    "too large for any float": ("max", 10**400),
    "a mask of texts": ("mask", "false"),
    "null": ("q01", None),
    "text": ("q01", "0.5"),
}
QUANTILES, DEVIATIONS = {"the wrong way": ("q01", 7.0)}, {"std 0": ("std", 0.0), "negative std": ("std", -1.0)}


@pytest.mark.parametrize("model", MODELS)
def test_statistics_that_cannot_normalise_are_rejected_with_the_folder(model, folders, tmp_path):
    """Before weights are read, by the name of the list: in ``dataset_statistics.json``, and where the model reads them."""
    source, file = folders[model], "dataset_statistics.json"
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("model"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    is_small = model in ("mlp", "cnn")  # whose weights are read first
    weights = (source / "model.safetensors").read_bytes() if is_small else b"not weights"
    (tmp_path / "model.safetensors").write_bytes(weights)
    overrides = words(model, "~model.init_config", f"model.model_path={tmp_path}", "model.unnorm_key=arm")
    config = build_config(compose_config(overrides))
    in_config = model in ("mlp", "cnn", "pi0_tiny")
    used = DEVIATIONS if model == "pi0_tiny" else QUANTILES
    cases = [(file, *case) for case in (*NOT_FINITE.values(), *(() if in_config else used.values()))]
    cases += [("config.json", *case) for case in (*NOT_FINITE.values(), *used.values()) if in_config]
    for name, part, value in [*cases, (file, "std", ...)]:
        values = json.loads((source / name).read_text())
        stats = (values if name == file else values["norm_stats"])["arm"]["action"]
        stats[part] = stats[part][:1] if value is ... else [value, *stats[part][1:]]
        (tmp_path / name).write_text(json.dumps(values))
        with pytest.raises(ConfigError, match="statistics.*std" if value is ... else part):
            build_policy(config)
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with nullcontext() if is_small else pytest.raises(RLinfError, match="(?i)safetensors|header"):  # control
        build_policy(config)


def test_a_greedy_policy_of_tokens_rejects_logits_that_are_not_finite():
    rows = Observation({"front": np.zeros((2, 32, 32, 3), np.uint8)}, np.zeros((2, 4), np.float32), ["reach"] * 2)
    for name in ("openvla_tiny", "openvla_oft_tiny", "hf_vla_tiny"):
        model = build_policy(build_config(compose_config(words(name)))).eval()
        inputs = model.preprocess(rows)
        assert model.predict_action_batch(do_sample=False, **inputs).actions.isfinite().all()
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(CheckpointError, match="not finite"):
            model.predict_action_batch(do_sample=False, **inputs)
        if getattr(model.config, "action_decoding", None) == "parallel" or "oft" in name:  # no wait: features show it
            assert model.propose(inputs).features.isnan().any()
        else:
            with pytest.raises(CheckpointError, match="not finite"):
                model.propose(inputs)
    assert check_finite(torch.zeros(2, 3)).shape == (2, 3)


def test_statistics_of_another_dataset_are_an_error_that_its_override_mends(tmp_path):
    """Bounds of 0.01 for actions up to 1; then the words of the message, typed, take those of the dataset."""
    rows = np.random.default_rng(0).uniform(-1, 1, (500, 2)).astype(np.float32)
    config = build_config(compose_config(words("mlp", *MODELS["mlp"])))
    small = {"tabletop": {"action": statistics(-0.01, 0.01, 2), "proprio": statistics(-1, 1, 4)}}
    model = build_policy(config, {"norm_stats": small})
    with pytest.raises(ConfigError, match=r"imension 0 of the actions.*-0.01 to 0.01") as error:
        compare_with_statistics(model, SimpleNamespace(actions=rows, state=None), "tabletop")
    write_policy(tmp_path / "small", model, model.state_dict())
    typed = shlex.split(str(error.value).partition(". Set ")[2])
    path = ["~model.init_config", f"model.model_path={tmp_path / 'small'}"]
    mended = build_config(compose_config([*words("mlp", *path), *typed]))
    dataset = SimpleNamespace(statistics=lambda: normalization_statistics(rows, rows.repeat(2, 1)))
    own = build_policy(mended, statistics_of_env(mended, None, dataset))
    metrics, told = compare_with_statistics(own, SimpleNamespace(actions=rows, state=rows.repeat(2, 1)), "tabletop")
    assert not told and max(metrics.values()) <= 0.05
    assert set(metrics) == {"sft/actions_beyond_statistics", "sft/states_beyond_statistics"}
    _, told = compare_with_statistics(own, SimpleNamespace(actions=rows / 500, state=None), "tabletop")
    assert len(told) == 2 and "dimension 1" in told[1]


@pytest.mark.parametrize("factor, far", [(1.0, False), (57.3, True)])
def test_states_in_other_units_are_counted_and_warned_of(factor, far, tmp_path, caplog):
    """By an evaluation, in its file, and by a server, which also rejects what no sensor measures."""
    config = build_config(compose_config(words("mlp", *MODELS["mlp"], "env.max_episode_steps=5")))
    stats = {"action": statistics(-1, 1, 2), "proprio": statistics(-1 / factor**2, 1 / factor**2, 4)}
    model = build_policy(config, {"norm_stats": {"tabletop": stats}}).eval()
    env = make_env(config.env, num_envs=2, auto_reset=False)
    result = evaluate_policy(model, env, episode_list(env, "eval", 2))
    env.close()
    assert (result.states_far_fraction > 0.5) == far == any("half-widths" in text for text in result.warnings)
    saved = json.loads(result.to_json(tmp_path / "result.json").read_text())
    assert saved["states_far_fraction"] == result.states_far_fraction
    rows = PolicyRows(Policy(model, config), ServeConfig())
    request = {"state": np.full(4, 0.5, np.float32), "prompt": "reach"}
    caplog.clear()
    for _ in range(3):
        rows.read(request)
    assert len(caplog.records) == (2 if far else 0)  # at the first, and at the second
    with pytest.raises(MessageError, match=r"state\[2\] is 1e\+30"):
        rows.read(request | {"state": np.array([0, 0, 1e30, 0], np.float32)})
    assert rows.num_states == 4 and rows.num_far == (4 if far else 1)


def test_pickled_weights_are_named_with_the_command_that_converts_them(folders, tmp_path):
    source = folders["mlp"]
    for path in source.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = build_config(
        compose_config(words("mlp", "~model.init_config", f"model.model_path={tmp_path}", "model.unnorm_key=arm"))
    )
    weights = load_file(source / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\*\.bin") as error:
        build_policy(config)
    command = shlex.split(str(error.value)[str(error.value).index("python -c") :])
    assert subprocess.run([sys.executable, *command[1:]], capture_output=True).returncode == 0
    again = build_policy(config).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
