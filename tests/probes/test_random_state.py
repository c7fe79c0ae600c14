"""The global random number generators: whether they were drawn from is seen, and looking does not draw."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lightning_ncclsafe.facts import RandomState
from lightning_ncclsafe.probes.data.random_state import random_states, random_states_kept, seed_all


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with random_states_kept():
        yield


def state(name: str) -> RandomState:
    return next(state for state in random_states() if state.name == name)


SEEDS: list[tuple[str, Callable[[], object]]] = [
    ("python", lambda: random.seed(0)),
    ("python", lambda: random.seed("text")),
    ("python", lambda: random.seed()),
    ("numpy", lambda: np.random.seed(0)),
    ("numpy", lambda: np.random.seed(2**32 - 1)),
    ("numpy", lambda: np.random.seed([1, 2])),
    ("numpy", lambda: np.random.seed()),
    ("torch", lambda: torch.manual_seed(0)),
    ("torch", lambda: torch.manual_seed(2**63)),
    ("torch", lambda: torch.seed()),
]
# 312 numbers of 64 bits each bring a Mersenne twister to where seeding leaves it.
DRAWS: list[tuple[str, Callable[[], object]]] = [
    ("python", lambda: random.random()),
    ("python", lambda: [random.random() for _ in range(312)]),
    ("python", lambda: random.gauss(0, 1)),
    ("numpy", lambda: np.random.rand()),
    ("numpy", lambda: np.random.rand(312)),
    ("numpy", lambda: np.random.randn()),
    ("torch", lambda: torch.rand(1)),
    ("torch", lambda: torch.randperm(624)),
    ("torch", lambda: torch.randn(1)),
]


@pytest.mark.parametrize(("name", "seed"), SEEDS, ids=map(str, range(len(SEEDS))))
def test_nothing_is_drawn_after_seeding(name: str, seed: Callable[[], object]) -> None:
    seed()
    assert not state(name).drawn


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(("name", "draw"), DRAWS, ids=map(str, range(len(DRAWS))))
def test_a_drawn_number_changes_the_digest(name: str, draw: Callable[[], object], seed: int) -> None:
    seed_all(seed)
    before = {state.name: state for state in random_states()}
    draw()
    after = {state.name: state for state in random_states()}
    assert [name for name in after if after[name] != before[name]] == [name]
    assert after[name].drawn


def test_equal_seeds_have_equal_digests() -> None:
    digests = []
    for seed in (1, 1, 2):
        seed_all(seed)
        digests.append(tuple(state.digest for state in random_states()))
    assert digests[0] == digests[1]
    assert all(first != other for first, other in zip(digests[0], digests[2], strict=True))


def test_reading_states_draws_nothing() -> None:
    seed_all(3)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    seed_all(3)
    assert random_states() == random_states()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_states_are_restored_after_an_exception() -> None:
    np.random.randn()
    before = random_states()
    seed = torch.initial_seed()
    with pytest.raises(KeyError), random_states_kept():
        seed_all(5)
        np.random.randn()
        raise KeyError
    assert random_states() == before
    assert torch.initial_seed() == seed


def test_another_numpy_generator_is_left_alone() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert [state.name for state in random_states()] == ["python", "torch"]
        with random_states_kept():
            expected = np.random.rand()
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(own)


def test_numpy_is_restored_only_once_it_is_imported() -> None:
    """An unseeded process has drawn nothing."""
    script = (
        "import os\n"
        "from lightning_ncclsafe.probes.data.random_state import random_states, random_states_kept, seed_all\n"
        "if not (child := os.fork()):\n"
        "    import numpy.random\n"
        "    print([(state.name, state.drawn) for state in random_states()], flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "with random_states_kept():\n"
        "    import numpy.random\n"
        "    seed_all(1)\n"
        "    inside = random_states()[1].digest\n"
        "assert random_states()[1].name == 'numpy'\n"
        "assert random_states()[1].digest != inside\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str([("python", False), ("numpy", False), ("torch", False)])
