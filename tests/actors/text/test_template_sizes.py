"""What one operation of a chat template builds is bounded before it is built."""

from __future__ import annotations

import tracemalloc

import pytest

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.template_sizes import BUILT_MAX
from protocol.errors import BadRequest, StartFailed
from protocol.messages.text import Rendering, Role, Turn
from tests.rig.templates import PLAIN

HELLO = [Turn(Role.USER, "Hello", param="messages[0]")]
MANY = 30_000_000


def template(expression: str) -> ConversationTemplate:
    source = f"{{% if n %}}{{{{ {expression} }}}}{{% endif %}}{PLAIN}"
    return ConversationTemplate.learned(compile_template(source, str), source, {})


@pytest.mark.parametrize(
    "expression",
    [
        "'<X>' * n",
        "n * '<X>'",
        "([0] * n)|length",
        "messages * n",
        "10 ** n",
        "'%*d' % (n, 1)",
        "'%*d'|format(n, 1)",
        "('%' ~ n ~ 'd') % 1",
        "'{:>{}}'.format(1, n)",
        "'{a:>{b}}'.format_map({'a': 1, 'b': n})",
        "('{:>' ~ n ~ '}').format(1)",
        "'x'.center(n)",
        "'x'.ljust(n)",
        "'x'.zfill(n)",
        "'\t'.expandtabs(n)",
        "'x'|center(n)",
        "'x\ny'|indent(n)",
        "'x\ny'|indent(width=n)",
        "[1]|tojson(indent=n)",
        "[1]|batch(n, 0)|list",
        "[1]|slice(n)|list",
        "range(n)|list",
    ],
)
def test_a_clients_number_takes_no_memory(expression: str) -> None:
    model = template(expression)
    assert model.render(HELLO, Rendering({"n": 3}))
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="refuses this conversation") as caught:
            model.render(HELLO, Rendering({"n": MANY}))
        assert tracemalloc.get_traced_memory()[1] < MANY / 10
    finally:
        tracemalloc.stop()
    assert caught.value.param == "chat_template_kwargs.n"


def test_many_operations_are_bounded_together() -> None:
    model = template("1 }}{% for i in range(99999) %}{% set x = 'x' * n %}{% endfor %}{{ 1")
    with pytest.raises(BadRequest, match="it takes more than"):
        model.render(HELLO, Rendering({"n": BUILT_MAX}))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("'ab' * n", "ababab"),
        ("7 % n", "1"),
        ("10 ** n", "1000"),
        ("2.0 * n", "6.0"),
        ("'%s-%05d' % ('a', n)", "a-00003"),
        ("'{}{:02}'.format('a', n)", "a03"),
        ("'{x}'.format(x=n)", "3"),
        ("'{x}'.format_map({'x': n})", "3"),
        ("'a\nb'|indent(n)", "a\n   b"),
        ("[1]|tojson(indent=n)", "[\n   1\n]"),
    ],
)
def test_what_is_small_is_built(expression: str, value: str) -> None:
    assert template(expression).render(HELLO, Rendering({"n": 3})).startswith(f"{value}<|im_start|>")


def test_a_template_that_builds_too_much_is_refused_when_it_is_loaded() -> None:
    for expression in ("'x' * 10**9", "'x'|center(1000000000)", "'x' * 1000000000"):
        source = f"{{{{ {expression} }}}}{PLAIN}"
        with pytest.raises(StartFailed, match=r"for more than 1000000|builds more than 1000000"):
            ConversationTemplate.learned(compile_template(source, str), source, {})
