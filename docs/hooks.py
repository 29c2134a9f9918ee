"""MkDocs hooks: add README as the first page of the site, and adapt links to files outside of docs/."""

import re
from pathlib import PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_SOURCES = "https://github.com/ballast-serve/ballast/blob/main/"
_LINK = re.compile(r"(\]\(|src=\")([^)#\s\"]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = PurePosixPath(config.docs_dir).parent
    with open(root / "README.md", encoding="utf-8") as readme:
        text = _LINK.sub(lambda link: link[1] + _from_root(link[2]), readme.read())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link files outside of docs/, such as `../benchmarks/x.md`, to the repository, as they are not on the site."""
    return _LINK.sub(lambda link: link[1] + re.sub(r"^\.\./", _SOURCES, link[2]), markdown)


def _from_root(target: str) -> str:
    if "://" in target:
        return target
    inside = target.removeprefix("docs/")
    return inside if inside != target else _SOURCES + target
