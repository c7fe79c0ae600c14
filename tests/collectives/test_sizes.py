"""Bytes of a call from what the recorder keeps."""

from typing import Any

import pytest
import torch

from lightning_ncclsafe.collectives.recording import size_bytes
from lightning_ncclsafe.facts import element_bytes


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
def test_sizes_follow_from_shapes_and_types(shapes: Any, dtypes: Any, expected: int) -> None:
    assert size_bytes({"input_sizes": shapes, "input_dtypes": dtypes}) == expected


@pytest.mark.parametrize("inputs", [{}, {"input_sizes": [], "input_dtypes": []}, {"input_sizes": [[0]]}])
def test_the_output_counts_for_a_receiving_rank(inputs: Any) -> None:
    assert size_bytes({**inputs, "output_sizes": [[4]], "output_dtypes": ["Float"]}) == 16


@pytest.mark.parametrize("entry", [{}, {"input_sizes": [[3]]}, {"input_sizes": [], "output_sizes": []}])
def test_an_unknown_size_is_zero(entry: Any) -> None:
    assert size_bytes(entry) == 0


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.uint8, "Byte"),
        (torch.int8, "Char"),
        (torch.bool, "Bool"),
        (torch.int16, "Short"),
        (torch.float16, "Half"),
        (torch.bfloat16, "BFloat16"),
        (torch.int32, "Int"),
        (torch.float32, "Float"),
        (torch.complex32, "ComplexHalf"),
        (torch.int64, "Long"),
        (torch.float64, "Double"),
        (torch.complex64, "ComplexFloat"),
        (torch.complex128, "ComplexDouble"),
        (torch.float8_e5m2, "Float8_e5m2"),
    ],
)
def test_element_sizes_match_torch(dtype: torch.dtype, name: str) -> None:
    assert element_bytes(name) == dtype.itemsize
