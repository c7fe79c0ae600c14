"""What is said of collectives that have completed with each other, whatever the number of different ones."""

from lightning_ncclsafe.collectives.mispaired import mispairing_words
from lightning_ncclsafe.timing.matching import Mispairing, PairedCall

FEW = (
    PairedCall(op="all_reduce", size_bytes=4, ranks=(0, 2)),
    PairedCall(op="all_reduce", size_bytes=8, ranks=(1,)),
)


def test_all_calls_are_named_if_they_are_few() -> None:
    words = mispairing_words(Mispairing(group="0", seq=3, step=1, calls=FEW))
    assert " is all_reduce of 4 bytes on ranks 0, 2 and all_reduce of 8 bytes on rank 1. " in words


def test_ranks_with_more_calls_are_counted() -> None:
    words = mispairing_words(Mispairing(group="0", seq=3, step=1, calls=FEW, other_ranks=7_997))
    assert ", all_reduce of 8 bytes on rank 1 and something else on 7,997 more ranks. " in words
    words = mispairing_words(Mispairing(group="0", seq=3, step=1, calls=FEW, other_ranks=1))
    assert " and something else on 1 more rank. " in words
