"""The threads of this package that run in this process, by their names."""

import threading


def own_threads(name: str = "") -> list[threading.Thread]:
    """Those whose name begins so, after ``ncclsafe-``; all of them by default."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"ncclsafe-{name}")]


def join_own_threads(name: str = "", *, within_s: float = 60.0) -> None:
    """Waits until they have ended."""
    for thread in own_threads(name):
        thread.join(within_s)
        assert not thread.is_alive(), thread
