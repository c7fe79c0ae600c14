"""Creates and reads the Flight Recorders of this process."""

import ctypes
import gc
import importlib
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe._torch.build import c10d
from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.recorder.model import MOST_ENTRIES, backend_of, group_of

# NCCL has its own recorder, absent from CPU builds; every other back end (and, in newer releases, "nccl2")
# writes to the general one. Both are read, so that a job with gloo and NCCL groups is complete.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# The back ends whose collectives each of them is known to record.
_RECORDER_OF = {"nccl": _RECORDERS[0], "gloo": _RECORDERS[1]}
# CU_STREAM_CAPTURE_MODE_RELAXED and CU_EVENT_DISABLE_TIMING of CUDA's driver.
_CAPTURE_MODE_RELAXED = 2
_EVENT_DISABLE_TIMING = 2
_DRIVER_ANSWERS_S = 1.0


def dumps(*, collectives: bool) -> Iterator[dict[str, Any]]:
    """The content of each Flight Recorder of this process, as PyTorch's own JSON; back ends are distinguished.

    Args:
        collectives: Whether to include the entries; without them only the position of each group is dumped, which
            takes about 0.05 ms. Of a recorder of more than ``MOST_ENTRIES`` only the newest are included, and of
            NCCL's only outstanding ones. Only ask for them if :func:`driver_answers`.
    """
    is_large = collectives and size(DEFAULT_SIZE) > MOST_ENTRIES
    for name in _RECORDERS:
        dump: Callable[[bool, bool], bytes] | None = getattr(c10d, name, None)
        if dump is not None:
            with _captures_undisturbed() if collectives else nullcontext():
                data = dump(collectives, is_large)
            found = json.loads(data)
            if is_large and "entries" in found:
                found["entries"] = found["entries"][-MOST_ENTRIES:]
            if collectives:
                _tell_apart(found.get("entries", ()))
            yield found


def _tell_apart(entries: Iterable[dict[str, Any]]) -> None:
    """Where a group has several back ends, which count from 1 each, names the group of an entry by its back end, too.

    Each of these back ends writes to another recorder, so that the position of the group there is that back end's.
    """
    names = process_groups.names_by_backend()
    for entry in entries if names else ():
        own = names.get((group_of(entry)[0], backend_of(entry)[0]))
        if own is not None:
            entry["process_group"] = own


@contextmanager
def _captures_undisturbed() -> Iterator[None]:
    """Around reading entries of NCCL's recorder, as another thread may be capturing a CUDA graph.

    The recorder asks CUDA about the events of its entries. While a stream is captured in the default mode, such a call
    on any thread invalidates the capture, unless the thread has switched to the relaxed mode. PyTorch's watchdog does
    so, too (``CUDAStreamCaptureModeGuard``).
    """
    if not _uses_cuda():
        yield
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    is_relaxed = exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if is_relaxed:
            # The thread's mode before.
            exchange(ctypes.byref(mode))


def _uses_cuda() -> bool:
    # Without CUDA, no driver is loaded just for this; ROCm also calls itself CUDA, with another driver.
    return torch.version.cuda is not None and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


_question = SideThread("ncclsafe-cuda-driver")


def driver_answers() -> bool:
    """Whether CUDA's driver answers within a second, so that entries can be read; true if CUDA is not used.

    It may not if another thread holds the lock of a device's context, as ``cudaFree`` and the first launch of a kernel
    do while they wait for a collective that never ends (seen on an H100). Reading entries would wait for that lock with
    the GIL held, and so block all Python of this process. This makes the recorder's query on another thread, without
    the GIL. A question that is still open is not waited for again, as each second makes this rank's facts late.
    """
    if not _uses_cuda():
        return True
    _question.begin(_ask_driver)
    try:
        _question.answer(_question.began_s + _DRIVER_ANSWERS_S - time.monotonic())
    except UnansweredError:
        return False
    except Exception:  # a driver of another kind; its answer does not matter
        return True
    return True


def _ask_driver() -> None:
    """Queries an event on each device that this process uses; the answer does not matter."""
    driver = _driver()
    # The context of this thread, which ends with it.
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
    for number in range(torch.cuda.device_count()):
        device, flags, is_used = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), number):
            continue
        if driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_used)) or not is_used.value:
            continue
        context, event = ctypes.c_void_p(), ctypes.c_void_p()
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            continue
        if not driver.cuCtxSetCurrent(context):
            if not driver.cuEventCreate(ctypes.byref(event), _EVENT_DISABLE_TIMING):
                driver.cuEventQuery(event)
                driver.cuEventDestroy_v2(event)
            driver.cuCtxSetCurrent(None)
        driver.cuDevicePrimaryCtxRelease_v2(device)


def is_known(backend: str) -> bool:
    """Whether it is known which of PyTorch's recorders keeps a back end's collectives."""
    return backend in _RECORDER_OF


def can_be_read(backend: str) -> bool:
    """Whether this build of torch can dump the recorder of a back end that is known."""
    return hasattr(c10d, _RECORDER_OF[backend])


class _PlainUnpickler(pickle.Unpickler):
    """Reads the recorder's dumps: lists, dictionaries, numbers and text. Imports and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"The Flight Recorder's dump asks for {module}.{name}; it should be plain data.")


def entries(*, stacks: bool = False) -> Iterator[list[dict[str, Any]]]:
    """The entries of each Flight Recorder of this process, oldest first; back ends are distinguished.

    As pickle, which takes half the time of JSON: some 7 µs an entry (torch 2.13). The GIL is held meanwhile, so
    recorders of more than ``MOST_ENTRIES`` are not read, nor is any while CUDA's driver does not answer.

    Args:
        stacks: Whether to include the Python stack of each call, innermost frame first: another 5 µs per entry.
    """
    if size(DEFAULT_SIZE) > MOST_ENTRIES or not driver_answers():
        return
    for name in _RECORDERS:
        dump: Callable[[bool, bool, bool], bytes] | None = getattr(c10d, name.removesuffix("_json"), None)
        if dump is not None:
            with _captures_undisturbed(), _inductor_not_imported() if stacks else nullcontext():
                data = dump(True, stacks, False)
            found = _load_plain(data).get("entries", [])
            _tell_apart(found)
            yield found


class _Unimported(ModuleType):
    """Replaces one function of a module that is not imported for it; everything else is the module's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _NothingGenerated:
    """Replaces Inductor's cache of generated code, which is empty while Inductor is not imported."""

    def stack_frames_for_code(self, path: str, lineno: int) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._inductor.codecache").PyCodeCache, name)


@contextmanager
def _inductor_not_imported() -> Iterator[None]:
    """Around reading stacks: torch imports Inductor to ask for generated code (torch 2.13: python_tracer.cpp).

    That takes a second and 800 modules, and never ends if the main thread hangs in the same import.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if hasattr(codecache, "PyCodeCache") and getattr(vars(torch).get("_inductor"), "codecache", None) is codecache:
        yield
        return
    stand_in, cache = _Unimported("torch._inductor"), _Unimported("torch._inductor.codecache")
    stand_in.codecache, cache.PyCodeCache = cache, _NothingGenerated()  # type: ignore[attr-defined]
    before = vars(torch).get("_inductor")
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        # Unless it has been imported meanwhile.
        if vars(torch)["_inductor"] is stand_in:
            del vars(torch)["_inductor"]
            if before is not None:
                vars(torch)["_inductor"] = before


def _load_plain(data: bytes) -> Any:
    """Unpickles without garbage collection: ten objects per entry would trigger one of all objects, 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    finally:
        if was_on:
            gc.enable()


DEFAULT_SIZE = 2000
"""Entries that a Flight Recorder keeps by default from torch 2.11 on. Before that it is off by default."""
# The second is the older name.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def size(default: int) -> int:
    """The size of the Flight Recorder that the user has set in the environment; 0 if it is off."""
    for name in _SIZES:
        with suppress(KeyError, ValueError):
            return max(int(os.environ[name]), 0)
    return default


@contextmanager
def of_size(default: int) -> Iterator[None]:
    """Sets the size of recorders created meanwhile in the environment, unless the user has set one.

    Both the recorders and NCCL's process groups look there.
    """
    if any(name in os.environ for name in _SIZES):
        yield
        return
    os.environ[_SIZES[0]] = str(default)
    try:
        yield
    finally:
        os.environ.pop(_SIZES[0], None)


def make(default: int) -> None:
    """Creates the Flight Recorders of this process if there are none yet, unless the user has set their size.

    A recorder is created at its first use, with the size in the environment at that time, on or off: a dump is a use,
    and so is a process group's first collective.
    """
    with of_size(default):
        for _ in dumps(collectives=False):
            pass
