"""A hook of MkDocs: the site has every file of the repository that a page links to, and every link leads to it there.

Pages link to each other as files of the repository, so that they can be read there. In the site README.md is the front
page, docs/ is the root, and other files of the repository that are linked to are copied to repository/. A link to a
folder leads to its README.md. Pages that are linked to bring the files that they link to themselves.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
SITE_PATHS = {"README.md": "index.md", "docs/README.md": "index.md"}


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return SITE_PATHS.get(path, path.removeprefix("docs/"))
    return SITE_PATHS.get(path, f"repository/{path}")


def linked(path: str, target: str) -> str:
    """Return the file of the repository that a link in a page leads to; raises `FileNotFoundError`."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if (ROOT / found).is_dir():
        found = posixpath.join(found, "README.md")
    if found.startswith("..") or not (ROOT / found).is_file():
        raise FileNotFoundError(f"{path} links to {target}, which no site can have: link to a file")
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, and the files outside docs/ that are linked to."""
    todo = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith(".md"):
            todo += [linked(path, target) for target in LINK.findall((ROOT / path).read_text())]
        if files.get_file_from_path(site_path(path)) is None:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to the files' places in the site."""
    path = next(path for path in _sources(page.file) if (ROOT / path).exists())
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(linked(path, match[1])), here or ".")

    return LINK.sub(moved, markdown)


def _sources(file: File) -> list[str]:
    if file.src_uri == "index.md":
        return ["README.md"]
    return [f"docs/{file.src_uri}", file.src_uri.removeprefix("repository/")]
