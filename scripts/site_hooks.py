"""What ``mkdocs build`` does to the pages: links that are right on GitHub become right on the site.

The README is the first page of the site, and CONTRIBUTING.md and CHANGELOG.md are pages of it. Other files outside docs/ are
not on the site: with ``repo_url`` in mkdocs.yml a link to one leads there, without it the link becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File at the root of the project to page of the site."""
LINK = re.compile(
    r"^```.*?^```"  # a block of code,
    r"|(!?\[(?:`[^`]*`|\[[^\]]*\]|[^\[\]`])*\])\(([^)\s]+)\)"  # or a link: its text, its target,
    r"|`[^`\n]+`",  # or code in a line
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie at the root of the project."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, those in code left out."""
    return LINK.sub(lambda found: site_link(found, page.file.src_uri, config.repo_url), markdown)


def site_link(found: re.Match, page: str, repo_url: str | None) -> str:
    """Return what stands on the site for a match of ``LINK`` in a page; code stays as it is."""
    text, target = found.groups()
    name, _, anchor = (target or "").partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return found[0]
    source = next((root for root, on_site in PAGES.items() if on_site == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    if path in PAGES or path.startswith("docs/"):
        link = posixpath.relpath(PAGES.get(path, path.removeprefix("docs/")), posixpath.dirname(page) or ".")
        return f"{text}({link}#{anchor})" if anchor else f"{text}({link})"
    return f"{text}({repo_url.rstrip('/')}/blob/main/{path})" if repo_url else text[1:-1]
