"""What a rank is connected with: the exchange of its start, and the job's store once its watchdog changes over."""

import pytest

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange
from lightning_ncclsafe.facts import Incident, IncidentKind
from lightning_ncclsafe.guard.shared import Connection, IncidentEntry

ENTRY = IncidentEntry(incident=Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0, opened_ns=1))


def test_without_another_exchange_there_is_nothing_to_change_over_to() -> None:
    files = MemoryExchange()
    connection = Connection(files, not_before_ns=0)
    assert not connection.change_over()
    assert connection.exchange is connection.newest is files
    assert not connection.has_joined and not connection.is_superseded


def test_the_main_thread_has_the_store_before_the_watchdog_changes_over() -> None:
    files, store = MemoryExchange(), MemoryExchange()
    connection = Connection(files, not_before_ns=0)
    connection.connect(store)
    assert (connection.newest, connection.exchange) == (store, files)
    assert connection.is_superseded and not connection.has_joined
    assert connection.change_over()
    assert connection.exchange is connection.newest is store
    assert connection.has_joined and not connection.is_superseded
    assert not connection.change_over(), "once"


def test_the_store_has_a_log_of_its_own_and_the_files_are_given_back() -> None:
    files, store = MemoryExchange(), MemoryExchange()
    connection = Connection(files, not_before_ns=2)
    connection.log.write(ENTRY)
    assert connection.log.read() is None and connection.log.number == 1, "it is older than this start"
    connection.connect(store)
    connection.change_over()
    assert connection.log.number == 0
    connection.log.write(ENTRY)
    assert connection.log.read() == ENTRY
    with pytest.raises(ExchangeError):
        files.get_many(["log/0"])


@pytest.mark.parametrize("changes_over", [True, False])
def test_both_are_given_back_in_the_end(changes_over: bool) -> None:
    files, store = MemoryExchange(), MemoryExchange()
    connection = Connection(files, not_before_ns=0)
    connection.connect(store)
    if changes_over:
        connection.change_over()
    connection.close()
    for exchange in (files, store):
        with pytest.raises(ExchangeError):
            exchange.get_many(["log/0"])
