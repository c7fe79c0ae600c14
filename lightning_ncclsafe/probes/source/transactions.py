"""Where a function changes an SQLite database and returns before the transaction ends, so that it stays locked.

What ends a transaction is found by the names of functions. In doubt nothing is found.
"""

import ast
import re
from collections.abc import Collection, Iterable

from lightning_ncclsafe.probes.source.assignments import assignments_of
from lightning_ncclsafe.probes.source.scopes import Scope, scopes_of
from lightning_ncclsafe.probes.source.syntax import argument_of, last_line, name_of, source_text

# Not executescript, which begins no transaction by itself.
_EXECUTE = ("execute", "executemany")
_CHANGE = re.compile(
    r"\s*(?:(?:INSERT|REPLACE)\s.*\bINTO\b|DELETE\s+FROM\b|UPDATE\s.*\bSET\b)", re.IGNORECASE | re.DOTALL
)
# Without one of these, BEGIN locks nothing; the first change does.
_BEGIN = re.compile(r"\s*BEGIN\s+(?:IMMEDIATE|EXCLUSIVE)\b", re.IGNORECASE)
_END = re.compile(r"\s*(?:COMMIT|END|ROLLBACK)\b", re.IGNORECASE)
_ENDING = ("commit", "rollback", "close")
_AUTOMATIC = ("isolation_level", "autocommit")
# isolation_level among the arguments of sqlite3.connect.
_POSITION = 3
_MOST_FILES, _MOST_CALLERS = 16, 3


def runs_sql(scope: Scope, line: int) -> bool:
    """Whether a line of a function has a database do something."""
    calls = scope.calls((*_EXECUTE, "commit"))
    return any(call.lineno <= line <= last_line(call) for call in calls)


def left_open_at(files: Iterable[str], entered: Collection[tuple[str, str]]) -> str:
    """The first change in the only function that leaves the transaction to others: ``"file:line in open_run"``.

    Left out are functions with decorators, and changes in a ``with`` block, either of which may end it; and functions
    that are called in such a block, or by one that ends it. Empty if there are several functions or databases, or if
    each change is committed by itself.

    Args:
        files: The user's source files.
        entered: File and name of functions to leave out.
    """
    texts = {file: source_text(file) for file in files}
    with_sql = [file for file, text in texts.items() if "sqlite3" in text or "execute" in text or "commit(" in text]
    if len(with_sql) > _MOST_FILES:
        return ""
    scopes = [scope for file in with_sql for scope in scopes_of(file)]
    connecting = [call for scope in scopes for call in scope.calls(["connect"]) if not _is_of_object(call.func)]
    if len(connecting) != 1 or "sqlite3" not in "".join(texts[file] for file in with_sql):
        return ""
    is_automatic = _is_automatic(connecting[0], texts.values())
    opening = {scope: line for scope in scopes if scope.is_function and (line := _opens(scope, is_automatic))}
    left = {scope: line for scope, line in opening.items() if not _is_ended(scope, texts)}
    known = [scope.place(line) for scope, line in left.items() if (scope.file, scope.name) not in entered]
    return known[0] if len(known) == 1 else ""


def _is_of_object(function: ast.expr) -> bool:
    """Whether it is a method of what an attribute or a call gives, and not the function of a module."""
    owner = function.value if isinstance(function, ast.Attribute) else None
    return owner is not None and (not isinstance(owner, ast.Name) or owner.id == "self")


def _is_automatic(connect: ast.Call, sources: Iterable[str]) -> bool:
    """Whether a database may commit each change by itself, unless there is a BEGIN; by any text that may set that."""
    given = argument_of(connect, _AUTOMATIC[0], position=_POSITION)
    is_plain = given is None and not any(one.arg in (*_AUTOMATIC, None) for one in connect.keywords)
    is_set = any(f".{name} =" in source for source in sources for name in _AUTOMATIC)
    return is_set or not (is_plain or (isinstance(given, ast.Constant) and isinstance(given.value, str)))


def _opens(scope: Scope, is_automatic: bool) -> int:
    """The line of the first statement by which a function has locked a database when it returns; 0 if there is none."""
    blocks = [(one.lineno, last_line(one)) for one in scope.each(ast.With)]
    for call in scope.calls(_EXECUTE):
        text = _text(argument_of(call, "sql", position=0), scope)
        locks = _BEGIN.match(text) or (not is_automatic and _CHANGE.match(text))
        if locks and not any(first <= call.lineno <= last for first, last in blocks):
            return call.lineno
    return 0


def _is_ended(scope: Scope, texts: dict[str, str]) -> bool:
    """Whether something may end the transaction: the function, what it calls, its decorators, or its callers."""
    names, seen = [scope.name], set[str]()
    is_decorated = texts[scope.file].split("\n")[scope.line - 1].lstrip().startswith("@")
    if scope.name.startswith("__") or is_decorated or _ends(scope, _called(scope, texts)):
        return True
    for _ in range(_MOST_CALLERS):
        seen.update(names)
        callers = [(one, call) for one in _naming(names, texts) for call in one.calls(names)]
        if any(_is_in_block(one, call.lineno) or _ends(one, _called(one, texts)) for one, call in callers):
            return True
        names = [one.name for one, _ in callers if one.is_function and one.name not in seen]
    return False


def _naming(names: Collection[str], texts: dict[str, str]) -> list[Scope]:
    """The functions in files whose text has a call of one of these; none if these are too many to be read."""
    files = [file for file, text in texts.items() if any(f"{name}(" in text for name in names)]
    return [scope for file in files[:_MOST_FILES] for scope in scopes_of(file)]


def _called(scope: Scope, texts: dict[str, str]) -> list[Scope]:
    """The user's functions with the names of those that a function calls."""
    names = {name_of(call.func) for call in scope.each(ast.Call)} - {"", scope.name}
    files = [file for file, text in texts.items() if any(f"def {name}(" in text for name in names)]
    every = (one for file in files[:_MOST_FILES] for one in scopes_of(file))
    return [one for one in every if one.name in names]


def _is_in_block(scope: Scope, line: int) -> bool:
    return any(one.lineno <= line <= last_line(one) for one in scope.each(ast.With))


def _ends(scope: Scope, called: Iterable[Scope] = ()) -> bool:
    return any(_ends_itself(one) for one in (scope, *called))


def _ends_itself(scope: Scope) -> bool:
    statements = (_text(argument_of(call, "sql", position=0), scope) for call in scope.calls(_EXECUTE))
    return any(True for _ in scope.calls(_ENDING)) or any(map(_END.match, statements))


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
