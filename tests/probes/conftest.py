"""What tests of probes share: a thread that stands in for the one that trains."""

import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_ncclsafe.probes.process import stacks

_ENDS_WITHIN_S = 60.0


@pytest.fixture(name="training")
def _training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Lets a thread train that calls this."""
    threads: list[threading.Thread] = []

    def train(call: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=call, daemon=True)
        monkeypatch.setattr(stacks, "_trains", thread)
        thread.start()
        threads.append(thread)
        return thread

    yield train
    for thread in threads:
        thread.join(_ENDS_WITHIN_S)
