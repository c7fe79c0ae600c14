"""Where a function changes a database and returns before the transaction ends, so that the database stays locked."""

import ast
from collections.abc import Collection, Iterable, Iterator

from lightning_ncclsafe.probes.source.assignments import assignments_of
from lightning_ncclsafe.probes.source.scopes import Scope, first_places, scopes_of
from lightning_ncclsafe.probes.source.syntax import argument_of, is_constant, last_line, name_of, source_text

_EXECUTE = ("execute", "executemany", "executescript")
_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE")
# Without one of these, BEGIN locks nothing; the first change does.
_AT_ONCE = ("IMMEDIATE", "EXCLUSIVE")
_ENDS, _ENDING = ("COMMIT", "END", "ROLLBACK"), ("commit", "rollback", "close")


def runs_sql(scope: Scope, line: int) -> bool:
    """Whether a line of a function calls a database."""
    calls = scope.calls((*_EXECUTE, *_ENDING))
    return any(call.lineno <= line <= last_line(call) for call in calls)


def left_open_at(files: Iterable[str], entered: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """The first change of each function that leaves the transaction to others: ``"file:line in open_run"``.

    A function is left out if one that calls it ends the transaction, and a change if it is in a ``with`` block, which
    may end it.

    Args:
        files: The user's source files.
        entered: File and name of functions to leave out.
    """
    texts = {file: source_text(file) for file in files}
    scopes = [*_functions(file for file, text in texts.items() if "execute" in text)]
    commits_each = any(map(_commits_each, scopes))
    ending = {scope.name for scope in scopes if _ends(scope)}
    opened = {scope: _opens(scope, commits_each) for scope in scopes if scope.name not in ending}
    left = {scope.name: scope.place(line) for scope, line in opened.items() if line}
    calling = _functions(file for file, text in texts.items() if any(name in text for name in left))
    ended = {name_of(call.func) for scope in calling if _ends(scope, ending) for call in scope.each(ast.Call)}
    known = {scope.name for scope in scopes if (scope.file, scope.name) in entered}
    return first_places(place for name, place in left.items() if name not in ended | known)


def _functions(files: Iterable[str]) -> Iterator[Scope]:
    return (scope for file in files for scope in scopes_of(file) if scope.is_function)


def _commits_each(scope: Scope) -> bool:
    """Whether it opens a database that commits each change by itself, unless there is a BEGIN."""
    given = (one for call in scope.calls(["connect"]) for one in call.keywords)
    return any(
        (one.arg == "isolation_level" and is_constant(one.value, None))
        or (one.arg == "autocommit" and is_constant(one.value, True))
        for one in given
    )


def _ends(scope: Scope, ending: Collection[str] = ()) -> bool:
    is_called = any(True for _ in scope.calls((*_ENDING, *ending)))
    return is_called or any(words[:1] and words[0] in _ENDS for _, words in _sql(scope))


def _opens(scope: Scope, commits_each: bool) -> int:
    """The line of the first statement by which a function has locked a database when it returns; 0 if there is none."""
    blocks = [(one.lineno, last_line(one)) for one in scope.each(ast.With)]
    for call, words in _sql(scope):
        begins = words[:1] == ["BEGIN"] and words[1:2] != [] and words[1].rstrip(";") in _AT_ONCE
        changes = not commits_each and words[:1] != [] and words[0] in _CHANGES
        if (begins or changes) and not any(first <= call.lineno <= last for first, last in blocks):
            return call.lineno
    return 0


def _sql(scope: Scope) -> Iterable[tuple[ast.Call, list[str]]]:
    """The statements that a function executes, with their first words."""
    for call in scope.calls(_EXECUTE):
        text = _text(argument_of(call, "sql", position=0), scope)
        yield call, text.upper().replace(";", " ").split(maxsplit=2)[:2]


def _text(value: ast.expr | None, scope: Scope) -> str:
    """A text in the source, or the beginning of one that is put together; of a variable, the one that it is given."""
    if isinstance(value, ast.Name):
        whole = scope
        while whole.outer is not None:
            whole = whole.outer
        given = [*assignments_of(value.id, scope), *assignments_of(value.id, whole)]
        value = given[0].value if len({id(one.value) for one in given}) == 1 else None
    if isinstance(value, ast.JoinedStr) and value.values:
        value = value.values[0]
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
