"""Overrides of a Trainer's ``training_step`` that only run the library's step within contexts.

The step itself is never called here, since clients have their own loop. Such an override can still be followed: the
loss is computed within its contexts. The override's code shows whether it has this form.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Contexts = Callable[[], AbstractContextManager[Any]]


def contexts_of(trainer: Any, name: str) -> Contexts | None:
    """A function that enters the contexts of all overrides of the method ``name``; None if an override does something
    else.
    """
    found: list[tuple[Any, Any]] = []  # (compiled expression, its globals), the outermost first
    for kind in type(trainer).__mro__:
        method = vars(kind).get(name)
        if method is None:
            continue
        if kind.__module__ == "transformers.trainer":
            return lambda: _enter(found, trainer)
        expressions = _expressions(method, name)
        if expressions is None:
            return None
        found += [(expression, method.__globals__) for expression in expressions]
    return None


def _enter(expressions: list[tuple[Any, Any]], trainer: Any) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for expression, names in expressions:
        stack.enter_context(eval(expression, names, {"self": trainer}))  # noqa: S307 - the user's own code, as it stands
    return stack


def _expressions(method: Any, name: str) -> list[Any] | None:
    """The contexts of ``with A, B: return super().name(...the same arguments...)``, compiled; None for other code."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(parsed, ast.FunctionDef) or parsed.decorator_list or method.__code__.co_freevars not in _FREE:
        return None
    arguments, found = parsed.args, []
    if not arguments.args or arguments.args[0].arg != "self":
        return None
    body = parsed.body[1:] if ast.get_docstring(parsed) is not None else parsed.body
    while len(body) == 1 and isinstance(body[0], ast.With):
        for item in body[0].items:
            names = {node.id for node in ast.walk(item.context_expr) if isinstance(node, ast.Name)}
            if item.optional_vars is not None or names & _parameters(arguments):
                return None  # the context depends on the batch
            found.append(compile(ast.Expression(item.context_expr), "<contexts>", "eval"))
        body = body[0].body
    return found if len(body) == 1 and _passes_on(body[0], name, arguments) else None


_FREE = ((), ("__class__",))  # free variables of a method that only calls super()


def _parameters(arguments: ast.arguments) -> set[str]:
    others = [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in [*arguments.args[1:], *arguments.kwonlyargs]} | set(others)


def _passes_on(statement: ast.stmt, name: str, arguments: ast.arguments) -> bool:
    """Whether it is ``return super().name(...)`` with the method's own arguments in their places."""
    call = statement.value if isinstance(statement, ast.Return) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != f"super().{name}":
        return False
    given = [ast.unparse(x) for x in call.args] + [
        f"**{ast.unparse(k.value)}" if k.arg is None else f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords
    ]
    plain = [a.arg for a in [*arguments.args[1:], *arguments.kwonlyargs]]
    starred = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    starred += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return len(given) == len(plain) + len(starred) and all(
        one in (name_, f"{name_}={name_}") for one, name_ in zip(given, [*plain, *starred], strict=True)
    )
