"""The documentation builds as a site: no warning, every page, an API reference, search, and links that lead somewhere."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: bash scripts/setup.sh --dev"
)


def build(project: Path, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=280, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_on_the_site(site):
    docs = ROOT / "docs"
    wanted = {page.relative_to(docs).with_suffix("") for page in docs.rglob("*.md")}
    wanted |= {Path(name) for name in ("index", "contributing", "changelog")}
    assert wanted <= {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}


def test_the_reference_has_the_public_functions_and_the_contracts(site):
    page = (site / "api.html").read_text(encoding="utf-8")
    names = """load_policy make_env train evaluate audit compare Policy.act types.Observation types.EpisodeSpec
        envs.base.VectorEnv.reset models.register_model algorithms.base.Algorithm.compute_advantages"""
    assert [name for name in names.split() if f'id="rlinf.{name}"' not in page] == []


def test_pages_and_docstrings_are_found_by_search(site):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries if "EpisodeSpec" in entry["text"]}
    assert {"api.html", "architecture.html"} <= found


def test_a_broken_link_ends_the_build(tmp_path):
    """On a site of two pages, without the API reference, which takes most of the time of a build."""
    for name in ("scripts", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\nplugins: [search]\nnav: [python.md, metrics.md]\n"
    )
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "metrics.md", tmp_path / "docs")
    page = "# In Python\n[good](metrics.md) [bad](no_such.md) [worse](metrics.md#no-such-heading)\n"
    (tmp_path / "docs" / "python.md").write_text(page)
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "Doc file 'python.md'" in line]
    assert len(lines) == 2 and "no_such.md" in lines[0] + lines[1] and "no-such-heading" in lines[0] + lines[1], (
        result.stderr
    )


@pytest.mark.parametrize(
    ("page", "markdown", "on_site"),
    [
        ("index.md", "[a](docs/results.md#grpo) ![b](docs/images/c.png)", "[a](results.md#grpo) ![b](images/c.png)"),
        ("results.md", "[a](../README.md) [b](metrics.md) [c](#d)", "[a](index.md) [b](metrics.md) [c](#d)"),
        ("results.md", "[`a.py`](../rlinf/a.py), [b](https://c.org)", "[`a.py`](R/blob/main/rlinf/a.py), [b](https://c.org)"),
        ("guides/a.md", "[b](../results.md) [c](../../README.md)", "[b](../results.md) [c](../index.md)"),
        ("results.md", "`[a](../b.md)`\n```\n[a](../b.md)\n```\n", "`[a](../b.md)`\n```\n[a](../b.md)\n```\n"),
    ],
)  # fmt: skip
def test_links_of_the_project_become_links_of_the_site(page, markdown, on_site):
    hooks = load_hooks()
    assert hooks.LINK.sub(lambda found: hooks.site_link(found, page, "R/"), markdown) == on_site


def test_without_a_repository_a_link_to_code_becomes_text():
    hooks = load_hooks()
    links = "[`a.py`](../rlinf/a.py), [b](python.md)"
    assert hooks.LINK.sub(lambda found: hooks.site_link(found, "results.md", None), links) == "`a.py`, [b](python.md)"


def load_hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
