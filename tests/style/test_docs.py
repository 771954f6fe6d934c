"""The documentation is true: generated pages, links, commands, printed errors, code excerpts, status rows."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from rlinf.cli import COMMANDS, main
from rlinf.cli.play import PlayConfig
from rlinf.cli.run import DistilConfig, ExportConfig
from rlinf.commands.hydra_app import parse
from rlinf.commands.serve import ServeConfig
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.config.search import experiment_names
from rlinf.data.hdf5 import ConvertConfig
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.options import from_mapping, public_fields
from rlinf.recipes.launch_worker import find_script
from rlinf.recipes.load import load_recipe, with_overrides
from rlinf.recipes.questions import QuestionsConfig
from rlinf.robot.classifier import ClassifierConfig
from rlinf.robot.config import DemonstrationConfig, RobotConfig

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
]
REQUIREMENTS = ROOT.parent / "shared" / "requirements.md"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def load_generator():
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date_and_links_are_whole():
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr


def test_reference_has_every_key_once():
    from rlinf.options import to_mapping

    text = load_generator().configuration_page()

    def keys(mapping, path=""):
        for name, value in mapping.items():
            nested = isinstance(value, dict) and value
            yield from keys(value, f"{path}{name}.") if nested else [f"{path}{name}"]

    missing = [
        key
        for key in keys(to_mapping(build_config({})))
        if not re.search(rf"(^\| |[ \n])`{re.escape(key)}`\s(\||\()", text)
    ]
    assert missing == []
    generator = load_generator()
    pages = generator.configuration_page() + generator.recipe_page()
    assert [key for key in generator.expert_keys() if f"`{key}` (" not in re.sub(r"\n", " ", pages)] == [], (
        "keys that do not exist"
    )


@pytest.mark.parametrize(
    ("page", "kind"),
    [("docs/serving.md", ServeConfig), ("docs/robot.md", RobotConfig), ("docs/robot.md", ClassifierConfig)],
)
def test_the_page_of_a_command_has_every_key_of_its_own(page, kind):
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text_of(page), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert set(public_fields(kind)) <= keys and "no_such_key" not in keys


def test_broken_links_are_found(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    good = "[good](b.md) [anchor](#the-title) [web](https://example.org)"
    (docs / "a.md").write_text(f"# The Title\n{good}\n```\n[code](x.md)\n```\n")
    (docs / "b.md").write_text("# B\n[bad](c.md) [worse](a.md#no-such-heading)\n")
    (tmp_path / "README.md").write_text("[good](docs/a.md) [bad](docs/d.md)\n")
    broken = ["docs/b.md: c.md", "docs/b.md: a.md#no-such-heading", "README.md: docs/d.md"]
    assert load_generator().broken_links(docs) == broken


def test_every_page_is_reachable_from_the_readme():
    linked, queue = set(), [README]
    while queue:
        page = queue.pop()
        linked.add(page)
        targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        queue += {(page.parent / target).resolve() for target in targets if ":" not in target} - linked
    assert [page.name for page in PAGES if page not in linked] == []


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


def shell_lines(text: str) -> list[str]:
    """Command lines of the ``bash`` blocks: continuations joined, comments and empty lines left out."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [stripped for line in lines if (stripped := re.sub(r"(^|\s)#.*", "", line).strip())]


OWN_KEYS = {
    "classifier": ClassifierConfig, "collect": DemonstrationConfig, "convert": ConvertConfig, "distil": DistilConfig, "export": ExportConfig, "play": PlayConfig, "robot": RobotConfig, "serve": ServeConfig,
}  # fmt: skip
SCRIPTS = {"examples/embodiment/train.py": "train", "examples/embodiment/evaluate.py": "evaluate"}
ELSEWHERE = ("resume", "init_from", "checkpoint", "model.model_path")
"""Keys with folders of the reader's; only that the key exists can be checked."""


def check_command(line: str) -> None:
    """Assert that a command line names things that exist, and that its overrides compose."""
    words = shlex.split(line)
    if words[0] in ("torchrun", "srun"):
        words = words[words.index("rlinf") :]
    if words[0] == "python" and words[1] in SCRIPTS:
        words[:2] = ["rlinf", SCRIPTS[words[1]]]
    if words[0] in ("bash", "python"):
        assert os.access(ROOT / words[1], os.X_OK if words[0] == "bash" else os.R_OK), line
    elif words[0] != "export":
        assert words[0] == "rlinf" and words[1] in COMMANDS, line
        check_arguments(words[1], words[2:])


def check_arguments(command: str, words: list[str]) -> None:
    if "--config-dir" in words or any(word.startswith("plugins=[path/to/") for word in words):
        return  # The user's own files: the guides that make them have tests of their own.
    typed = [word for word in words if "<" not in word]
    if command in ("report", "why", "check-policy"):
        assert words and all("=" not in word or word.startswith("output=") for word in words)
    elif command == "launch":
        load_recipe(typed.pop(typed.index("--config") + 1), [word for word in typed if "=" in word])
        for word in typed:
            if "=" not in word and not word.startswith("--"):
                find_script(word)
    elif any(word.startswith("questions=") for word in words):
        from_mapping(QuestionsConfig, with_overrides({}, typed))
    else:
        own = public_fields(OWN_KEYS[command]) if command in OWN_KEYS else ()
        kept = [word for word in words[words[:1] == ["<folder>"] :] if word.partition("=")[0] not in own]
        if command in ("convert", "export"):
            assert kept == []
            return
        kept = [word for word in kept if word.partition("=")[0] not in ELSEWHERE]
        assert not any("<" in word for word in kept)
        args = parse(kept)
        if not args.multirun:
            build_config(compose_config(args.overrides, args.config_dir, args.config_name))
        named = {word.removeprefix("experiment=") for word in kept if word.startswith("experiment=")}
        assert named <= set(experiment_names())


COMMAND_LINES = {line: page.name for page in PAGES for line in shell_lines(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("line", COMMAND_LINES, ids=[f"{page}: {line[:60]}" for line, page in COMMAND_LINES.items()])
def test_commands_name_what_exists_and_compose(line):
    check_command(line)


def translated_commands(page: str) -> list[str]:
    """Return the commands in the second column of a page's tables; overrides are appended to the command above them."""
    commands, base = [], "no command above"
    for row in re.findall(r"^\|.*\|$", page, re.MULTILINE):
        for code in re.findall(r"`(.+?)`", row.split("|")[2]):
            base = code if code.startswith("rlinf ") else base
            commands.append(code if code == base else f"{base} {code}")
    return commands


def check_translated(line: str) -> None:
    """Assert that a command composes, and that a robot experiment's parts fit together once a checkpoint is named."""
    from rlinf.preflight.validation import validate  # imports torch

    check_command(line)
    if "model.model_path=<folder>" in line:
        command, *words = shlex.split(line.replace("<folder>", "organisation/model"))[1:]
        validate(build_config(compose_config(words)), command)


@pytest.mark.parametrize("line", translated_commands(text_of("docs/coming_from.md")))
def test_commands_for_users_of_other_projects_compose_and_are_valid(line):
    try:
        check_translated(line)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))


def test_a_wrong_translation_is_found():
    table = "| a | rlinf |\n|---|---|\n| `n` | `rlinf train experiment=quickstart` |\n| `m` | `seed=1 no.key=2` or `seed=x` |\n"
    good, *wrong = translated_commands(table)
    assert good == "rlinf train experiment=quickstart" and wrong == [f"{good} seed=1 no.key=2", f"{good} seed=x"]
    for line in wrong:
        with pytest.raises(ConfigError):
            check_translated(line)
    unequal = "rlinf train experiment=quickstart_grpo model.model_path=<folder> rollout.num_envs=9"
    with pytest.raises(ConfigError, match="rollout.num_envs=9"):
        check_translated(unequal)
    with pytest.raises(AssertionError):
        check_translated(*translated_commands("| a | `seed=1` |\n"))


def test_readme_shows_the_main_commands():
    lines = " ".join(shell_lines(text_of("README.md")))
    shown = (
        "scripts/quickstart.sh,scripts/test.sh,examples/embodiment/train.py,rlinf doctor,resume=,rlinf export".split(
            ","
        )
    )
    assert [words for words in shown if words not in lines] == []


@pytest.mark.parametrize(
    "line",
    ["bash scripts/no_such.sh", "python examples/no_such.py", "rlinf tran experiment=quickstart", "rlinf train experiment=nope",
     "rlinf train experiment=quickstart trainer.learning_rte=1", "rlinf export chekpoint=x output=y", "rlinf export resume=x", "rlinf convert sources=x dataset=y", "pip install x",
     "rlinf launch --config nope", "rlinf launch --config mistral-7b-fsdp4-sft train.epochs=2",
     "rlinf launch --config mistral-7b-fsdp4-sft nope.py", "rlinf report", "rlinf why", "rlinf play checkpoint=x episod=3", "rlinf serve checkpoint=x prot=1", "rlinf check env=tabeltop"],
)  # fmt: skip
def test_wrong_commands_are_found(line):
    with pytest.raises((AssertionError, ValueError)):
        check_command(line)


def sessions() -> list[tuple[str, str]]:
    """``(command, what it prints)`` of the ``console`` blocks of the page on errors."""
    text = "".join(blocks(text_of("docs/troubleshooting.md"), "console"))
    return [tuple(part.split("\n", 1)) for part in re.split(r"^\$ ", text, flags=re.MULTILINE) if part]


@pytest.mark.parametrize(("command", "printed"), sessions(), ids=[command for command, _ in sessions()])
def test_errors_are_printed_as_the_page_says(command, printed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 2
    assert capsys.readouterr().err == printed
    assert list(tmp_path.iterdir()) == [], "a rejected command leaves nothing behind"


def test_the_loop_of_the_architecture_page_is_that_of_the_trainer():
    from rlinf.training.rl_trainer import RLTrainer

    (excerpt,) = blocks(text_of("docs/architecture.md"), "python")
    source = [line.strip() for line in inspect.getsource(RLTrainer.iteration).splitlines()]
    position = -1
    for line in excerpt.splitlines():
        assert line.strip() in source[position + 1 :], f"RLTrainer.iteration has no line '{line.strip()}' at this place"
        position = source.index(line.strip(), position + 1)


def test_envs_and_models_know_nothing_of_each_other():
    """Envs lie below models (tests/style/test_layers.py), so only the other direction is left to ask. Losses import torch only."""

    def imports(path: Path) -> list[str]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        found = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        return found + [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]

    for path in (ROOT / "rlinf" / "models").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith("rlinf.envs")], path
    assert {module.partition(".")[0] for module in imports(ROOT / "rlinf" / "algorithms" / "losses.py")} == {"torch"}


def test_every_documented_key_is_read_somewhere():
    """A key that nothing reads would be a promise; declarations, checks and keys with one choice only do not count."""
    from rlinf.algorithms.config import GRPOConfig, PPOConfig
    from rlinf.envs.tabletop.config import TabletopConfig

    paths = [path for path in (ROOT / "rlinf").rglob("*.py") if "config" not in (path.stem, path.parent.name)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)

    def names(cls) -> set[str]:
        found = set()
        for name, field in public_fields(cls).items():
            default = field.default_factory() if callable(field.default_factory) else field.default
            if is_dataclass(default):
                found |= names(type(default))
            elif field.metadata["choices"] is None or len(field.metadata["choices"]) > 1:
                found.add(name)
        return found

    keys = names(RunConfig).union(*(names(cls) for cls in (PPOConfig, GRPOConfig, TabletopConfig)))
    unread = [key for key in sorted(keys | {"no_such_key"}) if not re.search(rf"\.{key}\b(?!\s*=[^=])", code)]
    assert unread == ["no_such_key"], "the only one is the control"


STATUS_ROW = re.compile(r"^\| ((?:S\d|E|X)-\d+) \| (.+?) \| (done|not yet)(: .+)? \|$")


def status_rows(text: str) -> list[tuple[str, str, str, str]]:
    rows = [line for line in text.splitlines() if re.match(r"\| *(?:S\d|E|X)-", line)]
    matches = [STATUS_ROW.match(line) for line in rows]
    assert all(matches), [line for line, match in zip(rows, matches, strict=True) if not match]
    return [match.groups() for match in matches]


def unknown_tests(text: str) -> list[str]:
    """``file::test`` names in quotes or backticks that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in re.findall(r"[`\"](tests/[\w/.]+\.py)::(\w+)[`\"]", text)
        if not (ROOT / file).is_file() or f"\ndef {name}(" not in text_of(file)
    ]


def test_tests_that_the_pages_name_exist():
    pages = [*PAGES, ROOT / "docs" / "status_tests.json"]
    assert [found for page in pages for found in unknown_tests(page.read_text(encoding="utf-8"))] == []
    here = "tests/style/test_docs.py"
    assert unknown_tests(f"`{here}::test_readme_is_short` `{here}::test_no_such`") == [f"{here}::test_no_such"]


def test_every_done_row_names_its_test_or_command():
    rows, shown_by = status_rows(text_of("docs/status.md")), json.loads(text_of("docs/status_tests.json"))
    assert list(shown_by) == [row[0] for row in rows] and len(shown_by) > 100
    for row_id, _, state, note in rows:
        assert len(note or "") <= 160, f"{row_id}: a note is short; facts belong on the page of the feature"
        proof = re.compile(r"tests/[\w/.]+::\w+|bash scripts/|rlinf |python benchmarks/")
        assert state != "done" or any(map(proof.match, shown_by[row_id])), row_id


def test_status_has_the_rows_of_the_requirements():
    if not REQUIREMENTS.is_file():
        pytest.skip("the requirements document does not lie next to the project")
    wanted = re.findall(r"^\| *((?:S\d|E|X)-\d+) *\|", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[0] for row in status_rows(text_of("docs/status.md"))] == wanted


PRESCRIBED = {
    "rlinf.algorithms": ("register_algorithm",),
    "rlinf.distributed": ("BatchedDataDict",),
    "rlinf.models": ("get_model", "get_model_config_and_processor", "register_model", "HuggingFacePolicy"),
    "rlinf.models.embodiment.modules.value_head": ("ValueHead",),
    "rlinf.models.embodiment.your_model_action_model": (),
    "rlinf.models.generation": ("HuggingFaceGeneration", "VllmGeneration"),
    "rlinf.models.generation.interfaces": ("GenerationInterface",),
    "rlinf.models.interfaces": ("PolicyInterface",),
    "rlinf.models.validation": ("validate_log_probability_consistency",),
}
"""Import paths of S3-1, S3-7, S3-8 and S5-33, which users have in their code: a module in this list keeps its place."""


def test_prescribed_import_paths_keep_their_place():
    for name, attributes in PRESCRIBED.items():
        module = importlib.import_module(name)
        assert [attribute for attribute in attributes if not hasattr(module, attribute)] == [], name
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rlinf.models.embodiment.modules.no_value_head")
