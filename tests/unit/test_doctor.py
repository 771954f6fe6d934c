"""``rlinf doctor``: its exit status follows what works, and its memory estimate is what torch allocates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from rlinf.cli import doctor as module
from rlinf.cli import main
from rlinf.cli.doctor import NO, OPTIONAL, YES
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import ENVS
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.errors import MissingDependencyError
from rlinf.models import get_model
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.options import to_mapping
from rlinf.preflight.memory import estimate_memory, policy_on_meta_device, sample_bytes, store_bytes

EXPERIMENT = "experiment=tabletop_ppo_mlp"


def build(*overrides):
    return build_config(compose_config(overrides))


@pytest.fixture
def registered(monkeypatch):
    """The registry of envs with the built-in simulator alone, for a test to add to."""
    monkeypatch.setattr(ENVS, "_entries", {"tabletop": ENVS.entries()["tabletop"]})
    return ENVS


@pytest.fixture
def renders(registered, monkeypatch):
    """A machine on which images can be drawn, whatever this one is."""
    monkeypatch.setattr("rlinf.envs.graphics.backend.probe_rendering", lambda: ("egl", "MuJoCo renders with egl."))


def test_a_machine_on_which_everything_works_exits_with_0(renders, capsys):
    assert main(["doctor", EXPERIMENT]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "rendering", "env tabletop", "openvla", "ppo", "wandb", "vllm", "ray", "disk", "samples", "weights",
                 "AdamW moments", "rollout buffer", "activations of a micro-batch", "141 GB", "not counted: a simulation"):  # fmt: skip
        assert word in text
    assert "can run here" in text and "cannot" not in text


def test_no_rendering_exits_with_1_and_says_what_to_install(registered, monkeypatch, capsys):
    monkeypatch.setattr(
        "rlinf.envs.graphics.backend.probe_rendering", lambda: (None, "egl: no library; apt-get install libegl1")
    )
    assert main(["doctor", EXPERIMENT]) == 1
    assert "apt-get install libegl1" in capsys.readouterr().out.split("cannot run here yet")[1]


def test_a_missing_simulator_package_and_a_folder_without_permission_are_faults(monkeypatch, tmp_path):
    def missing():
        raise MissingDependencyError("The package 'mujoco' is missing.")

    monkeypatch.setattr("rlinf.envs.graphics.backend.probe_rendering", missing)
    assert module.check_rendering() == module.Finding("rendering", NO, "The package 'mujoco' is missing.")
    assert module.check_disk(tmp_path).status == YES
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert module.check_disk(tmp_path).status == NO


def test_experiment_that_cannot_run_exits_with_1_and_its_reason(renders, capsys):
    assert main(["doctor", EXPERIMENT, "trainer.minibatch_size=100"]) == 1
    assert "trainer.minibatch_size=100 for 1024 samples per iteration" in capsys.readouterr().out
    assert main(["doctor", "experiment=quickstrat"]) == 1


def test_a_missing_torch_is_a_finding():
    code = "import sys; sys.modules['torch'] = None; from rlinf.cli import main; sys.exit(main(['doctor']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert result.returncode == 1 and "torch: missing: bash scripts/setup.sh" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("capabilities", "is_faster"), [({"avx512_bf16": True}, True), ({"avx512_f": True, "amx_bf16": False}, False)]
)
def test_a_cpu_with_bfloat16_instructions_gets_the_overrides_that_use_them(capabilities, is_faster, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert ("model.precision=bf16-mixed" in module.check_torch().detail) == is_faster


def test_an_env_alone_is_checked_without_a_model(registered, renders, capsys):
    made = []

    class Recorded(TabletopVectorEnv):
        def __init__(self, config, num_envs, auto_reset):
            made.append(config)
            super().__init__(config, num_envs, auto_reset)

    registered.register("recorded", Recorded)
    assert main(["doctor", "env=tabletop", "env.name=recorded", "env.image_size=24"]) == 0
    assert made[-1].image_size == 24 and "model_path" not in capsys.readouterr().out
    assert main(["doctor", "env=tabletop", "env.tasks=[raech]"]) == 1
    assert "Set env.tasks=[reach]" in capsys.readouterr().out
    assert main(["doctor", "model=default", "env=tabletop"]) == 1, "a model that cannot be trained"


def test_a_checkpoint_is_checked_as_for_its_evaluation(renders, tmp_path, capsys):
    from rlinf.manifest import Manifest, hash_files

    assert main(["doctor", f"checkpoint={tmp_path}"]) == 1
    assert "contains no usable checkpoint" in capsys.readouterr().out
    config = build(EXPERIMENT, "env.image_size=24")
    get_model(config.model).save_pretrained(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_mapping(config)))
    Manifest(
        versions={}, model={"model_type": "mlp"}, normalization={}, preprocessing={}, actions={}, lora={}, precision="fp32",
        env={}, renderer=None, policy_version=6, seed=5, files=hash_files(tmp_path),
    ).save(tmp_path)  # fmt: skip
    assert main(["doctor", f"checkpoint={tmp_path}"]) == 0
    assert "AdamW" not in capsys.readouterr().out
    assert main(["doctor", f"checkpoint={tmp_path}", "env.cameras=[nowhere]"]) == 1
    capsys.readouterr()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_mapping(config)) + "\n# edited\n")
    assert main(["doctor", f"checkpoint={tmp_path}"]) == 1
    assert "is damaged or was edited" in capsys.readouterr().out


def test_env_of_a_missing_package_matters_only_if_the_main_job_needs_it(registered):
    registered.register("other", "no_such_package.env:Env", origin="a plugin")
    registered.register("external", "rlinf.envs.external:ExternalEnv")  # a note in exports, which cannot be made
    statuses = {finding.topic: finding.status for finding in module.check_envs()}
    assert statuses == {"env tabletop": YES, "env other": OPTIONAL}
    registered.register("tabletop", "no_such_package.env:Env")
    assert {finding.topic: finding.status for finding in module.check_envs()}["env tabletop"] == NO


def test_a_simulator_that_cannot_start_says_what_to_type_and_fails_only_the_experiment_that_names_it(
    registered, renders, capsys
):
    class Broken(TabletopVectorEnv):
        def __init__(self, config, num_envs, auto_reset):
            raise MissingDependencyError("No Vulkan. Run bash scripts/setup.sh --sims")

    registered.register("broken", Broken)
    assert {f.topic: (f.status, f.detail) for f in module.check_envs()}["env broken"] == (
        OPTIONAL, "No Vulkan. Run bash scripts/setup.sh --sims",
    )  # fmt: skip
    assert main(["doctor", EXPERIMENT]) == 0
    capsys.readouterr()
    assert main(["doctor", EXPERIMENT, "env.name=broken"]) == 1
    assert "No Vulkan. Run bash scripts/setup.sh --sims" in capsys.readouterr().out.split("cannot run here yet")[1]


def test_package_of_another_version_is_a_fault_with_its_command(monkeypatch):
    monkeypatch.setattr(
        module, "requires", lambda name: ["numpy>=1", "torch==0.1", "no-such-package>2", 'ruff>99; extra == "dev"']
    )
    details = [finding.detail for finding in module.check_packages()]
    assert len(details) == 2 and 'pip install "torch==0.1"' in details[0] and "no-such-package is missing" in details[1]


def test_estimate_too_large_for_the_machine_is_a_fault(renders, monkeypatch, capsys):
    monkeypatch.setattr("rlinf.preflight.memory.available_memory", lambda num_ranks: 1024)
    assert main(["doctor", EXPERIMENT]) == 1
    assert "1024" not in capsys.readouterr().err


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("how", [[], ["model.is_lora=true", "model.lora.rank=2"], ["model.precision=bf16"]])
def test_memory_estimate_counts_what_torch_allocates(how):
    config = build("experiment=quickstart", *how)
    estimate = estimate_memory(config)
    model = get_model(config.model)
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    optimizer = MasterAdamW(trained)
    for _ in range(2):  # the second micro-batch's gradients come while the sum of the first is kept
        optimizer.gather_gradients()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    copies = [master for p, master in zip(trained, optimizer.masters, strict=True) if master is not p]
    gradients = {id(t): t.grad for t in (*trained, *optimizer.masters) if t.grad is not None}
    num_bytes = size(gradients.values())
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    assert estimate.num_parameters == sum(p.numel() for p in parameters)
    assert estimate.weights == size(parameters)
    assert estimate.masters == size(copies) and (estimate.masters > 0) == ("model.precision=bf16" in how)
    assert estimate.gradients == num_bytes
    assert estimate.optimizer == size(moments)
    assert estimate.rollout_weights == estimate.reference_weights == 0


@pytest.mark.parametrize("penalty", [0, 0.1])
def test_rollout_buffer_is_as_large_as_the_batch_of_an_iteration(penalty):
    from rlinf.algorithms import ALGORITHMS
    from rlinf.commands.open_checkpoint import statistics_of_env
    from rlinf.envs import make_env
    from rlinf.envs.episodes import EpisodeSampler
    from rlinf.models import build_policy
    from rlinf.rollout.collector import RolloutCollector

    sizes = [
        "rollout.num_envs=2",
        "rollout.num_chunks=3",
        "trainer.minibatch_size=6",
        "model.action_chunks_len=2",
        "env.image_size=16",
    ]
    config = build("model=openvla_tiny", "env=tabletop", "algorithm=ppo", *sizes, f"algorithm.kl_coef={penalty}")
    env = make_env(config.env, 2, auto_reset=True)
    model = build_policy(config, statistics_of_env(config, env)).eval()
    sampler = EpisodeSampler(env.episode_specs("train"), len(env.task_names), num_groups=2, group_size=1, seed=0)
    collector = RolloutCollector(
        lambda _: env, sampler, num_envs=2, num_chunks=3, temperature=1.0, num_worker_threads=1
    )
    batch = collector.collect(model, 0, 0, needs_values=True)
    collector.close()
    batch.old_logprobs, batch.values = torch.zeros_like(batch.rollout_logprobs), torch.zeros(3, 2)
    batch.ref_logprobs = torch.zeros_like(batch.rollout_logprobs) if penalty else None
    ALGORITHMS.get("ppo")(config.algorithm).compute_advantages(batch)
    arrays = [*batch.observation.images.values(), batch.observation.state]
    measured = size(batch.tensors().values()) + sum(array.nbytes for array in arrays)
    assert estimate_memory(config).rollout_buffer == measured == 6 * sample_bytes(config, model)


def test_rollout_buffer_counts_all_that_a_call_samples(monkeypatch):
    config = build("experiment=quickstart")
    model = policy_on_meta_device(config)
    before = sample_bytes(config, model)
    monkeypatch.setattr(type(model), "num_sampled", 100)
    assert sample_bytes(config, model) - before == 8 * (100 - model.num_logprobs)


def test_the_store_of_objects_holds_versions_of_what_is_trained_and_rollouts():
    sizes = ["experiment=quickstart", "rollout.num_envs=8", "rollout.num_chunks=4"]
    full, adapted = build(*sizes), build(*sizes, "model.is_lora=true", "model.lora.rank=2")
    rollout = 32 * sample_bytes(full, policy_on_meta_device(full))
    state = policy_on_meta_device(full).state_dict()
    assert store_bytes(full) == 2 * size(state.values()) + rollout
    full.cluster.max_staleness = 2
    assert store_bytes(full) == 4 * size(state.values()) + 3 * rollout
    model = policy_on_meta_device(adapted)
    frozen = size(p for p in model.parameters() if not p.requires_grad)
    assert frozen > 0 and store_bytes(adapted) == frozen + 2 * (size(model.state_dict().values()) - frozen) + rollout
    full.model.model_path = "organisation/name"
    assert store_bytes(full) is None, "not on this machine yet"


def test_memory_estimate_follows_sharding_reference_and_lora():
    base = estimate_memory(build("experiment=quickstart"))
    ranks = ["experiment=quickstart", "cluster.num_processes=2"]
    assert replace(estimate_memory(build(*ranks)), rollout_buffer=0) == replace(base, rollout_buffer=0), "not sharded"
    sharded = estimate_memory(build(*ranks, "trainer.sharding=fsdp2"))
    assert (sharded.weights, sharded.rollout_weights) == (base.weights // 2, base.weights)
    assert sharded.rollout_buffer == base.rollout_buffer // 2, "a rank holds what it has played"
    assert estimate_memory(build("experiment=quickstart", "algorithm.kl_coef=0.1")).reference_weights == base.weights
    split = estimate_memory(
        build(*ranks, "cluster.start=ray", "cluster.placement=disaggregated", "cluster.num_rollout_workers=4")
    )
    assert (split.num_rollout_workers, split.rollout_weights) == (2, base.weights)
    assert split.total == estimate_memory(build(*ranks)).total + 2 * base.weights, "a copy for each rollout worker"
    adapted = estimate_memory(build("experiment=quickstart", "model.is_lora=true", "model.lora.rank=2"))
    assert adapted.num_parameters > base.num_parameters and adapted.num_trainable < base.num_trainable / 2
    assert adapted.optimizer < base.optimizer / 2


@pytest.fixture
def public_openvla(tmp_path):
    """A folder with the config.json of the public 7B model, and no weights."""
    from rlinf.models.embodiment.modules.normalizer import unit_range_stats
    from rlinf.models.embodiment.openvla.config import OpenVLAConfig

    OpenVLAConfig(norm_stats={"tabletop": unit_range_stats(2)["unit_range"]}).save_pretrained(tmp_path)
    return tmp_path


def test_a_seven_billion_parameter_model_is_counted_without_being_built(public_openvla):
    source = ["experiment=openvla_tabletop_lora", f"model.model_path={public_openvla}"]
    full, adapted = (estimate_memory(build(*source, f"model.is_lora={lora}")) for lora in ("false", "true"))
    assert 7.4e9 < full.num_parameters < 7.7e9
    head = (full.weights - 2 * full.num_parameters) / 2  # its weights have 4 bytes
    assert head == 4096 * 512 + 512 + 512 * 128 + 128 + 128
    assert full.optimizer == 8 * full.num_trainable and full.masters == 4 * (full.num_trainable - head)
    assert full.gradients == 6 * (full.num_trainable - head) + 4 * head, "in bfloat16, and summed in float32"
    shards = estimate_memory(build(*source, "model.is_lora=false", "cluster.num_processes=2"))
    assert shards.masters == 0 and shards.gradients == 2 * full.num_trainable
    assert shards.weights == 2 * full.num_trainable + (full.num_parameters - full.num_trainable)
    assert shards.rollout_weights == full.weights
    hidden, inner, layers, rank = 4096, 11008, 32, 32
    language = layers * rank * (4 * 2 * hidden + 3 * (hidden + inner))
    assert language < adapted.num_trainable < 2 * language, "the rest: vision towers, projector, value head"
    assert adapted.num_parameters - full.num_parameters < adapted.num_trainable
    shallower = estimate_memory(
        build(*source, "model.is_lora=false", "model.override_config.text_config.num_hidden_layers=31")
    )
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    assert full.num_parameters - shallower.num_parameters == layer


def test_a_folder_without_statistics_of_the_env_is_counted_too(tmp_path):
    from rlinf.models.embodiment.openvla.config import OpenVLAConfig

    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    counts = []
    for name, statistics in (("none", {}), ("others", {"bridge": {"action": {"q01": [0.0] * 2, "q99": [1.0] * 2}}})):
        OpenVLAConfig(norm_stats=statistics, text_config=text).save_pretrained(tmp_path / name)
        changes = [f"model.model_path={tmp_path / name}", "model.hidden_size=null", "model.vocab_size=null"]
        config = build("experiment=openvla_tabletop_lora", *changes)
        config.model.unnorm_key = "tabletop"  # statistics_of_env brings them when the run starts
        counts.append(estimate_memory(config).num_parameters)
    assert counts[0] == counts[1] > 0


def test_an_engine_that_sleeps_and_an_update_are_not_added(monkeypatch, capsys):
    from rlinf.preflight.gpu_memory import GB, estimate_gpu

    config = build("experiment=quickstart_vllm")
    _, memory = estimate_gpu(config, 10 * GB)
    micro = config.model.micro_batch_size
    peak = memory.peak(micro, 0) - memory.simulators
    assert memory.engine and memory.engine_sleeps and peak < memory.resident + memory.engine + memory.passing(micro)
    monkeypatch.setattr("rlinf.distributed.process_group.resolve_device", lambda *_: "cuda")
    monkeypatch.setattr("rlinf.distributed.parallel.rank_memory_bytes", lambda *_: 10 * GB)
    monkeypatch.setattr("rlinf.preflight.memory.available_memory", lambda _: peak)
    assert module.check_memory("choice", config) == []
    monkeypatch.setattr("rlinf.preflight.memory.available_memory", lambda _: peak - 1)
    (finding,) = module.check_memory("choice", config)
    assert finding.status == NO and "end other programs on the GPU" in finding.detail
