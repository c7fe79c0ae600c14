"""Bandwidths by nccl-tests' definitions, worked out by hand from its PERFORMANCE.md."""

import pytest

from lightning_ncclsafe.timing.summary import bandwidth, plain_op

MB = 1e6
MS = 1e-3


@pytest.mark.parametrize(
    ("op", "algorithm_gb", "bus_gb"),
    [
        # 8 MB in 1 ms on 4 ranks. All-reduce: 8 GB/s, and each link carries 2 * 3/4 of it.
        ("all_reduce", 8, 12),
        ("allreduce", 8, 12),
        ("allreduce_coalesced", 8, 12),
        ("all_reduce_coalesced", 8, 12),
        # All-gather: what counts is the size of the result, 32 MB; 3/4 of it comes over the links.
        ("all_gather", 32, 24),
        ("_all_gather_base", 32, 24),
        ("_allgather_base", 32, 24),
        ("all_gather_into_tensor_coalesced", 32, 24),
        ("allgather_into_tensor_coalesced", 32, 24),
        # Reduce-scatter: that of the input.
        ("reduce_scatter", 8, 6),
        ("_reduce_scatter_base", 8, 6),
        ("reduce_scatter_tensor_coalesced", 8, 6),
        ("all_to_all", 8, 6),
        ("alltoall_base", 8, 6),
        ("all_to_all_single", 8, 6),
        ("broadcast", 8, 8),
        ("reduce", 8, 8),
        ("gather", 32, 24),
        ("send", 8, 8),
        ("recv", 8, 8),
        ("send 0->1", 8, 8),
        ("recv 3<-2", 8, 8),
    ],
)
def test_each_operation_has_its_bandwidth_factor(op: str, algorithm_gb: float, bus_gb: float) -> None:
    found = bandwidth(op, ranks=4, size_bytes=8 * MB, seconds=MS)
    assert found is not None
    assert found.algorithm / 1e9 == pytest.approx(algorithm_gb)
    assert found.bus / 1e9 == pytest.approx(bus_gb)


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0.0), (2, 1.0), (8, 1.75), (1024, 2 * 1023 / 1024)])
def test_the_factor_of_an_all_reduce_depends_on_the_number_of_ranks(ranks: int, factor: float) -> None:
    found = bandwidth("all_reduce", ranks=ranks, size_bytes=MB, seconds=1.0)
    assert found is not None
    assert found.bus == pytest.approx(factor * MB)


def test_a_scatter_counts_the_data_of_all_ranks() -> None:
    """The recorder keeps no input of receiving ranks, so the size is that of one rank's part."""
    found = bandwidth("scatter", ranks=4, size_bytes=MB, seconds=1.0)
    assert found is not None
    assert (found.algorithm, found.bus) == (pytest.approx(4 * MB), pytest.approx(3 * MB))


@pytest.mark.parametrize("op", ["barrier", "coalesced", "", "my_own_op", "all_reduce_barrier"])
def test_an_unknown_operation_has_no_bandwidth(op: str) -> None:
    assert bandwidth(op, ranks=4, size_bytes=MB, seconds=MS) is None


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 0.0), (4, -1.0), (0, 1.0)])
def test_without_a_time_or_ranks_there_is_no_bandwidth(ranks: int, seconds: float) -> None:
    assert bandwidth("all_reduce", ranks=ranks, size_bytes=MB, seconds=seconds) is None


def test_zero_bytes_give_zero_bandwidth() -> None:
    assert bandwidth("all_reduce", ranks=4, size_bytes=0, seconds=MS) == (0, 0)


@pytest.mark.parametrize(("op", "plain"), [("_allgather_base", "all_gather"), ("send 0->1", "send"), ("x", "x")])
def test_operation_names_are_normalised(op: str, plain: str) -> None:
    assert plain_op(op) == plain
