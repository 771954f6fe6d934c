"""The public functions, which load policies, make envs, train, evaluate, audit and compare. The commands run the same code.

``overrides`` use command-line syntax (``["trainer.max_steps=3"]``). ``plugins`` are modules or .py files that register models,
envs and algorithms. No other external code is run unless ``trust_remote_code`` is set.
"""

import dataclasses
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlinf.checkpoints.folders import is_checkpoint, is_export, is_run, resolve_checkpoint
from rlinf.commands import evaluate as evaluation
from rlinf.commands.hydra_app import configure, parse, run_training
from rlinf.commands.open_checkpoint import open_checkpoint, read_config
from rlinf.commands.open_evaluation import sampling_settings
from rlinf.config import search
from rlinf.config.compose import compose_config, compose_on_saved, normalize_overrides
from rlinf.config.overrides import parse_overrides
from rlinf.config.saved_code import code_values
from rlinf.config.schema import RunConfig, build_config, section_class
from rlinf.distributed.process_group import resolve_device
from rlinf.envs import make_env as make_vector_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.errors import CheckpointError, ConfigError, closest
from rlinf.evaluation.compare import Comparison
from rlinf.evaluation.compare import compare as compare_results
from rlinf.evaluation.evaluator import episode_list, evaluate_policy, remembers
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import follow_latest
from rlinf.manifest import other_project
from rlinf.models import build_policy, model_of_folder
from rlinf.models.loading import read_json
from rlinf.models.precision import autocast
from rlinf.options import override_text, plain_container, public_fields, to_mapping
from rlinf.policy import Policy
from rlinf.report.compare_folders import compare_folders
from rlinf.run_folder import POLICY_FILE
from rlinf.types import Observation, SupportsAct

if (other := other_project()) is not None:
    warnings.warn(other, stacklevel=2)

IN_MEMORY_KEYS = (
    "seed", "plugins", "rollout.temperature", "evaluation.greedy", "evaluation.temperature", "evaluation.split",
    "evaluation.first_episode", "evaluation.num_episodes", "evaluation.num_envs",
)  # fmt: skip
"""Keys used by in-memory evaluations, in addition to ``env.*``."""


def load_policy(
    folder: str | os.PathLike,
    *,
    model_type: str | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Policy:
    """Load a policy: ``rlinf.load_policy("outputs/quickstart/latest").act(observation)``.

    Args:
        folder: A run folder (its newest checkpoint is loaded), checkpoint, export, or folder of a public model. With
            ``model_type``, it may also be a model ID on the Hugging Face Hub.
        model_type: Type of a public model, such as ``openvla_oft``, if its config.json does not specify the correct type or has
            not been downloaded yet. A run, checkpoint or export must be of this type.
        device: ``cpu`` or ``cuda``. None uses the configured device, by default the GPU if there is one.
        overrides: Changes to the configuration of the checkpoint or model type, such as ``["model.unnorm_key=bridge_orig"]``.
        plugins: Plugins to import. A checkpoint's plugins are not imported unless listed here.
        trust_remote_code: Run Python code stored in the model's folder.

    If ``torch.distributed`` is initialised, all ranks must call this function; rank 0 reads and verifies the files for them.
    """
    check_overrides(overrides, "load_policy")
    overrides = [*overrides, *code_overrides(plugins, trust_remote_code)]
    if device is not None:
        overrides.append(f"cluster.device={device}")
    public = _public_model(folder, model_type)
    if public is not None:
        composed = compose_config([*public, *overrides])
        composed.model.init_config = {}  # sizes of random weights
        config = build_config(composed)
        model = build_policy(config)
    else:
        source = resolve_checkpoint(folder)
        named = [] if model_type is None else [f"model.model_type={model_type}"]
        config = read_config(source, [*overrides, *named])
        model = open_checkpoint(source, config).policy
    model = model.to(resolve_device(config.cluster.device, 1)).eval()
    return Policy(model, config, trained_here=public is None)


def make_env(
    env: str | EnvConfig,
    num_envs: int = 1,
    *,
    auto_reset: bool = False,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    **settings: Any,
) -> VectorEnv:
    """Build a ``gymnasium.vector.VectorEnv`` of ``num_envs`` environments.

    Args:
        env: Name, as in the commands' ``env=...``, or a configuration such as ``policy.config.env``.
        auto_reset: Start the next episode when one ends. If False, its env slot remains idle until ``reset``.
        **settings: Configuration keys of the env, such as ``tasks=["reach"]`` or ``max_episode_steps=32``.
    """
    check_overrides(overrides, "make_env")
    config = run_config(env, [*overrides, *code_overrides(plugins, False)], settings).env
    return make_vector_env(config, num_envs, auto_reset=auto_reset)


def train(
    overrides: Sequence[str],
    *,
    plugins: Sequence[str] = (),
    config_dir: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
    sft_only: bool = False,
) -> Path:
    """Train like ``rlinf train`` and return the run folder: ``rlinf.train(["experiment=quickstart", "trainer.max_steps=3"])``.

    Args:
        overrides: Overrides, as on the command line; ``resume=<run folder>`` resumes a run.
        config_dir: Folder with your own groups and experiments, like ``--config-dir``. ``env/dot.yaml`` in it enables ``env=dot``.
        sft_only: Only run behaviour cloning, like ``rlinf sft``.

    Raises:
        RLinfError: If the configuration is rejected before training starts, or training fails for a reason that you can fix.
        KeyboardInterrupt: If a signal stops training, after a checkpoint is saved.
    """
    check_overrides(overrides, "train")
    flags = [] if config_dir is None else ["--config-dir", os.fspath(config_dir)]
    try:
        (folder,) = run_training(
            [*flags, *overrides, *code_overrides(plugins, trust_remote_code)], "sft" if sft_only else "train"
        )
    except SystemExit as stop:
        # SystemExit would end the caller's program, whereas a notebook survives a KeyboardInterrupt.
        raise KeyboardInterrupt("training was stopped by a signal; all progress has been saved") from stop
    return folder


def evaluate(
    policy: str | os.PathLike | Policy | SupportsAct | Callable[[Observation], Any],
    env: str | EnvConfig | None = None,
    *,
    episodes: int | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> EvaluationResult:
    """Measure a policy's success rate on held-out episodes, each of which is run once.

    A folder is evaluated like ``rlinf evaluate checkpoint=<folder>``: conditions are compared with the checkpoint's, and the
    result, videos and a report are written. An object is evaluated in memory, and no files are written.

    Args:
        policy: A run folder, checkpoint or export; a policy from ``load_policy``; or an object with ``act(observation)`` or a
            function of an observation, which must return actions ``[B, C, D]`` or ``[B, D]``. Each call receives the observations of
            all running episodes, so the policy must be stateless. If it has ``reset()``, episodes run one at a time, each after a reset.
        env: Name or configuration of the env. None uses the policy's training env.
        episodes: Number of episodes. None uses ``evaluation.num_episodes``.
        overrides: Overrides, such as ``["evaluation.greedy=false", "seed=3", "output_dir=outputs/mine"]``. For an object, only keys
            of the env, the seed, the temperature and the list of episodes are allowed.

    Returns:
        A result with ``success_rate`` and its 95 % ``interval`` (both None if the env does not report success), ``return_mean``,
        ``per_task``, and ``results`` (one per episode). ``print(result.table())`` prints a summary.
    """
    check_overrides(overrides, "evaluate")
    overrides = [*overrides, *code_overrides(plugins, trust_remote_code)]
    if episodes is not None:
        overrides.append(f"evaluation.num_episodes={episodes}")
    if isinstance(policy, (str, os.PathLike)):
        return evaluation.evaluate(configure(command_arguments(policy, env, overrides, "evaluate"), "evaluate"))
    with opened_object(policy, env, overrides, "evaluate") as (model, made, config):
        settings = config.evaluation
        specs = episode_list(made, settings.split, settings.num_episodes, settings.first_episode)
        return evaluate_policy(model, made, specs, **sampling_settings(config))


def compare(
    a: EvaluationResult | str | os.PathLike,
    b: EvaluationResult | str | os.PathLike,
    *,
    allow_mismatch: Sequence[str] = (),
) -> Comparison:
    """Compare two evaluations of the same episodes with McNemar's exact paired test, like ``rlinf evaluate --compare``.

    Args:
        a, b: Two results of ``evaluate``, or two folders of evaluations or runs. Folders record the conditions of evaluations,
            which must match; results do not.
        allow_mismatch: Fields allowed to differ, as in ``evaluation.allow_mismatch``.

    Returns:
        A comparison with ``total.difference`` (b - a), ``total.interval`` and ``total.p_value``. ``print(comparison.table())`` prints it.
    """
    are_folders = [isinstance(side, (str, os.PathLike)) for side in (a, b)]
    if all(are_folders):
        return compare_folders(a, b, allow_mismatch)
    if any(are_folders):
        raise ConfigError("compare got a folder and a result; expected two folders, or two results")
    return compare_results(a, b, allow_mismatch)


def command_arguments(
    folder: str | os.PathLike, env: str | EnvConfig | None, overrides: Sequence[str], function: str
) -> Namespace:
    """Return the parsed arguments of the command ``function`` for a folder."""
    if env is not None and not isinstance(env, str):
        required = "with a folder the name of an env, and overrides=['env.<key>=...'] for its settings"
        raise ConfigError(f"{function} got a folder and an env configuration; expected {required}")
    chosen = [] if env is None else [f"env={env}"]
    return parse([f"checkpoint={_quoted(folder)}", *chosen, *overrides])


@contextmanager
def opened_object(
    policy: Policy | SupportsAct | Callable[[Observation], Any],
    env: str | EnvConfig | None,
    overrides: Sequence[str],
    function: str,
) -> Iterator[tuple[Any, VectorEnv, RunConfig]]:
    """Yield the policy as required by ``evaluate_policy``, its env (closed on exit), and the configuration."""
    is_ours = isinstance(policy, Policy)
    if isinstance(policy, type) or not callable(getattr(policy, "act", policy)):
        required = "a folder, a policy of rlinf.load_policy, an object with act, or a function of an observation"
        raise ConfigError(f"{function} got a {type(policy).__name__}; expected {required}")
    if env is None and not (is_ours and policy.cameras is not None):
        raise ConfigError(
            f"{function} needs the env of this policy. Pass env='tabletop', or a different env listed by `rlinf models`"
        )
    for key in _typed_values(overrides):
        if key not in IN_MEMORY_KEYS and key.partition(".")[0] != "env":
            problem = f"{function} got the override '{key}', which has no effect on a policy object"
            fix = "Pass it to load_policy, or evaluate the folder"
            raise ConfigError(f"{problem}; expected keys of env, {', '.join(IN_MEMORY_KEYS)}. {fix}")
    config = run_config(env, overrides, base=policy.config if is_ours else None)
    settings = config.evaluation
    num_envs = 1 if remembers(policy) else min(settings.num_envs, settings.num_episodes or settings.num_envs)
    made = make_vector_env(config.env, num_envs, auto_reset=False)
    try:
        with autocast(policy.model, policy.config.model.precision) if is_ours else nullcontext():
            yield policy.model if is_ours else policy, made, config
    finally:
        made.close()


def run_config(
    env: str | EnvConfig | None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    base: RunConfig | None = None,
    config_dir: str | None = None,
) -> RunConfig:
    """Return a loaded policy's configuration (``base``), or the defaults, with a different env and overrides.

    ``settings`` are env keys that are applied last. ``config_dir`` is a folder with the user's own groups.
    """
    if not (env is None or isinstance(env, str) or dataclasses.is_dataclass(env)):
        fix = "Pass 'tabletop', and its settings by overrides=['env.<key>=...']"
        raise ConfigError(
            f"env is {env!r} ({type(env).__name__}); expected the name of an env, or its configuration. {fix}"
        )
    is_named = isinstance(env, str)
    chosen = [f"env={env}", *overrides] if is_named else list(overrides)
    if is_named and base is None:
        composed = plain_container(compose_config(chosen, config_dir))
    else:
        saved = plain_container(compose_config([], config_dir)) if base is None else to_mapping(base)
        if env is not None and not is_named:
            saved["env"] = to_mapping(env)
        # Plugins and remote code in the loaded configuration remain allowed, because the user allowed them when loading it.
        replaced = [key for key, value in _typed_values(chosen).items() if isinstance(value, str)]
        code = [f"{key}={_value(value)}" for key, value in code_values(saved) if key.partition(".")[0] not in replaced]
        composed = plain_container(compose_on_saved(saved, [*code, *chosen], config_dir))
    arguments, known = ("num_envs", "auto_reset"), public_fields(section_class("env", composed["env"]["name"]))
    for name, value in (settings or {}).items():
        if name not in known and (meant := closest(name, [*known, *arguments])) in arguments:
            problem = f"make_env got {name}={value!r}, which is neither an argument nor a key of the env"
            raise ConfigError(f"{problem}. Pass {meant}={value!r}")
    return build_config({**composed, "env": {**composed["env"], **(settings or {})}})


def _typed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides into a mapping of keys to values."""
    return {item.key_or_group: item.value() for item in parse_overrides(normalize_overrides(overrides))}


def _public_model(folder: str | os.PathLike, model_type: str | None) -> list[str] | None:
    """Return the overrides that select a public model and its type, or None for a run, checkpoint or export."""
    path, typed = Path(folder).expanduser(), "Pass model_type='openvla', or a type listed by `rlinf models`"
    if is_checkpoint(path) or is_export(path) or is_run(path):
        return None
    if model_type is None and not path.exists() and not follow_latest(path).exists():
        required = "a run, a checkpoint, an export or the folder of a model"
        raise CheckpointError(
            f"There is no folder {folder}; expected {required}. A model on the hub needs its type. {typed}"
        )
    if model_type is None and not (path / "config.json").is_file():
        return None
    folder_type, folder_keys = model_of_folder(path)
    name = model_type or folder_type
    if name is None:
        raise CheckpointError(f"{path / 'config.json'} does not contain a model_type. {typed}")
    chosen = f"model={name}" if name in search.group_options("model") else f"model.model_type={name}"
    keys = {"action_dim": "action_token_len", "action_chunks_len": "action_chunks_len", "unnorm_key": "unnorm_key"}
    # A checkpoint's `model` folder stores constructor arguments in a file next to config.json.
    saved = read_json(path / POLICY_FILE) if (path / POLICY_FILE).is_file() else {}
    sizes = [f"model.{key}={_quoted(saved[name]) if isinstance(saved[name], str) else saved[name]}"
             for name, key in keys.items() if name in saved]  # fmt: skip
    sizes += [f"model.{key}={value}" for key, value in folder_keys.items() if name == folder_type]
    return [chosen, *sizes, f"model.model_path={_quoted(path if path.is_dir() else folder)}"]


def check_overrides(overrides: Sequence[str], function: str) -> None:
    """Raise ConfigError unless overrides are a list of strings without command-line flags."""
    _check_list(overrides, f"overrides of {function}")
    for override in overrides:
        if not isinstance(override, str) or override.startswith("-"):
            flags = "Flags only work on the command line; in Python, use plugins=[...] to import code, and a loop for a sweep"
            raise ConfigError(f"{function} got the override {override!r}; expected strings such as 'seed=3'. {flags}")


def code_overrides(plugins: Sequence[str], trust_remote_code: bool) -> list[str]:
    """Return the overrides that allow the given plugins and remote code."""
    _check_list(plugins, "plugins")
    named = [f"plugins={_value(plugins)}"] if plugins else []
    return named + (["model.trust_remote_code=true"] if trust_remote_code else [])


def _check_list(values: Any, name: str) -> None:
    """Raise ConfigError unless ``values`` is a list of strings."""
    # A string is also a sequence, and would be iterated letter by letter.
    if isinstance(values, (str, os.PathLike)):
        raise ConfigError(f"{name}: got '{values}', which is not a list. Pass ['{values}']")
    if not isinstance(values, Sequence):
        raise ConfigError(f"{name}: got {values!r}; expected a list of strings. Pass []")


def _value(value: Any) -> str:
    """Format a value in override syntax, quoting strings."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    return _quoted(value) if isinstance(value, (str, os.PathLike)) else override_text(value)


def _quoted(path: str | os.PathLike) -> str:
    """Quote a path for use as an override's value. Backslashes before a quote are doubled."""
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), os.fspath(path))
    return f"'{text}'"
