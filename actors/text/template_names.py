"""The names of the variables that a chat template reads from outside, found in its syntax tree."""

from __future__ import annotations

from collections.abc import Iterable

import jinja2
import jinja2.meta
import jinja2.nodes
from attrs import Factory, define

# What the body of a loop, a macro or a block finds without asking for it.
_BUILT_IN = frozenset({"loop", "caller", "varargs", "kwargs", "self", "super"})


def variables_read(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Return the variables that a template reads before it sets them itself, without the environment's own.

    Templates set variables in branches, and read them outside: such a variable looks undeclared, but a value from
    outside would never be seen. So what counts is the first occurrence: `enable_thinking is defined` reads it.
    """
    syntax = environment.parse(source)
    undeclared = jinja2.meta.find_undeclared_variables(syntax)
    occurrences = _Occurrences()
    occurrences.visit(syntax)
    occurrences.visit_macros()
    return frozenset(undeclared & occurrences.read - environment.globals.keys() - _BUILT_IN)


def keys_read(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Return the keys and attributes that a template reads of any object."""
    keys: set[str] = set()
    for node in environment.parse(source).find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Const)):
        if isinstance(node, jinja2.nodes.Getattr):
            keys.add(node.attr)
        elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
            keys.add(node.value)  # also an argument of `get`, and `"key" in message`
    return frozenset(keys)


@define(eq=False)
class _Occurrences:
    """The names in a template: those that are read before they are set, in the order of execution."""

    read: set[str] = Factory(set)
    _set: set[str] = Factory(set)
    _macros: list[jinja2.nodes.Macro] = Factory(list)

    def visit(self, node: jinja2.nodes.Node) -> None:
        if isinstance(node, jinja2.nodes.Name):
            if node.ctx != "load":
                self._set.add(node.name)
            elif node.name not in self._set:
                self.read.add(node.name)
        elif isinstance(node, jinja2.nodes.Macro):
            self._set.add(node.name)
            self._macros.append(node)
        else:
            self._visit_all(_children(node))

    def visit_macros(self) -> None:
        """Visit the bodies of macros, which run when they are called: most variables are set then."""
        before = self._set
        while self._macros:
            macro = self._macros.pop()
            self._set = {*before}
            self._visit_all([*macro.args, *macro.defaults, *macro.body])

    def _visit_all(self, nodes: Iterable[jinja2.nodes.Node]) -> None:
        for node in nodes:
            self.visit(node)


def _children(node: jinja2.nodes.Node) -> Iterable[jinja2.nodes.Node]:
    """Return the parts of a node in the order of their execution: a value before the name of its variable."""
    if isinstance(node, jinja2.nodes.Assign):
        return (node.node, node.target)
    if isinstance(node, jinja2.nodes.AssignBlock):
        return (*node.body, *([node.filter] if node.filter else []), node.target)
    if isinstance(node, jinja2.nodes.For):
        return (node.iter, node.target, *([node.test] if node.test else []), *node.body, *node.else_)
    return node.iter_child_nodes()
