"""Bytes of a call from what the recorder keeps."""

from typing import Any

import pytest

from lightning_ncclsafe.collectives.recording import size_bytes


@pytest.mark.parametrize(
    ("shapes", "dtypes", "expected"),
    [
        ([[10]], ["Float"], 40),
        ([[2, 3, 4]], ["BFloat16"], 48),
        ([[5]], ["Double"], 40),
        ([[5]], ["Long"], 40),
        ([[5]], ["Byte"], 5),
        ([[5]], ["Bool"], 5),
        ([[5]], ["Half"], 10),
        ([[5]], ["ComplexDouble"], 80),
        ([[5]], ["Float8_e4m3fn"], 5),
        ([[]], ["Float"], 4),
        ([[0]], ["Float"], 0),
        ([[10], [20]], ["Float", "Half"], 80),
        ([[10], [20]], ["Float"], 120),
    ],
)
def test_bytes_are_those_of_the_shapes_and_types(shapes: Any, dtypes: Any, expected: int) -> None:
    assert size_bytes({"input_sizes": shapes, "input_dtypes": dtypes}) == expected


@pytest.mark.parametrize("inputs", [{}, {"input_sizes": [], "input_dtypes": []}, {"input_sizes": [[0]]}])
def test_of_a_rank_that_only_receives_the_output_counts(inputs: Any) -> None:
    assert size_bytes({**inputs, "output_sizes": [[4]], "output_dtypes": ["Float"]}) == 16


@pytest.mark.parametrize("entry", [{}, {"input_sizes": [[3]]}, {"input_sizes": [], "output_sizes": []}])
def test_where_nothing_is_known_it_is_nothing(entry: Any) -> None:
    assert size_bytes(entry) == 0
