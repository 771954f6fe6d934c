"""Wings: parts of the package that the core never imports, and what each of them adds, in one table.

A wing is present if all of its folders exist. The core finds its commands, models, envs, functions and reports here by name, as it
finds third-party packages by entry points, and runs without any wing whose folders are deleted.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError
from rlinf.imports import import_string

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Command:
    """A command of ``rlinf``.

    Attributes:
        run: Function that takes the arguments after the command and returns the exit status; its docstring is the help text.
        about: What the command does, in a line.
        usage: The command's arguments.
        examples: Lines of ``rlinf --help``.
        keys: Dataclass with the keys that only this command has.
        has_config: Whether the keys of a run's configuration are arguments, too.
        uses_ranks: Whether all processes of torchrun or srun run it; otherwise only rank 0 does.
    """

    run: str
    about: str
    usage: str
    examples: tuple[str, ...] = ()
    keys: str | None = None
    has_config: bool = True
    uses_ranks: bool = False

    def load(self, part: str = "run") -> Any:
        """Import the function ``run`` or the dataclass ``keys``."""
        return import_string(getattr(self, part))


@dataclass(frozen=True)
class Wing:
    """What a wing adds, each as ``"module:attribute"`` that is imported at first use.

    Attributes:
        folders: Its folders, relative to the package.
        about: What it is for, in a line.
        commands: Commands by name.
        variants: Functions that run a core command instead of the core, by the command and an argument: ``{"evaluate questions=":
            "module:function"}`` if this key is given, ``{"diagnose <folder>": "module:function"}`` for a folder without a policy.
        models: ``rlinf.models.ModelEntry`` objects by model type.
        envs: ``VectorEnv`` classes by name.
        run_folders: ``rlinf.report.run_data.RunFolders`` objects, by what their evaluations count (``"questions"``).
        exports: Functions that export checkpoints, by a section of their configuration that ``RunConfig`` lacks.
        options: Choices of config groups, and experiments, that need the wing: ``("env=pusht", "experiment=pusht_ppo")``.
    """

    folders: tuple[str, ...]
    about: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    run_folders: Mapping[str, str] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


WINGS = {
    "robot": Wing(
        folders=("robot",),
        about="real-time evaluation on simulated and physical robots, success classifiers",
        commands={
            "robot": Command(
                "rlinf.robot.cli:robot",
                "evaluation of a checkpoint in real time, on a simulated or physical robot",
                "checkpoint=<folder> [fps=20] [execution=async] [latency_s=0.15] [key=value ...]",
                keys="rlinf.robot.config:RobotConfig",
            ),
            "classifier": Command(
                "rlinf.robot.cli:classifier",
                "training of a success classifier on frames, and its error rates",
                "data=<dataset> output_dir=<new folder> [test=<dataset>] [key=value ...]",
                examples=("rlinf classifier data=data/labelled output_dir=outputs/classifier",),
                keys="rlinf.robot.classifier:ClassifierConfig",
                has_config=False,
            ),
        },
        variants={"collect teleoperator=": "rlinf.robot.cli:demonstrate"},
    ),
    "audit": Wing(
        folders=("audits",),
        about="audits of policies",
        commands={
            "audit": Command(
                "rlinf.audits.cli:audit",
                "whether a policy uses its instruction and images, reacts, or memorises",
                "checkpoint=<folder> [key=value ...]",
                examples=("rlinf audit checkpoint=outputs/quickstart/latest",),
            ),
        },
    ),
    "tokens": Wing(
        folders=("llm", "recipes"),
        about="recipes that train language and vision-language models",
        commands={
            "launch": Command(
                "rlinf.recipes.cli:launch",
                "training of language and vision-language models: SFT, GRPO, DPO",
                "--config <recipe> [dataset script] [key=value ...] [--dry-run]",
                examples=(
                    "rlinf launch --config mistral-7b-fsdp4-sft --dry-run   what a recipe for a language model needs",
                ),
                has_config=False,
                uses_ranks=True,
            ),
        },
        variants={
            "diagnose <folder>": "rlinf.llm.validation:diagnose",
            "evaluate questions=": "rlinf.recipes.cli:questions",
        },
        run_folders={"questions": "rlinf.recipes.report:RUN_FOLDERS"},
        exports={"policy": "rlinf.recipes.hf_folder:export", "train": "rlinf.recipes.hf_folder:export"},
    ),
    "lerobot": Wing(
        folders=("models/embodiment/lerobot", "envs/pusht", "envs/so101"),
        about="policies of lerobot, and the envs PushT and SO-101",
        models={
            "lerobot": "rlinf.models.embodiment.lerobot:LEROBOT",
            "smolvla": "rlinf.models.embodiment.lerobot:SMOLVLA",
            "groot": "rlinf.models.embodiment.lerobot:GROOT",
        },
        envs={
            "pusht": "rlinf.envs.pusht.env:PushTVectorEnv",
            "so101": "rlinf.envs.so101.env:SO101VectorEnv",
        },
        options=(
            "model=lerobot",
            "model=smolvla",
            "model=groot",
            "env=pusht",
            "env=so101",
            "experiment=pusht_ppo",
            "experiment=so101_picklift_residual",
            "experiment=so101_touch_ppo",
        ),
        commands={
            "check-policy": Command(
                "rlinf.models.embodiment.lerobot.check:check_policy",
                "whether a lerobot policy folder is complete and consistent",
                "<folder> [interpreter=<python>] [override_config={...}] [migrate=<new folder>]",
                examples=("rlinf check-policy outputs/act_so101/pretrained_model",),
            ),
        },
    ),
}


@functools.cache
def present() -> dict[str, Wing]:
    """Return the wings whose folders exist."""
    return {name: wing for name, wing in WINGS.items() if all((PACKAGE / folder).is_dir() for folder in wing.folders)}


def folders() -> list[Path]:
    """Return the folders of the present wings."""
    return [PACKAGE / folder for wing in present().values() for folder in wing.folders]


def added(kind: str) -> dict:
    """Return the entries of the present wings of one ``kind``, a field of ``Wing`` (``"envs"``)."""
    return {name: entry for wing in present().values() for name, entry in getattr(wing, kind).items()}


def load(kind: str, name: str) -> Any:
    """Import the entry ``name`` of one ``kind``; raise ConfigError if its wing is not present."""
    if (reason := missing(kind, name)) is not None:
        raise ConfigError(reason)
    return import_string(added(kind)[name])


def hidden_options(group: str) -> set[str]:
    """Return the choices of a config group that need a wing that is not present."""
    options = (option for title, wing in WINGS.items() if title not in present() for option in wing.options)
    return {option.removeprefix(f"{group}=") for option in options if option.startswith(f"{group}=")}


def is_entry(kind: str, name: str) -> bool:
    """Return whether ``name`` is an entry of one ``kind`` of any wing, present or not."""
    return any(name in getattr(wing, kind) for wing in WINGS.values())


def missing(kind: str, name: str) -> str | None:
    """Return where ``name`` would be if it belongs to a wing that is not present; otherwise None."""
    titles = [title for title, wing in WINGS.items() if title not in present() and name in getattr(wing, kind, ())]
    return _missing_text(titles[0], name) if titles else None


def require_wing(title: str, name: str) -> None:
    """Raise ConfigError if ``name`` needs the wing ``title`` and it is not present."""
    if title not in present():
        raise ConfigError(_missing_text(title, name))


def _missing_text(title: str, name: str) -> str:
    folders = " and ".join(f"rlinf/{folder}" for folder in WINGS[title].folders)
    return f"'{name}' belongs to the wing '{title}' in {folders}, which is missing here. Install the complete package"
