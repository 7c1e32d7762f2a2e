"""The page of the configuration is made from the schema: `python tests/repository/test_configuration_page.py` writes it.

A key is a field of a class. Its sentence is the comment beside the field, or the lines of comment right above it, and
stands nowhere else; type, limits and default are read from the class.
"""

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import attrs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
sys.path.insert(0, str(ROOT))

from protocol.strict.checks import Matches, OneOf, Within  # noqa: E402
from supervisor.config.keyfile import KeySection  # noqa: E402
from supervisor.config.limits import Seconds  # noqa: E402
from supervisor.config.schema import EngineSection, Tables  # noqa: E402
from supervisor.engines.kinds import KINDS  # noqa: E402
from supervisor.links.endpoint import Endpoint  # noqa: E402

Table: TypeAlias = tuple[str, type, list[str]]  # its heading, its class, and its keys
ORDER = ("node", "cluster", "gateway", "tracing", "model", "pool", "engine")
UNITS = (("_s", "seconds"), ("_s_max", "seconds"), ("_ms", "milliseconds"))
SIMPLE = {bool: "`true` or `false`", str: "text", Endpoint: "`HOST:PORT`"}
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
FACTORY: type = type(attrs.Factory(dict))
UNBOUNDED = 10**9  # an upper limit from here on is not worth a reader's time
SECONDS = next(rule for rule in get_args(Seconds) if isinstance(rule, Within))


def fields(cls: type) -> dict[str, Any]:
    """Return the fields of a section by name."""
    return {field.name: field for field in attrs.fields(cls)}


def inner(hint: Any) -> type | None:
    """Return the class of the table that a field holds, None if it holds a value."""
    found = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and attrs.has(each)]
    return found[0] if found and found[0] is not Endpoint else None


def tables() -> Iterator[Table]:
    """Yield every table of `cluster.toml` and of the file of keys, in the order of the page."""
    assert sorted(ORDER) == sorted(fields(Tables))
    hints = get_type_hints(Tables)
    for name in ORDER:
        is_named = get_origin(hints[name]) is dict
        yield from below(f"{name}.NAME" if is_named else name, get_args(hints[name])[1] if is_named else hints[name])
        for kind, row in KINDS.items() if name == "engine" else ():
            yield from below("engine.NAME", row.section, note=f", `kind = {quoted(kind)}`", known=EngineSection)
    yield from below("key.NAME", KeySection, note=", in the file of keys")


def below(path: str, cls: type, *, note: str = "", known: type | None = None) -> Iterator[Table]:
    """Yield a table and the tables in it, without the keys of a class that it extends and whose keys are known."""
    hints, earlier = get_type_hints(cls), {} if known is None else get_type_hints(known)
    if keys := [name for name in fields(cls) if name not in earlier and inner(hints[name]) is None]:
        yield f"`[{path}]`{note}", cls, keys
    for name in fields(cls):
        table, before = inner(hints[name]), inner(earlier.get(name))
        if table is not None and table is not before:
            yield from below(f"{path}.{name}", table, note=note if before else "", known=before)


def sentences(cls: type) -> dict[str, str]:
    """Return the comment of each field: the lines right above it, or else what stands behind it."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if attrs.has(base)]):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        alone = {
            row: text for (row, column), text in comments.items() if not source.splitlines()[row - 1][:column].strip()
        }
        behind = {row: text for (row, _), text in comments.items() if row not in alone}
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                above = " ".join(alone[row] for row in range(first, node.lineno))
                found[node.target.id] = above or behind.get(node.end_lineno or 0, "")
    return found


def value(name: str, hint: Any) -> str:
    """Return what a key may be, with its unit and its limits."""
    rules: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        rules = tuple(rest)
    if hint in SIMPLE:
        allowed = [names(rule.allowed) for rule in rules if isinstance(rule, OneOf)]
        words = [rule.words for rule in rules if isinstance(rule, Matches)]
        return names(KINDS) if name == "kind" else [*allowed, *words, SIMPLE[hint]][0]
    if hint in {int, float}:
        return number(name, hint, next((rule for rule in rules if isinstance(rule, Within)), None))
    if get_origin(hint) is Literal:
        return names(get_args(hint))
    if get_origin(hint) is tuple:
        return f"list: {value('', get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "table"
    return " or ".join(value(name, each) for each in get_args(hint) if each is not types.NoneType)


def names(allowed: Any) -> str:
    return ", ".join(f'`"{each}"`' for each in allowed)


def number(name: str, hint: type, rule: Within | None) -> str:
    unit = next((unit for ending, unit in UNITS if name.endswith(ending) and not name.endswith("_per_s")), "")
    unit = unit or ("integer" if hint is int else "number")
    if rule is None or (unit == "seconds" and rule == SECONDS):
        return unit
    least = f"above {plain(rule.above)}," if rule.at_least is None else plain(rule.at_least)
    if rule.at_most is None or rule.at_most >= UNBOUNDED:
        return f"{unit} {least.strip(',') if rule.at_least is None else f'from {least}'}"
    return f"{unit}{' ' if rule.at_least is None else ', '}{least} to {plain(rule.at_most)}"


def plain(value: float | None) -> str:
    """Return a number as the file may have it."""
    return f"{value:_}" if isinstance(value, int) else f"{value:_.9f}".rstrip("0").rstrip(".")


def default(field: Any, hint: Any) -> str:
    """Return the value of a key that is left out, as the file would have it; a dash if that is no valid value."""
    left_out = field.default
    if left_out is attrs.NOTHING:
        return "needed"
    if left_out is None or any(isinstance(rule, Within) and rule.mistake(left_out) for rule in get_args(hint)):
        return "-"
    size = next(
        (f" ({left_out // unit} {name})" for name, unit in SIZES if "bytes" in field.name and left_out >= unit), ""
    )
    return f"`{written(left_out)}`{size}"


def written(left_out: object) -> str:
    if isinstance(left_out, bool):
        return str(left_out).lower()
    if isinstance(left_out, int | float):
        return plain(left_out)
    if isinstance(left_out, tuple):
        return f"[{', '.join(map(quoted, left_out))}]"
    return "{}" if isinstance(left_out, FACTORY) else quoted(left_out)


def quoted(value: object) -> str:
    return f'"{value}"'


def rows(cls: type, keys: list[str]) -> Iterator[str]:
    hints, meanings = get_type_hints(cls, include_extras=True), sentences(cls)
    for key in keys:
        if get_origin(hints[key]) is Mapping:
            yield f"| *any other* | text, number, boolean, list or table | - | {meanings[key]} |"
            continue
        yield f"| `{key}` | {value(key, hints[key])} | {default(fields(cls)[key], hints[key])} | {meanings[key]} |"


def page() -> str:
    parts = [HEAD]
    for heading, cls, keys in tables():
        about = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
        about = re.sub(r"^`\[.*?: ", "", about)
        level = "##" if heading.count(".") < 2 else "###"
        head = [
            f"{level} {heading}",
            "",
            about[:1].upper() + about[1:],
            "",
            "| key | value | default | meaning |",
            "|---|---|---|---|",
        ]
        parts.append("\n".join([*head, *rows(cls, keys)]))
    return "\n\n".join(parts) + "\n"


HEAD = """# Configuration

*Made from the schema by `python tests/repository/test_configuration_page.py`; a test holds the two together.*

`python -m supervisor cluster.toml` runs what the file describes. With `--check` it starts nothing: it prints the tree of each node
with every limit, or every mistake in the file and in the files that it names, each with its line.
[examples/quickstart.toml](../examples/quickstart.toml) is the smallest file; [examples/gpu.toml](../examples/gpu.toml) shows a real
model on GPUs.

Every key has a default but for those marked *needed*; a dash is no value. Seconds and other numbers are above 0 where no limit is
given. A file or a folder is a path relative to the file that names it. A key that is none of these stops the start, and `--check`
says what became of a key of an earlier version, or which key is meant by a word of another server (`max_model_len`: `context_max`).
What must fit together across keys is checked, too, and reported with the reason. So is what only a host can show, for the nodes
that the file places on it: the files of models, their own limits of tokens, and the visible GPUs."""


def test_the_page_of_the_configuration_matches_the_schema() -> None:
    assert PAGE.read_text() == page(), "run: python tests/repository/test_configuration_page.py"


def test_every_key_has_its_sentence_beside_it() -> None:
    missing = [f"{heading} {key}" for heading, cls, keys in tables() for key in keys if not sentences(cls)[key]]
    assert not missing, "write what the key means as a comment beside its field"


def test_a_default_keeps_the_limits_of_its_key() -> None:
    broken = []
    for heading, cls, keys in tables():
        hints = get_type_hints(cls, include_extras=True)
        for key in keys:
            left_out = fields(cls)[key].default
            rules = [rule for rule in get_args(hints[key]) if isinstance(rule, Within)]
            broken += [f"{heading} {key}: {left_out}" for rule in rules if rule.mistake(left_out)] if left_out else []
    assert not broken


if __name__ == "__main__":
    PAGE.write_text(page())
