"""The public functions: load a policy, make an env, train, evaluate, compare. The commands run the same code.

Every function takes ``overrides`` as they are typed on the command line (``["trainer.max_steps=3"]``), ``plugins`` (modules
or files that register models and envs), and runs code of others only where it is asked to.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import CheckpointError, ConfigError
from rlinf.policy import Policy

if TYPE_CHECKING:
    from rlinf.config.schema import RunConfig
    from rlinf.envs.base import VectorEnv
    from rlinf.envs.config import EnvConfig
    from rlinf.evaluation.compare import Comparison
    from rlinf.evaluation.result import EvaluationResult
    from rlinf.types import Acts


READ_FOR_AN_OBJECT = (
    "seed",
    "plugins",
    "rollout.temperature",
    "evaluation.greedy",
    "evaluation.split",
    "evaluation.num_episodes",
    "evaluation.num_envs",
)
"""Keys besides those of the env that an evaluation of an object in memory reads."""


def load_policy(
    folder: str | os.PathLike,
    *,
    model_type: str | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Policy:
    """Load a policy that acts: ``rlinf.load_policy("outputs/quickstart/latest").act(observation)``.

    Args:
        folder: A run folder (its newest checkpoint), a checkpoint, an export, the folder of a public model, or, with
            ``model_type``, its id on the Hugging Face hub.
        model_type: Of a public model, where its config.json names another one or none (``openvla_oft``), or is not here yet.
            A run, checkpoint or export must be of this type.
        device: ``cpu`` or ``cuda``; None: as the configuration says, which is the GPU where there is one.
        overrides: Laid over the configuration of the checkpoint, or that of the model type: ``["model.precision=fp32"]``,
            ``["model.unnorm_key=bridge_orig"]``.
        plugins: Modules or .py files that register the model or the env; those that a checkpoint names are not imported
            unless they are given here.
        trust_remote_code: Run Python code stored in the model's folder.

    Raises:
        CheckpointError: The folder is neither, or is damaged.
        ConfigError: An override does not fit.
    """
    from rlinf.checkpoints.checkpoint import resolve_checkpoint
    from rlinf.commands.policy_loading import load_policy as load
    from rlinf.commands.policy_loading import read_config
    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config
    from rlinf.distributed.process_group import resolve_device
    from rlinf.manifest import Manifest, verify_files
    from rlinf.models import build_policy
    from rlinf.preflight.saved import check_model_type

    _check_overrides(overrides, "load_policy")
    overrides = [*overrides, *_code(plugins, trust_remote_code)]
    if device is not None:
        overrides.append(f"cluster.device={device}")
    public = _public_model(folder, model_type)
    if public is not None:
        composed = compose_config([*public, *overrides])
        composed.model.init_config = {}  # sizes of random weights
        config = build_config(composed)
        model = build_policy(config)
    else:
        source = resolve_checkpoint(Path(folder).expanduser())
        config = read_config(
            source, overrides if model_type is None else [*overrides, f"model.model_type={model_type}"]
        )
        saved = Manifest.load(source)
        check_model_type(source, saved, config)
        verify_files(source, saved)
        model = load(source, config)
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
    """Make ``num_envs`` environments that step together, a ``gymnasium.vector.VectorEnv``.

    Args:
        env: Name as in ``env=...`` of the commands, or a configuration (``policy.config.env``).
        num_envs: ``B``.
        auto_reset: Start the next episode where one ends; False: its row stands still until ``reset``.
        overrides: ``["env.image_size=96"]``.
        plugins: Modules or .py files that register the env.
        **settings: Keys of the env: ``tasks=["reach"]``, ``max_episode_steps=32``.

    Raises:
        ConfigError: There is no such env or key, or a value is refused.
        MissingDependencyError: Its simulator is not installed.
    """
    from rlinf.envs import make_env as make

    _check_overrides(overrides, "make_env")
    config = run_config(env, [*overrides, *_code(plugins, False)], settings).env
    return make(config, num_envs, auto_reset=auto_reset)


def train(
    overrides: Sequence[str], *, plugins: Sequence[str] = (), trust_remote_code: bool = False, sft_only: bool = False
) -> Path:
    """Train as ``rlinf train`` does: ``rlinf.train(["experiment=quickstart", "trainer.max_steps=3"])``.

    Args:
        overrides: As on the command line; ``resume=<run folder>`` continues a run.
        plugins: Modules or .py files that register models, envs and algorithms.
        trust_remote_code: Run Python code stored in the model's folder.
        sft_only: Behaviour cloning only, as ``rlinf sft``.

    Returns:
        The run folder.

    Raises:
        RLinfError: What is configured is refused, before anything starts, or training failed in a way that you can mend.
        KeyboardInterrupt: A signal stopped it; what was trained is saved.
    """
    from rlinf.commands.hydra_app import run_training

    _check_overrides(overrides, "train")
    try:
        (folder,) = run_training([*overrides, *_code(plugins, trust_remote_code)], "sft" if sft_only else "train")
    except SystemExit as stop:  # a notebook goes on
        raise KeyboardInterrupt("training was stopped by a signal; what was trained is saved") from stop
    return folder


def evaluate(
    policy: str | os.PathLike | Policy | Acts,
    env: str | EnvConfig | None = None,
    *,
    episodes: int | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> EvaluationResult:
    """Measure the success rate of a policy on held-out episodes, each run once.

    A folder is evaluated as ``rlinf evaluate checkpoint=<folder>`` does it: conditions are compared with those of the
    checkpoint, and result, videos and report are written. An object is evaluated in memory, and nothing is written.

    Args:
        policy: A run folder, checkpoint or export; what ``load_policy`` returned; or any object with ``act``, which is
            asked for all running episodes at once, and should not keep anything from one call to the next.
        env: Name or configuration of the env; None: the one that the policy was trained in.
        episodes: Number of episodes; None: ``evaluation.num_episodes``.
        overrides: ``["evaluation.greedy=false", "seed=3", "output_dir=outputs/mine"]``. Of a loaded policy they are laid over
            its configuration, as with its folder. An object takes those of the env, the seed, the temperature and the list
            of episodes.
        plugins: Modules or .py files that register the model or the env.
        trust_remote_code: Run Python code stored in the model's folder.

    Returns:
        ``success_rate``, ``interval`` (95 %), ``per_task``, ``results`` (one per episode); ``print(result.table())``.

    Raises:
        ManifestMismatchError: The checkpoint was made under other conditions.
        ConfigError: There are fewer episodes, the object's actions do not fit the env, or an override cannot apply to an object.
    """
    _check_overrides(overrides, "evaluate")
    overrides = [*overrides, *_code(plugins, trust_remote_code)]
    if episodes is not None:
        overrides.append(f"evaluation.num_episodes={episodes}")
    if isinstance(policy, (str, os.PathLike)):
        from rlinf.commands.evaluate import evaluate as run
        from rlinf.commands.hydra_app import configure, parse

        if env is not None and not isinstance(env, str):
            raise ConfigError(
                "evaluate got a folder and an env configuration; required with a folder: the name of an env, with "
                "overrides=['env.<key>=...'] for its settings"
            )
        chosen = [] if env is None else [f"env={env}"]
        return run(configure(parse([f"checkpoint={_quoted(policy)}", *chosen, *overrides]), "evaluate"))
    return _evaluate_object(policy, env, overrides)


def compare(
    a: EvaluationResult | str | os.PathLike,
    b: EvaluationResult | str | os.PathLike,
    *,
    allow_mismatch: Sequence[str] = (),
) -> Comparison:
    """Compare two evaluations of the same episodes pair by pair (McNemar's exact test), as ``rlinf evaluate --compare``.

    Args:
        a, b: Both results of ``evaluate``, or both folders of evaluations or runs. Folders tell under which conditions they
            were made, which must be the same; results do not.
        allow_mismatch: As in ``evaluation.allow_mismatch``.

    Returns:
        ``total.difference`` (b - a), ``total.interval``, ``total.p_value``; ``print(comparison.table())``.

    Raises:
        ConfigError: The episodes differ.
        ManifestMismatchError: The conditions do.
    """
    from rlinf.evaluation.compare import compare as compare_results
    from rlinf.evaluation.compare_folders import compare_folders

    are_folders = [isinstance(one, (str, os.PathLike)) for one in (a, b)]
    if all(are_folders):
        return compare_folders(a, b, allow_mismatch)
    if any(are_folders):
        raise ConfigError("compare got a folder and a result; required: two folders, or two results")
    return compare_results(a, b, allow_mismatch)


def _evaluate_object(policy: Policy | Acts, env: str | EnvConfig | None, overrides: Sequence[str]) -> EvaluationResult:
    from rlinf.commands.evaluate import episode_list
    from rlinf.envs import make_env as make
    from rlinf.evaluation.evaluator import evaluate_policy
    from rlinf.models.precision import autocast

    is_ours = isinstance(policy, Policy)
    if not callable(getattr(policy, "act", None)):
        raise ConfigError(
            f"evaluate got a {type(policy).__name__}; required: a folder, a policy of rlinf.load_policy, or an object with act"
        )
    if env is None and not (is_ours and policy.cameras is not None):
        raise ConfigError(
            "evaluate needs the env of this policy. Pass env='tabletop', or another one of `rlinf models`"
        )
    config = run_config(env, _for_an_object(overrides), base=policy.config if is_ours else None)
    settings = config.evaluation
    num_envs = min(settings.num_envs, settings.num_episodes or settings.num_envs)
    made = make(config.env, num_envs, auto_reset=False)
    try:
        with autocast(policy.model, policy.config.model.precision) if is_ours else nullcontext():
            return evaluate_policy(
                policy.model if is_ours else policy,
                made,
                episode_list(made, settings.split, settings.num_episodes),
                greedy=settings.greedy,
                temperature=config.rollout.temperature,
                seed=config.seed,
            )
    finally:
        made.close()


def run_config(
    env: str | EnvConfig | None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    base: RunConfig | None = None,
    config_dir: str | None = None,
) -> RunConfig:
    """Return a configuration with the env that is named or given, overrides, and ``settings`` of the env laid over.

    Args:
        env: Name or configuration; None: that of ``base``.
        overrides: As typed.
        settings: Keys of the env.
        base: Configuration of a loaded policy, over which all is laid; None: the defaults.
        config_dir: Folder of the user's own groups.
    """
    from rlinf.config import search
    from rlinf.config.compose import compose_config, compose_on_saved, no_such_option
    from rlinf.config.plugins import load_plugins
    from rlinf.config.schema import build_config
    from rlinf.envs import ENVS
    from rlinf.options import plain_container, to_mapping

    if not (env is None or isinstance(env, str) or dataclasses.is_dataclass(env)):
        raise ConfigError(
            f"env is {env!r} ({type(env).__name__}); required: the name of an env, or its configuration. Pass 'tabletop', and its "
            "settings by overrides=['env.<key>=...']"
        )
    search.register(config_dir)
    options = search.group_options("env")
    is_group = isinstance(env, str) and env in options
    chosen = [f"env={env}", *overrides] if is_group else list(overrides)
    if is_group and base is None:
        composed = plain_container(compose_config(chosen, config_dir))
    else:
        saved = plain_container(compose_config([], config_dir)) if base is None else to_mapping(base)
        if isinstance(env, str) and not is_group:
            load_plugins(_typed_values(chosen).get("plugins", saved["plugins"]))
            if env not in ENVS:
                raise ConfigError(no_such_option("env", env, [*options, *ENVS]))
            saved["env"] = {"name": env}
        elif env is not None and not is_group:
            saved["env"] = to_mapping(env)
        composed = plain_container(compose_on_saved(saved, [*_loaded_code(saved, chosen), *chosen], config_dir))
    _check_settings(settings or {}, composed)
    return build_config({**composed, "env": {**composed["env"], **(settings or {})}})


def _for_an_object(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides of an evaluation in memory.

    Raises:
        ConfigError: One has no effect on an object, e.g. because nothing is written.
    """
    for key in _typed_values(overrides):
        if key not in READ_FOR_AN_OBJECT and key.partition(".")[0] != "env":
            raise ConfigError(
                f"evaluate got the override '{key}', which has no effect on an object; required with an object: keys of env, "
                f"{', '.join(READ_FOR_AN_OBJECT)}. Give load_policy the other overrides, or evaluate the folder"
            )
    return overrides


def _typed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return key and value of each override."""
    from rlinf.config.compose import normalize_overrides, parse_overrides

    return {item.key_or_group: item.value() for item in parse_overrides(normalize_overrides(overrides))}


def _loaded_code(saved: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return overrides of what names code in the configuration of a loaded policy or env, which was let run before."""
    from rlinf.config.saved_code import code_values

    replaced = [key for key, value in _typed_values(overrides).items() if isinstance(value, str)]
    return [f"{key}={_value(value)}" for key, value in code_values(saved) if key.partition(".")[0] not in replaced]


def _check_settings(settings: Mapping[str, Any], composed: Mapping[str, Any]) -> None:
    """Refuse a setting that was meant to be an argument of ``make_env``."""
    from rlinf.config.plugins import load_plugins
    from rlinf.config.schema import section_class
    from rlinf.errors import closest
    from rlinf.options import public_fields

    arguments = [name for name in inspect.signature(make_env).parameters if name not in ("env", "settings")]
    unknown = []
    if settings:
        load_plugins(composed["plugins"])
        known = public_fields(section_class("env", composed["env"]["name"]))
        unknown = [key for key in settings if key not in known]
    for key in unknown:
        meant = closest(key, [*known, *arguments])
        if meant in arguments:
            raise ConfigError(
                f"make_env got {key}={settings[key]!r}, which is neither an argument nor a key of the env. Pass "
                f"{meant}={settings[key]!r}"
            )


def _public_model(folder: str | os.PathLike, model_type: str | None) -> list[str] | None:
    """Return the overrides that name a public model and its type; None for a run, a checkpoint or an export.

    Raises:
        CheckpointError: Its config.json names no type.
    """
    from rlinf.checkpoints.checkpoint import is_checkpoint, is_export, is_run
    from rlinf.config.search import group_options
    from rlinf.files import follow_latest
    from rlinf.models.embodiment.checkpoint_policy import POLICY_FILE
    from rlinf.models.loading import read_json

    path = Path(folder).expanduser()
    if is_checkpoint(path) or is_export(path) or is_run(path):
        return None
    if model_type is None and not path.exists() and not follow_latest(path).exists():
        raise CheckpointError(
            f"There is no folder {folder}; required: a run, a checkpoint, an export or the folder of a model. A model of the Hugging "
            "Face hub needs its type. Pass model_type='openvla', or another of `rlinf models`"
        )
    if model_type is None and not (path / "config.json").is_file():
        return None
    name = model_type or read_json(path / "config.json").get("model_type")
    if name is None:
        raise CheckpointError(
            f"{path / 'config.json'} names no model_type. Pass model_type='openvla', or another of `rlinf models`"
        )
    chosen = f"model={name}" if name in group_options("model") else f"model.model_type={name}"
    keys = {"action_dim": "action_token_len", "action_chunks_len": "action_chunks_len", "unnorm_key": "unnorm_key"}
    saved = read_json(path / POLICY_FILE) if (path / POLICY_FILE).is_file() else {}  # a model folder of a checkpoint
    sizes = [f"model.{key}={_quoted(saved[name]) if isinstance(saved[name], str) else saved[name]}"
             for name, key in keys.items() if name in saved]  # fmt: skip
    return [chosen, *sizes, f"model.model_path={_quoted(path if path.is_dir() else folder)}"]


def _check_overrides(overrides: Sequence[str], function: str) -> None:
    """Overrides are a list of strings, without the flags of the command line.

    Raises:
        ConfigError: They are not.
    """
    _check_list(overrides, f"overrides of {function}")
    for word in overrides:
        if not isinstance(word, str) or word.startswith("-"):
            raise ConfigError(
                f"{function} got the override {word!r}; required: strings such as 'seed=3'. Flags are for the command line: "
                "in Python, plugins=[...] imports code, and a loop makes a sweep"
            )


def _code(plugins: Sequence[str], trust_remote_code: bool) -> list[str]:
    """Return the overrides that let code of others run, where it was asked for."""
    _check_list(plugins, "plugins")
    named = [f"plugins={_value(plugins)}"] if plugins else []
    return named + (["model.trust_remote_code=true"] if trust_remote_code else [])


def _check_list(values: Any, name: str) -> None:
    """Refuse a single value, whose letters Python would take one by one, in the place of a list."""
    if isinstance(values, (str, os.PathLike)):
        raise ConfigError(f"{name}: got '{values}', which is not a list. Pass ['{values}']")
    if not isinstance(values, Sequence):
        raise ConfigError(f"{name}: got {values!r}; required: a list of strings. Pass []")


def _value(value: Any) -> str:
    """Return a value as an override takes it, texts in quotes."""
    from rlinf.options import override_text

    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    return _quoted(value) if isinstance(value, (str, os.PathLike)) else override_text(value)


def _quoted(path: str | os.PathLike) -> str:
    """Return a path as a quoted value of an override; backslashes in front of a quote are doubled."""
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), os.fspath(path))
    return f"'{text}'"
