"""The global random number generators, read without drawing from them."""

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_ncclsafe.facts import RandomState
from lightning_ncclsafe.probes.data.plain_values import digest

# The first word of a Mersenne twister after seeding, in Python with every seed, in numpy with all but an int. The first
# number drawn changes all 624 words.
_SEEDED = 0x80000000
# numpy's position after seeding with an int, and again after 624 numbers, 1248, …
_END = 624


def random_states() -> tuple[RandomState, ...]:
    """The states of Python's, numpy's (if imported) and PyTorch's CPU generators."""
    states = (_python(), _numpy(), _torch())
    return tuple(state for state in states if state is not None)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the states of all global generators at the end of the block."""
    # Imported now: if it were first imported in the block, there would be no state to restore.
    numpy: Any = importlib.import_module("numpy.random") if "numpy" in sys.modules else None
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.get_state(legacy=False) if numpy is not None else None
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_states = torch.cuda.get_rng_state_all() if has_cuda else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.set_state(numpy_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def saved_states() -> dict[str, Any]:
    """The states of all global generators, and of the current GPU's, as ``torch.load(weights_only=True)`` reads them.

    The GPU's state is kept on the host: reading it waits for nothing.
    """
    version, words, gauss = random.getstate()
    saved: dict[str, Any] = {"python": (version, words, gauss), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy.random")
    found: dict[str, Any] = numpy.get_state(legacy=False) if numpy is not None else {}
    if found.get("bit_generator") == "MT19937":
        key = torch.from_numpy(found["state"]["key"].astype("int64"))
        saved["numpy"] = (key, int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"]))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        saved["cuda"] = torch.cuda.get_rng_state()
    return saved


def put_back(saved: Mapping[str, Any]) -> None:
    """Restores saved states of the generators.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: The argument is something else.
    """
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved:
        key, position, has_gauss, cached = saved["numpy"]
        numpy = importlib.import_module("numpy.random")
        numpy.set_state(("MT19937", key.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, numpy (if imported) and PyTorch's CPU, but no device's."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed)


def _python() -> RandomState:
    state = random.getstate()
    fresh = state[1][0] == _SEEDED
    return RandomState(name="python", digest=digest(repr(state).encode()), drawn=not fresh)


def _numpy() -> RandomState | None:
    numpy = sys.modules.get("numpy.random")
    state: dict[str, Any] = numpy.get_state(legacy=False) if numpy is not None else {}
    if numpy is None or state["bit_generator"] != "MT19937":
        return None
    words, position = state["state"]["key"], int(state["state"]["pos"])
    gauss = float(state["gauss"]) if state["has_gauss"] else None
    hashed = digest(words.astype("<u4").tobytes(), repr((position, gauss)).encode())
    fresh = int(words[0]) == _SEEDED or (position == _END and _is_of_an_int(numpy, words))
    return RandomState(name="numpy", digest=hashed, drawn=not fresh)


def _is_of_an_int(numpy: Any, words: Any) -> bool:
    """Whether these words come from seeding with an int, which is then the first word."""
    seeded = numpy.RandomState(int(words[0])).get_state(legacy=False)
    return bool((seeded["state"]["key"] == words).all())


def _torch() -> RandomState:
    state = torch.get_rng_state()
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return RandomState(name="torch", digest=digest(bytes(state.tolist())), drawn=not torch.equal(state, fresh))
