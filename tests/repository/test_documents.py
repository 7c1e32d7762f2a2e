"""The documents agree with the files: links and paths lead somewhere, and each index names every page."""

import re
import subprocess
import tomllib
from pathlib import Path

import attrs

from protocol.dialects.responses import CancelResponse, Create
from supervisor.config.keyfile import KeySection
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.http.routes import ROUTES
from tests.repository.sources import ROOT, refuse

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\s]+)`")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
REMOTE = re.compile(r"mailto:|.*://")
PATH = re.compile(r"(?:actors|bench|docs|examples|news|protocol|requirements|supervisor|tests)/[\w./-]+")
PLACEHOLDER = re.compile(r"\b(?:NAME|KIND|ROOM|FILE)\b|test_[A-Z]+")
FORMER = {"CHANGELOG.md"}  # it may name files that are gone


LISTED = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
PAGES = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", (ROOT / page).read_text())


def anchor(heading: str) -> str:
    """Return the anchor that a heading has where the page is shown."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def fault(page: str, target: str) -> str:
    """Return what is wrong with a local link of a page, or nothing."""
    name, _, fragment = target.partition("#")
    path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
    if not path.is_relative_to(ROOT) or not path.exists():
        return "leads to no file of the repository"
    headings = HEADING.findall(prose(str(path.relative_to(ROOT)))) if fragment else ()
    return "" if fragment in {"", *map(anchor, headings)} else "leads to no heading"


def test_a_local_link_leads_to_a_file_and_its_anchor_to_a_heading() -> None:
    links = [(page, target) for page in PAGES for target in LINK.findall(prose(page)) if not REMOTE.match(target)]
    refuse(f"{page}: {target} {why}" for page, target in links if (why := fault(page, target)))


def test_a_path_that_a_page_names_exists() -> None:
    named = {(page, word.split("::")[0]) for page in {*PAGES} - FORMER for word in CODE.findall(prose(page))}
    paths = [(page, name) for page, name in named if PATH.fullmatch(name) and not PLACEHOLDER.search(name)]
    refuse(f"{page}: there is no {name}" for page, name in paths if not (ROOT / name).exists())


PASSING = {"README.md", "plan.md"}  # the plan is there for a while alone


def test_an_index_names_every_page_of_its_folder() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "decisions"):
        listed = {target.partition("#")[0] for target in LINK.findall((folder / "README.md").read_text())}
        pages = {path.name for path in folder.glob("*.md")} - PASSING - listed
        refuse(f"{folder}/README.md does not name {page}" for page in pages)


def test_the_navigation_of_the_site_names_every_page_of_docs() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - PASSING
    assert not [name for name in sorted(pages) if f": {name}\n" not in navigation]


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("0*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_news_fragment_is_of_a_type_that_a_release_collects() -> None:
    types = {
        each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    for path in (ROOT / "news").glob("*.md"):
        assert path.name == "README.md" or path.name.split(".")[1] in types, path.name


def test_the_cluster_of_the_front_page_is_right(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "cluster.toml").write_text(text)
    (tmp_path / "cluster.secret").write_text("a secret of the nodes")
    (tmp_path / "tiny").symlink_to(ROOT / "examples" / "tiny")
    assert list(read_cluster(tmp_path / "cluster.toml").engine) == ["tiny-0"]


# Configuration and API -----------------------------------------------------------------------


def test_the_example_of_a_client_key_has_every_key_of_its_section() -> None:
    example = (ROOT / "docs" / "access.md").read_text()
    keys = [field.name for field in attrs.fields(KeySection)]
    refuse(f"docs/access.md: no `{key}`" for key in keys if not re.search(rf"^{key} = ", example, re.MULTILINE))


def test_the_page_of_the_api_names_the_path_of_every_route() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [path for path in (route.operation.path for route in ROUTES.routes) if f" {path}`" not in page]
    assert not missing, "add them to the table of endpoints of docs/api.md"


def test_the_page_of_the_api_names_every_field_of_a_request() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    bodies = [body for body in (route.operation.request for route in ROUTES.routes) if body is not None]
    fields = {field.name for body in (*bodies, Create, CancelResponse) for field in attrs.fields(body)} - {"type"}
    missing = [name for name in sorted(fields) if not re.search(rf"`{name}\b", page)]
    assert not missing, "add them to docs/api.md"
