"""Functions that leave a changed database locked, by their source."""

from pathlib import Path

import pytest

from lightning_ncclsafe.probes.source.scopes import scope_at
from lightning_ncclsafe.probes.source.transactions import left_open_at, runs_sql

STORE = """
import sqlite3

ADDED = "insert into runs values (?)"

class Store:
    def __init__(self, path):
        self.db = sqlite3.connect(path{options})

    def open_run(self, run):
        {opens}

    def close_run(self):
        self.db.execute("UPDATE runs SET done = 1")
        self.db.commit()
"""
TRAIN = """
class Runs:
    def on_fit_start(self):
        self.store.open_run("a")
        {after}

    def on_fit_end(self):
        self.store.close_run()
"""
INSERT = 'self.db.execute("INSERT INTO runs VALUES (?)", (run,))'
AT_ONCE = 'self.db.execute("BEGIN IMMEDIATE")'
AUTOMATIC = ", isolation_level=None"


def found(folder: Path, opens: str, options: str = "", after: str = "pass", entered: str = "") -> tuple[str, ...]:
    store, train = folder / "store.py", folder / "train.py"
    store.write_text(STORE.format(opens=opens, options=options))
    train.write_text(TRAIN.format(after=after))
    return left_open_at([str(store), str(train)], {(str(store), entered)})


@pytest.mark.parametrize(
    ("opens", "options"),
    [
        (INSERT, ""),
        (INSERT, ", timeout=60"),
        ("self.db.execute(ADDED, (run,))", ""),
        ('self.db.executemany(f"replace into {self.table} values (?)", [(run,)])', ""),
        (AT_ONCE, AUTOMATIC),
        (f"{AT_ONCE}; {INSERT}", ""),
        ('self.db.execute("begin exclusive;")', ", autocommit=True"),
    ],
)
def test_a_change_whose_function_leaves_its_end_to_others_is_found(tmp_path: Path, opens: str, options: str) -> None:
    assert found(tmp_path, opens, options) == (f"{tmp_path}/store.py:11 in open_run",)


@pytest.mark.parametrize(
    ("opens", "options", "after", "entered"),
    [
        pytest.param(f"{INSERT}; self.db.commit()", "", "pass", "", id="committed"),
        pytest.param(f'{AT_ONCE}; self.db.execute("COMMIT")', "", "pass", "", id="committed by a statement"),
        pytest.param(f"with self.db: {INSERT}", "", "pass", "", id="in a block"),
        pytest.param(INSERT, AUTOMATIC, "pass", "", id="each change is committed"),
        pytest.param(INSERT, ", autocommit=True", "pass", "", id="automatically"),
        pytest.param('self.db.execute("BEGIN")', "", "pass", "", id="nothing is changed yet"),
        pytest.param('self.db.execute("SELECT * FROM runs")', "", "pass", "", id="only read"),
        pytest.param("self.db.execute(self.text)", "", "pass", "", id="unknown statement"),
        pytest.param(INSERT, "", "self.store.db.commit()", "", id="the caller commits"),
        pytest.param(INSERT, "", "self.store.close_run()", "", id="the caller calls what commits"),
        pytest.param(INSERT, "", "pass", "open_run", id="the rank that waits has entered it"),
    ],
)
def test_what_is_ended_or_changes_nothing_is_not(
    tmp_path: Path, opens: str, options: str, after: str, entered: str
) -> None:
    assert found(tmp_path, opens, options, after, entered) == ()


def test_only_a_line_that_calls_a_database_waits_for_one(tmp_path: Path) -> None:
    file = tmp_path / "store.py"
    file.write_text(STORE.format(opens=INSERT.replace("(run,)", "\n            (run,),\n        "), options=""))
    scope = scope_at(str(file), "open_run", 12)
    assert [line for line in range(8, 20) if runs_sql(scope, line)] == [11, 12, 13]
