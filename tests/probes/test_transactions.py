"""Functions that leave a changed database locked, by their source."""

from pathlib import Path

import pytest

from lightning_ncclsafe.probes.source import transactions
from lightning_ncclsafe.probes.source.scopes import scope_at
from lightning_ncclsafe.probes.source.transactions import left_open_at, runs_sql

STORE = """
import sqlite3

ADDED = "insert into runs values (?)"

class Store:
    def __init__(self, path):
        self.db = sqlite3.connect(path{options})
        {setup}

    {decorator}
    def {name}(self, run):
        {opens}

    def _flush(self):
        self.db.commit()

    def end(self):
        self._flush()

    def close_run(self):
        self.db.execute("UPDATE runs SET done = 1")
        self.db.commit()
"""
TRAIN = """
class Runs:
    def on_fit_start(self):
        self.begin()
        {after}

    def begin(self):
        {call}

    def on_fit_end(self):
        self.store.close_run()
"""
INSERT = 'self.db.execute("INSERT INTO runs VALUES (?)", (run,))'
AT_ONCE = 'self.db.execute("BEGIN IMMEDIATE")'
AUTOMATIC = ", isolation_level=None"


def found(folder: Path, *, entered: str = "", **parts: str) -> str:
    filled = {"opens": INSERT, "options": "", "setup": "pass", "decorator": "# ends elsewhere", "name": "open_run"}
    called = {"call": 'self.store.open_run("a")', "after": "pass"}
    store, train = folder / "store.py", folder / "train.py"
    store.write_text(STORE.format(**(filled | {name: parts[name] for name in parts if name in filled})))
    train.write_text(TRAIN.format(**(called | {name: parts[name] for name in parts if name in called})))
    return left_open_at([str(store), str(train)], {(str(store), entered)}).removeprefix(f"{store}:")


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"options": ", timeout=60"},
        {"setup": "self.connect(); self.server.connect(path)"},
        {"options": ', isolation_level="IMMEDIATE"'},
        {"opens": "self.db.execute(ADDED, (run,))"},
        {"opens": 'self.db.executemany(f"replace into {self.table} values (?)", [(run,)])'},
        {"opens": 'self.db.execute("UPDATE runs\\nSET done = 0")'},
        {"opens": AT_ONCE, "options": AUTOMATIC},
        {"opens": f"{AT_ONCE}; {INSERT}", "options": ", 60.0, 0, None"},
        {"opens": 'self.db.execute("begin exclusive;")', "options": ", autocommit=True"},
    ],
)
def test_a_change_whose_function_leaves_its_end_to_others_is_found(tmp_path: Path, parts: dict[str, str]) -> None:
    assert found(tmp_path, **parts) == "13 in open_run"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"opens": f"{INSERT}; self.db.commit()"}, id="committed"),
        pytest.param({"opens": f'{AT_ONCE}; self.db.execute("COMMIT")'}, id="committed by a statement"),
        pytest.param({"opens": f"{INSERT}; self._flush()"}, id="committed by what it calls"),
        pytest.param({"opens": f"with self.db: {INSERT}"}, id="in a block"),
        pytest.param({"decorator": "@committed"}, id="decorated"),
        pytest.param({"name": "__enter__"}, id="of a context manager"),
        pytest.param({"options": AUTOMATIC}, id="each change is committed"),
        pytest.param({"options": ", 60.0, 0, None"}, id="by position"),
        pytest.param({"options": ", autocommit=True"}, id="automatically"),
        pytest.param({"options": ", **options"}, id="perhaps"),
        pytest.param({"setup": "self.db.isolation_level = None"}, id="set later"),
        pytest.param({"setup": "self.other = sqlite3.connect(path)"}, id="one of two databases"),
        pytest.param({"setup": "self.other = psycopg2.connect(path)"}, id="one of two kinds"),
        pytest.param({"opens": 'self.db.execute("BEGIN")'}, id="nothing is changed yet"),
        pytest.param({"opens": 'self.db.execute("SELECT * FROM runs")'}, id="only read"),
        pytest.param({"opens": 'self.pool.execute("update weights")'}, id="no statement"),
        pytest.param({"opens": 'self.db.executescript("INSERT INTO runs VALUES (1)")'}, id="a script"),
        pytest.param({"opens": "self.db.execute(self.text)"}, id="unknown statement"),
        pytest.param({"opens": f"{INSERT}; self.db.execute(self.text)"}, id="perhaps committed"),
        pytest.param({"opens": f"{INSERT}; retry(self.db.commit)"}, id="committed by what is given that"),
        pytest.param({"opens": f"{INSERT}; self.end()"}, id="committed further down"),
        pytest.param({"opens": INSERT.replace("self.db", "self.made()")}, id="a connection of its own"),
        pytest.param({"call": 'retry(self.store.open_run, "a")'}, id="handed on"),
        pytest.param({"setup": "self.db.isolation_level=None"}, id="set without spaces"),
        pytest.param({"call": 'self.store.open_run("a"); self.store.db.commit()'}, id="the caller commits"),
        pytest.param({"call": 'self.store.open_run("a"); self.store.close_run()'}, id="the caller calls what does"),
        pytest.param({"call": 'with self.store.db: self.store.open_run("a")'}, id="the caller's block"),
        pytest.param({"after": "self.store.db.commit()"}, id="the caller's caller commits"),
        pytest.param({"entered": "open_run"}, id="the rank that waits has entered it"),
    ],
)
def test_what_is_ended_or_changes_nothing_is_not(tmp_path: Path, parts: dict[str, str]) -> None:
    assert found(tmp_path, **parts) == ""


def test_of_two_functions_none_is_known_to_have_left_it(tmp_path: Path) -> None:
    two = f"{INSERT}\n\n    def add(self, run):\n        {INSERT}"
    assert found(tmp_path, opens=two) == ""
    assert found(tmp_path, opens=two, entered="add") == "13 in open_run"


@pytest.mark.parametrize(("most", "is_read"), [(0, False), (1, False), (2, True)], ids=["databases", "callers", "all"])
def test_where_there_are_too_many_files_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, is_read: bool
) -> None:
    monkeypatch.setattr(transactions, "_MOST_FILES", most)
    assert bool(found(tmp_path)) == is_read


def test_only_a_line_that_calls_a_database_waits_for_one(tmp_path: Path) -> None:
    file = tmp_path / "store.py"
    opens = INSERT.replace("(run,)", "\n            (run,),\n        ")
    file.write_text(STORE.format(opens=opens, options="", setup="pass", decorator="# none", name="open_run"))
    scope = scope_at(str(file), "open_run", 14)
    assert [line for line in range(8, 20) if runs_sql(scope, line)] == [13, 14, 15]
