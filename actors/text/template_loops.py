"""An optimisation of chat templates: a loop ends where its remaining iterations would do nothing.

Jinja has no `break`, so templates look for a message with a loop over all of them, in which everything stands under
`{% if not found %}`. Done for each message, that is quadratic in their number. Such a loop is left at the first
iteration in which the condition has no effect, if it does not depend on the iteration: then it has none later, either.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import nodes

_INVARIANT = (
    nodes.Name,
    nodes.Const,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Not,
    nodes.And,
    nodes.Or,
    nodes.Compare,
    nodes.Operand,
)


def end_idle_loops(template: nodes.Template) -> nodes.Template:
    """Return the template, in which each loop is left as soon as nothing can happen in it any more."""
    for loop in template.find_all(nodes.For):
        body = _effective(loop.body)
        if len(body) != 1 or not isinstance(body[0], nodes.If) or loop.else_ or loop.recursive:
            continue
        condition, targets = body[0], [loop.target, *loop.target.find_all(nodes.Name)]
        changing = {"loop"} | {target.name for target in targets if isinstance(target, nodes.Name)}
        if not _is_invariant(condition.test, changing):
            continue
        if not condition.elif_ and not _effective(condition.else_):
            condition.else_ = [nodes.Break(lineno=condition.lineno)]
        elif not _effective(condition.body):
            condition.body = [nodes.Break(lineno=condition.lineno)]
    return template


def _effective(body: Sequence[nodes.Node]) -> list[nodes.Node]:
    """Return the nodes of a body without those that output nothing."""
    return [node for node in body if not (isinstance(node, nodes.Output) and not any(map(_outputs, node.nodes)))]


def _outputs(node: nodes.Expr) -> bool:
    return not isinstance(node, nodes.TemplateData) or bool(node.data)


def _is_invariant(test: nodes.Node, changing: set[str]) -> bool:
    """Return whether a test has the same value in each iteration, as long as nothing happens in them."""
    for node in [test, *test.find_all(nodes.Node)]:
        if not isinstance(node, _INVARIANT) or (isinstance(node, nodes.Name) and node.name in changing):
            return False
    return True
