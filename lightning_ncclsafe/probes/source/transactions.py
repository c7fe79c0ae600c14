"""Where a function changes an SQLite database and returns before the transaction ends, so that it stays locked.

What ends a transaction is found by the names of functions. In doubt nothing is found.
"""

import ast
import re
from collections.abc import Collection, Iterable, Mapping

from lightning_ncclsafe.probes.source.assignments import assignments_of
from lightning_ncclsafe.probes.source.scopes import Scope, scopes_of
from lightning_ncclsafe.probes.source.syntax import argument_of, is_of_self, last_line, name_of, source_text

# Not executescript, which begins no transaction by itself.
_EXECUTE = ("execute", "executemany")
_CHANGE = re.compile(
    r"\s*(?:(?:INSERT|REPLACE)\s.*\bINTO\b|DELETE\s+FROM\b|UPDATE\s.*\bSET\b)", re.IGNORECASE | re.DOTALL
)
# Without one of these, BEGIN locks nothing; the first change does.
_BEGIN = re.compile(r"\s*BEGIN\s+(?:IMMEDIATE|EXCLUSIVE)\b", re.IGNORECASE)
_END = re.compile(r"\s*(?:COMMIT|END|ROLLBACK)\b", re.IGNORECASE)
# What ends a transaction, or may: called, or handed on to something that calls it.
_ENDING = ("commit", "rollback", "close", "executescript", "enter_context")
_AUTOMATIC = ("isolation_level", "autocommit")
_IS_SET = re.compile(r"\.(?:isolation_level|autocommit)\s*=")
# isolation_level among the arguments of sqlite3.connect.
_POSITION = 3
_MOST_FILES, _MOST_CALLERS, _MOST_CALLED = 16, 3, 3


def runs_sql(scope: Scope, line: int) -> bool:
    """Whether a line of a function has a database do something."""
    calls = scope.calls((*_EXECUTE, "commit"))
    return any(call.lineno <= line <= last_line(call) for call in calls)


def left_open_at(files: Iterable[str], entered: Collection[tuple[str, str]]) -> str:
    """The first change in the only method that leaves the transaction to others: ``"file:line in open_run"``.

    It is of an object's own connection. Left out are methods with decorators, and changes in a ``with`` block, either
    of which may end it; methods that are called in such a block, by one that ends it, or by what they are handed to;
    and those of which not all callers could be read. Empty if there are several methods or databases, or if each change
    may be committed by itself.

    Args:
        files: The user's source files.
        entered: File and name of functions to leave out.
    """
    texts = {file: source_text(file) for file in files}
    with_sql = [file for file, text in texts.items() if "execute" in text or "connect(" in text]
    if len(with_sql) > _MOST_FILES:
        return ""
    scopes = [scope for file in with_sql for scope in scopes_of(file)]
    connecting = [call for scope in scopes for call in scope.calls(["connect"]) if not _is_of_object(call.func)]
    if len(connecting) != 1:
        return ""
    is_left_by_change = _is_sqlite(connecting[0], texts) and not _is_automatic(connecting[0], texts.values())
    locking = (_BEGIN, _CHANGE) if is_left_by_change else (_BEGIN,)
    opening = {scope: _opens(scope, locking) for scope in scopes}
    left = {scope: line for scope, line in opening.items() if line and not _is_ended(scope, texts)}
    known = [scope.place(line) for scope, line in left.items() if (scope.file, scope.name) not in entered]
    return known[0] if len(known) == 1 else ""


def _is_of_object(function: ast.expr) -> bool:
    """Whether it is a method of what an attribute or a call gives, and not the function of a module."""
    owner = function.value if isinstance(function, ast.Attribute) else None
    return owner is not None and (not isinstance(owner, ast.Name) or owner.id == "self")


def _is_sqlite(connect: ast.Call, texts: Mapping[str, str]) -> bool:
    is_named = ast.unparse(connect.func) == "sqlite3.connect"
    return is_named or any("from sqlite3 import connect" in text for text in texts.values())


def _is_automatic(connect: ast.Call, sources: Iterable[str]) -> bool:
    """Whether a database may commit each change by itself, unless there is a BEGIN; by any text that may set that."""
    given = argument_of(connect, _AUTOMATIC[0], position=_POSITION)
    is_plain = given is None and not any(one.arg in (*_AUTOMATIC, None) for one in connect.keywords)
    is_given = is_plain or (isinstance(given, ast.Constant) and isinstance(given.value, str))
    return any(map(_IS_SET.search, sources)) or not is_given


def _opens(scope: Scope, locking: Iterable[re.Pattern[str]]) -> int:
    """The line of the first statement by which a method has locked a database when it returns; 0 if there is none."""
    for call in scope.calls(_EXECUTE):
        text = _text(argument_of(call, "sql", position=0), scope)
        is_own = isinstance(call.func, ast.Attribute) and is_of_self(call.func.value)
        if is_own and any(one.match(text) for one in locking) and not _is_in_block(scope, call.lineno):
            return call.lineno
    return 0


def _is_ended(scope: Scope, texts: Mapping[str, str]) -> bool:
    """Whether something may end the transaction: the function, what it calls, its decorators, or its callers."""
    is_decorated = texts[scope.file].split("\n")[scope.line - 1].lstrip().startswith("@")
    if scope.name.startswith("__") or is_decorated or _ends(scope, texts):
        return True
    names, seen = {scope.name}, set[str]()
    for _ in range(_MOST_CALLERS):
        seen |= names
        naming = _functions_with(names, "", texts)
        callers = {one for one in naming or () if any(True for _ in one.calls(names))}
        if naming is None or any(_hands_on(one, names) for one in naming):
            return True
        in_blocks = (_is_in_block(one, call.lineno) for one in callers for call in one.calls(names))
        if any(in_blocks) or any(one.name.startswith("__enter") or _ends(one, texts) for one in callers):
            return True
        names = {one.name for one in callers if one.is_function} - seen - {"__init__"}
    return False


def _functions_with(names: Collection[str], before: str, texts: Mapping[str, str]) -> list[Scope] | None:
    """The functions in files whose text has one of these names, after some other text; None if these are too many."""
    files = [file for file, text in texts.items() if any(f"{before}{name}" in text for name in names)]
    return [scope for file in files for scope in scopes_of(file)] if len(files) <= _MOST_FILES else None


def _hands_on(scope: Scope, names: Collection[str]) -> bool:
    """Whether it uses a function other than by calling it: ``retry(self.put)``."""
    called = {id(call.func) for call in scope.each(ast.Call)}
    used = (node for node in scope.nodes if isinstance(node, (ast.Name, ast.Attribute)) and name_of(node) in names)
    return any(isinstance(node.ctx, ast.Load) and id(node) not in called for node in used)


def _is_in_block(scope: Scope, line: int) -> bool:
    return any(one.lineno <= line <= last_line(one) for one in scope.each(ast.With))


def _ends(scope: Scope, texts: Mapping[str, str]) -> bool:
    """Whether a function, or one that it calls, may end a transaction, by its name; in doubt it does."""
    every, seen = [scope], set[str]()
    for _ in range(_MOST_CALLED):
        if any(map(_ends_itself, every)):
            return True
        names = {name_of(call.func) for one in every for call in one.each(ast.Call)} - seen - {"", *_EXECUTE}
        seen |= names
        found = _functions_with(names, "def ", texts)
        if found is None:
            return True
        every = [one for one in found if one.name in names]
    return any(map(_ends_itself, every))


def _ends_itself(scope: Scope) -> bool:
    statements = [_text(argument_of(call, "sql", position=0), scope) for call in scope.calls(_EXECUTE)]
    named = (name_of(node) for node in scope.nodes if isinstance(node, (ast.Name, ast.Attribute)))
    return any(name in _ENDING for name in named) or any(not one or _END.match(one) for one in statements)


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
