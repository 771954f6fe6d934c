"""What fits on a GPU that is not there: rejections with the largest value that fits, blocks to recompute, experiments for 24 GB."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.engines.gpu_fraction import colocated_fraction, engine_fraction
from rlinf.envs.config import most_simulators, with_share_of_cores
from rlinf.envs.graphics import backend
from rlinf.envs.libero.env import LiberoConfig
from rlinf.errors import ConfigError
from rlinf.models.layers import find_layers, set_training_options
from rlinf.preflight import gpu_memory
from rlinf.preflight.activations import LinearFit, PassMemory, _measure
from rlinf.preflight.gpu_memory import (
    GB,
    GpuMemory,
    _observation,
    estimate_gpu,
    fit_to_gpu,
    measure,
    phases_of,
    simulators_on_gpu,
)
from rlinf.preflight.memory import policy_on_meta_device

OFT = ["+model.init_config={n_action_bins: 256}", "model.override_config={}", "model.unnorm_key=null"]
PI0 = ["+model.init_config={num_steps: 4, freeze_vlm: true, use_quantile_norm: true}", "model.override_config={}"]
PI05 = ["+model.init_config={pi05: true, num_steps: 4, freeze_vlm: true}", "model.override_config={}"]
FOR_24_GB = {
    "libero_ppo_openvla_oft_24gb": OFT,
    "libero_ppo_pi05_24gb": PI05,
    "libero_residual_pi0_24gb": PI0,
}
"""Each family once; the policies of ``libero_ppo_pi0_24gb`` and ``libero_residual_openvla_oft`` are among them."""


def config_of(*words):
    return build_config(compose_config([*words, "cluster.device=cpu"]))


@pytest.fixture(autouse=True)
def draws_on_gpu(monkeypatch):
    """Let simulators draw on a GPU, whatever this machine has."""
    monkeypatch.setattr(gpu_memory, "may_draw_on_gpu", lambda: True)


MEASURED = {}
"""Bytes of the passes of a policy, by what they depend on."""


def measured_of(config):
    """Measure a policy once for all sizes of micro-batches."""
    model = replace(config.model, micro_batch_size=1, val_micro_batch_size=1)
    key = repr((model, replace(config.env, num_processes=None), phases_of(config)))
    if key not in MEASURED:
        MEASURED[key] = measure(config)
    return MEASURED[key]


@pytest.fixture(scope="module")
def oft():
    """PPO of OpenVLA-OFT 7B with LoRA, and the bytes of its passes."""
    config = config_of("experiment=libero_ppo_openvla_oft", *OFT, "env.num_processes=3", "rollout.num_envs=16")
    return config, measured_of(config)


def memory_of(**changes):
    passes = PassMemory(LinearFit(0, 10), LinearFit(0, 5), LinearFit(100, 50), LinearFit(100, 20), saved=(20.0, 10.0))
    base = {"state": 1000, "half_gradients": 0, "gathered": 0, "simulators": 0, "engine": 0, "engine_sleeps": True, "passes": passes,
            "pipeline_stages": 2, "acting_rows": 4, "scoring_rows": 8}  # fmt: skip
    return GpuMemory(**base | changes)


def test_peaks_by_hand(monkeypatch):
    monkeypatch.setattr(gpu_memory, "LIBRARIES", 0)
    memory = memory_of()
    assert (memory.acting, memory.scoring) == (1000 + 2 * 40, 1000 + 40)
    assert [memory.updating(8, n) for n in range(3)] == [1000 + 100 + 8 * row for row in (50, 30, 20)]
    assert [memory.layers_to_recompute(8, limit) for limit in (1500, 1499, 1339, 1259)] == [0, 1, 2, None]
    assert (memory.largest_micro_batch(1500), memory.largest_micro_batch(1500, 0)) == (20, 8)
    assert memory_of(half_gradients=700).updating(8, 0) == 1700, "gradients come as activations go"
    asleep, awake = memory_of(engine=500), memory_of(engine=500, engine_sleeps=False)
    assert (asleep.acting, asleep.updating(8, 0)) == (1580, 1500), "it sleeps in updates"
    assert (awake.acting, awake.updating(8, 0)) == (1580, 2000)


def test_a_seven_billion_policy_is_recomputed_as_much_as_a_gpu_asks_for(oft):
    config, measured = oft
    num_blocks = len(measured[1].saved)
    chosen = {size: fit_to_gpu(config, size * GB, measured) for size in (24, 27, 31, 80)}
    assert chosen[80] == 0 < chosen[31] < chosen[27] < chosen[24] <= num_blocks
    config.model.gradient_checkpointing = True
    assert fit_to_gpu(config, 80 * GB, measured) == num_blocks
    config.model.gradient_checkpointing = False
    with pytest.raises(
        ConfigError, match=r"model.micro_batch_size=8 takes \d+.\d GB.*at most the 24.0 GB.*gradient_checkpointing=auto"
    ):
        fit_to_gpu(config, 24 * GB, measured)
    config.model.gradient_checkpointing = "auto"


def test_half_of_the_blocks_save_what_is_estimated(oft):
    """With 84 blocks, the estimate between none and all is within a tenth of a count (of few blocks: ``test_activations``)."""
    config, (model, passes, _) = oft
    sequences = torch.zeros(8, model.num_sampled, dtype=torch.int64, device="meta")
    set_training_options(model, recomputed=41, compiled=False)
    counted = _measure(model, _observation(config, 8), 8, config.model.precision, ["rl"], sequences).updates["rl"]
    assert passes.update(41).at(8) == pytest.approx(counted, rel=0.1)
    for block in find_layers(model):
        del block.forward
    assert passes.update(41).at(8) < 0.7 * passes.update(0).at(8)  # control


def test_a_micro_batch_beyond_the_card_is_refused_with_the_largest_that_fits(oft):
    config, measured = oft
    config.model.micro_batch_size = 64
    with pytest.raises(
        ConfigError, match=r"micro_batch_size=64 takes .* Set model.micro_batch_size=(\d+)$"
    ) as rejected:
        fit_to_gpu(config, 24 * GB, measured)
    config.model.micro_batch_size = int(str(rejected.value).rpartition("=")[2])
    assert 64 % config.model.micro_batch_size == 0
    fit_to_gpu(config, 24 * GB, measured)  # control: the value that was named fits
    config.model.micro_batch_size, config.model.val_micro_batch_size = 8, 4096
    with pytest.raises(ConfigError, match="val_micro_batch_size=4096 takes .* Set model.val_micro_batch_size="):
        fit_to_gpu(config, 24 * GB, measured)
    config.model.val_micro_batch_size, config.rollout.num_envs = 8, 4096
    with pytest.raises(ConfigError, match=r"rollout.num_envs=4096 takes .* Set rollout.num_envs=(\d+)$") as rejected:
        fit_to_gpu(config, 24 * GB, measured)
    config.rollout.num_envs = int(str(rejected.value).rpartition("=")[2])
    fit_to_gpu(config, 24 * GB, measured)
    config.rollout.num_envs = 16


def test_a_policy_that_cannot_be_trained_there_is_refused_before_weights_are_read():
    words = ["experiment=libero_ppo_openvla_oft", *OFT, "model.is_lora=false"]
    for size in (80, 141):
        with pytest.raises(
            ConfigError, match=rf"Training 7.* billion weights takes 15\d.* at most the {size}.0 GB"
        ) as error:
            fit_to_gpu(
                config_of(*words),
                size * GB,
                gpu_memory.Measured(policy_on_meta_device(config_of(*words)), gpu_memory.NOTHING, "not counted"),
            )
        assert "Set model.is_lora=true, or trainer.cpu_offload=true" in str(error.value)


@pytest.mark.parametrize("name", FOR_24_GB)
def test_experiments_for_24_gb_fit_there(name):
    config = config_of(f"experiment={name}", *FOR_24_GB[name])
    measured = measured_of(config)
    assert measured[2] == "" and sum(p.numel() for p in measured[0].parameters()) > 3e9
    fit_to_gpu(config, 24 * GB, measured)
    estimate, memory = estimate_gpu(config, 24 * GB, measured)
    assert memory.peak(config.model.micro_batch_size, len(measured[1].saved)) <= 24 * GB
    with pytest.raises(ConfigError, match="GB of the GPU"):
        fit_to_gpu(config, estimate.weights, measured)  # control: weights alone would fill it


def test_few_simulators_draw_on_a_small_gpu(monkeypatch):
    monkeypatch.setattr("rlinf.envs.config.num_cores", lambda: 64)
    counts = {size: most_simulators(LiberoConfig(), size * GB, 2) for size in (24, 39, 40, 80)}
    assert counts == {24: 4, 39: 4, 40: None, 80: None}
    assert most_simulators(LiberoConfig(), None, 2) is None, "on a CPU"
    assert most_simulators(LiberoConfig(cameras=[]), 24 * GB, 2) is None, "nothing is drawn"
    assert with_share_of_cores(LiberoConfig(), 2, 4).num_processes == 4
    assert with_share_of_cores(LiberoConfig(), 2).num_processes == 32
    assert with_share_of_cores(LiberoConfig(num_processes=20), 2, 4).num_processes == 20, "as configured"
    config = config_of("experiment=libero_ppo_openvla_oft", *OFT)
    assert simulators_on_gpu(config, 24 * GB) == 8 + 8, "of rollouts and of the evaluation"
    assert simulators_on_gpu(config, 80 * GB) == 64 + 64
    config.env.num_processes = 3
    assert simulators_on_gpu(config, 80 * GB) == 2 * 3 + 3
    config.env.num_processes, config.cluster.num_processes = None, 16
    config.rollout.num_envs = config.evaluation.num_envs = 512
    assert simulators_on_gpu(config, 80 * GB) == 2 * 2 + 4, "16 ranks share the cores of one machine"
    monkeypatch.setattr(gpu_memory, "world_size", lambda: 16)
    monkeypatch.setattr(gpu_memory, "local_world_size", lambda: 8)
    assert simulators_on_gpu(config, 80 * GB) == 2 * 4 + 8, "8 ranks do on each of two machines"
    monkeypatch.setattr(gpu_memory, "may_draw_on_gpu", lambda: False)
    assert simulators_on_gpu(config, 80 * GB) == 0


@pytest.mark.parametrize(("environment", "devices", "drawn"), [
    ({}, [0, None], True), ({"MUJOCO_GL": "osmesa"}, [0, None], False), ({"MUJOCO_GL": "egl"}, [None], False),
    ({"MUJOCO_EGL_DEVICE_ID": "1"}, [0, None], False), ({"MUJOCO_EGL_DEVICE_ID": "0"}, [0, None], True),
])  # fmt: skip
def test_simulators_that_draw_in_software_take_nothing_of_a_gpu(monkeypatch, environment, devices, drawn):
    for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backend.glob, "glob", lambda _: ["/dev/nvidia0"])
    monkeypatch.setattr(backend, "list_egl_devices", lambda: devices)
    backend.may_draw_on_gpu.cache_clear()
    assert backend.may_draw_on_gpu() is drawn
    backend.may_draw_on_gpu.cache_clear()


def test_no_run_is_refused_for_assumed_bytes_of_simulators(oft, monkeypatch, caplog):
    config, measured = oft
    monkeypatch.setattr(config.env, "num_processes", 64)
    with caplog.at_level("WARNING", logger="rlinf"):
        recomputed = fit_to_gpu(config, 24 * GB, measured)
    (told,) = [record.getMessage() for record in caplog.records if "env.num_processes=" in record.getMessage()]
    config.env.num_processes = int(re.search(r"env.num_processes=(\d+)", told)[1])
    caplog.clear()
    assert fit_to_gpu(config, 24 * GB, measured) <= recomputed and not caplog.records  # control: what was named fits
    config.env.num_processes += 1
    fit_to_gpu(config, 24 * GB, measured)
    assert caplog.records, "one more does not"


def test_the_share_of_an_engine_beside_a_policy(caplog):
    """Of 3 billion weights trained in full (62 GB) 8 of 80 and 69 of 141 GB are left, of a 7B with LoRA (18 GB) 52 of 80."""
    policy_3b, policy_7b = 62 * GB, 18 * GB
    shares = [colocated_fraction(size * GB, policy_3b) for size in (24, 80, 141)]
    assert shares == pytest.approx([0, 8 / 80, 69 / 141])
    assert (
        colocated_fraction(80 * GB, policy_7b) == pytest.approx(52 / 80)
        and colocated_fraction(141 * GB, policy_7b) == 0.8
    )
    words = {"key": "rollout.gpu_memory_utilization", "apart": "mode=disaggregated"}
    assert engine_fraction(None, 141 * GB, policy_3b, 6 * GB, **words) == pytest.approx(69 / 141)
    with pytest.raises(
        ConfigError, match="rollout.gpu_memory_utilization=0.8 is 112.8 GB.*at most 0.56.* Set .*=0.48, or .*=null"
    ):
        engine_fraction(0.8, 141 * GB, policy_3b, 6 * GB, **words)
    with pytest.raises(ConfigError, match="An engine needs 15.0 GB for weights.*Set .*=0.2 .*mode=disaggregated"):
        engine_fraction(None, 80 * GB, policy_3b, 15 * GB, **words)
    with caplog.at_level("WARNING", logger="rlinf"):
        assert engine_fraction(0.5, 80 * GB, policy_7b, 15 * GB, **words) == 0.5 and not caplog.records
        assert engine_fraction(0.2, 80 * GB, policy_3b, 15 * GB, **words) == 0.2
    assert "which leaves 2.0 GB for its passes" in caplog.text
    with pytest.raises(ConfigError, match="An engine needs 18.0 GB"):
        engine_fraction(0.2, 80 * GB, policy_3b, 18 * GB, **words)  # control
    assert engine_fraction(None, 8 * GB, GB // 2, GB, **words) == pytest.approx(4.5 / 8), "3 GB"
    assert engine_fraction(None, 16 * GB, GB // 2, GB, **words) == pytest.approx(11.5 / 16), "a quarter"


def test_adapters_on_the_meta_device_have_the_format_of_real_ones():
    words = ["experiment=quickstart", "model.is_lora=true", "model.lora.rank=2", "model.precision=bf16"]
    config = config_of(*words)
    from rlinf.models import get_model

    real = {name: p.dtype for name, p in get_model(config.model).named_parameters()}
    empty = {name: p.dtype for name, p in policy_on_meta_device(config).named_parameters()}
    assert real == empty
    assert {dtype for name, dtype in empty.items() if "lora_" in name} == {torch.bfloat16}


def test_a_rank_on_a_gpu_asks_before_it_reads_weights(monkeypatch, tmp_path):
    from rlinf.commands import train

    config = config_of("experiment=quickstart", f"output_dir={tmp_path}")
    monkeypatch.setattr(train, "resolve_device", lambda *_: "cuda")
    monkeypatch.setattr(train, "rank_memory_bytes", lambda *_: 10**6)
    monkeypatch.setattr(train, "_policy", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="at most the 0.0 GB of the GPU"):
        train.build(config)


def test_a_policy_that_cannot_be_built_without_numbers_is_not_refused(monkeypatch, capsys):
    from rlinf.commands import train

    def fails(config):
        raise AttributeError("no item()")

    config = config_of("experiment=quickstart")
    with pytest.raises(ConfigError, match="at most the 0.0 GB of the GPU"):
        train._fit_to_gpu(config, 10**6)  # control: one that can be built is
    monkeypatch.setattr(gpu_memory, "policy_on_meta_device", fails)
    assert train._fit_to_gpu(config, 10**6) is True
    assert "set model.gradient_checkpointing=false" in capsys.readouterr().out
    monkeypatch.setattr(
        gpu_memory, "policy_on_meta_device", lambda _: (_ for _ in ()).throw(ConfigError("a wrong key"))
    )
    with pytest.raises(ConfigError, match="a wrong key"):
        train._fit_to_gpu(config, 10**6)


def test_rank_0_estimates_for_all(monkeypatch):
    from rlinf.commands import train

    monkeypatch.setattr(train, "_estimate_fit", lambda *_: pytest.fail("another rank estimated"))
    monkeypatch.setattr(train, "rank", lambda: 1)
    monkeypatch.setattr(train, "broadcast_object", lambda value, source: (3, None))
    assert train._fit_to_gpu(config_of("experiment=quickstart"), 10**9) == 3
    monkeypatch.setattr(train, "broadcast_object", lambda value, source: (0, ConfigError("does not fit")))
    with pytest.raises(ConfigError, match="does not fit"):
        train._fit_to_gpu(config_of("experiment=quickstart"), 10**9)


def test_an_engine_wakes_after_the_cache_of_torch_is_empty(monkeypatch):
    from rlinf.engines.vllm_engine import VllmEngine

    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    engine = SimpleNamespace(_is_asleep=True, _call=lambda command, _: calls.append(command))
    VllmEngine._rouse(engine)
    VllmEngine._rouse(engine)  # control: awake, nothing happens
    assert calls == ["empty_cache", "wake"]


def test_fixes_that_are_named_can_help():
    words, none, row = ["experiment=libero_ppo_openvla_oft", *OFT], LinearFit(0, 0), LinearFit(0, 100 * GB)
    config, scores = config_of(*words, "model.val_micro_batch_size=1"), PassMemory(none, row, none, none)
    with pytest.raises(ConfigError, match="takes .* in scoring; .*Set trainer.cpu_offload=true, or"):
        gpu_memory._check_passes(config, memory_of(passes=scores, scoring_rows=1), 80 * GB, 0)
    with pytest.raises(ConfigError, match="Set model.val_micro_batch_size=1$"):
        gpu_memory._check_passes(config, memory_of(passes=scores, scoring_rows=2), 120 * GB, 0)  # control
    config.rollout.num_envs = config.rollout.group_size
    with pytest.raises(ConfigError, match="in a rollout; .*Set trainer.cpu_offload=true, or"):
        gpu_memory._check_passes(config, memory_of(passes=PassMemory(row, none, none, none)), 80 * GB, 0)
    config = config_of(*words, "trainer.cpu_offload=true")
    assert gpu_memory._less_state(config, memory_of(), False) == "model to a smaller one"
    awake = memory_of(engine=1, engine_sleeps=False)
    assert gpu_memory._less_state(config, awake, False) == "rollout.vllm.sleep=true"
    config = config_of("experiment=libero_residual_openvla_oft", *OFT)
    measured = gpu_memory.Measured(policy_on_meta_device(config), gpu_memory.NOTHING, "not counted")
    with pytest.raises(ConfigError, match="A frozen policy of 7.* before any pass .*Set model to a smaller one"):
        fit_to_gpu(config, 10 * GB, measured)


def test_an_engine_with_a_fraction_of_its_own_beside_a_small_policy():
    config = config_of("experiment=quickstart_vllm")
    measured = measure(config)
    for size in (8, 24, 80):
        fit_to_gpu(config, size * GB, measured)
    config.rollout.vllm.gpu_memory_utilization = 0.9
    fit_to_gpu(config, 80 * GB, measured)
    with pytest.raises(ConfigError, match=r"for an engine.*Set rollout.vllm.gpu_memory_utilization=(\S+)$") as rejected:
        fit_to_gpu(config, 16 * GB, measured)
    config.rollout.vllm.gpu_memory_utilization = float(str(rejected.value).rpartition("=")[2])
    fit_to_gpu(config, 16 * GB, measured)  # control: the fraction that was named fits


def test_an_engine_beside_an_offloaded_policy_does_not_count_main_memory(oft):
    config, (model, *_) = oft
    estimate = gpu_memory.estimate_memory(config, 80 * GB, model)
    assert gpu_memory._policy_bytes(config, estimate) == estimate.trainer + estimate.rollout_weights
    config = replace(config, trainer=replace(config.trainer, cpu_offload=True))
    assert gpu_memory._policy_bytes(config, estimate) == estimate.rollout_weights


def test_rows_for_doctor_name_the_largest_micro_batches(oft):
    rows = {row[0]: row[1:] for row in gpu_memory.card_rows(*oft)}
    kept, recomputed = ([int(row[column].replace(",", "")) for row in rows.values()] for column in (2, 3))
    assert kept == sorted(kept) and all(few < many for few, many in zip(kept, recomputed, strict=True))
    assert rows["80 GB"][1].startswith("0 of ") and not rows["24 GB"][1].startswith("0 of ")
