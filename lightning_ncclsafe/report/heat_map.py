"""Lateness by rank and time as a picture, for loggers that accept pictures; drawn with numpy alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_HIGHEST = 512
_WIDEST = 1024
# The least height and width of a picture of few ranks or times, in whole pixels per value.
_LOW = 160
_NARROW = 320
_TALLEST_ROW = 48
_WIDEST_BIN = 16

# Units of the marks of time below the picture: the first one that does not make too many marks.
_RULER_HIGH = 8
_RULER_S = (60.0, 600.0, 3600.0, 36_000.0, 360_000.0)
_MOST_MARKS = 40

_LEAST_S = 1e-3
_UNKNOWN = np.array([128, 128, 128], dtype=np.uint8)
# Cubehelix (D. A. Green, "A colour scheme for the display of astronomical intensity images", Bull. Astr. Soc. India 39,
# 289, 2011): brightness as it is perceived rises steadily, in colour and in black and white. Green's own parameters.
_START, _ROTATIONS, _HUE = 0.5, -1.5, 1.0
_PLANE = np.array([[-0.14861, 1.78277], [-0.29227, -0.90649], [1.97294, 0.0]])


def heat_map(late_s: NDArray[Any], *, bin_s: float, most_s: float | None = None) -> NDArray[Any]:
    """A picture with a row for each rank, rank 0 on top, and a column for each time: the brighter, the later.

    Brightness goes with the logarithm of lateness. Few ranks or times have several pixels each; of many, several
    share one, which shows the latest of them. Unknown values are grey. White marks below the picture are at every
    minute, or every ten minutes, every hour, … where these would be too many.

    Args:
        late_s: Seconds by which each rank was late, shape (ranks, times); NaN where that is not known.
        bin_s: Seconds per column.
        most_s: This and more is white; if None, the greatest value, and at least 10 ms. Up to 1 ms is black.

    Returns:
        Red, green and blue, uint8 of shape (height, width, 3); at most 520 pixels high and 1,024 wide.
    """
    values = np.asarray(late_s, dtype=np.float64)
    if not values.size:
        values = np.full((1, 1), np.nan)
    values = _binned(values, axis=0, most=_HIGHEST)
    bins_together = _together(values.shape[1], _WIDEST)
    values = _binned(values, axis=1, most=_WIDEST)
    tall = min(max(_LOW // values.shape[0], 1), _TALLEST_ROW)
    wide = min(max(_NARROW // values.shape[1], 1), _WIDEST_BIN)
    pixels = _coloured(values, most_s).repeat(tall, axis=0).repeat(wide, axis=1)
    return np.concatenate([pixels, _ruler(pixels.shape[1], bin_s * bins_together / wide)])


def _together(count: int, most: int) -> int:
    """How many neighbours share one pixel."""
    return -(-count // most)


def _binned(values: NDArray[Any], *, axis: int, most: int) -> NDArray[Any]:
    """Reduces to at most this many rows or columns, each the greatest known value of some neighbours."""
    firsts = np.arange(0, values.shape[axis], _together(values.shape[axis], most))
    # fmax passes over NaN.
    binned: NDArray[Any] = np.fmax.reduceat(values, firsts, axis=axis)
    return binned


def _ruler(width: int, pixel_s: float) -> NDArray[Any]:
    """White marks on black, one for each full unit of time."""
    every_s = next((unit for unit in _RULER_S if width * pixel_s / unit <= _MOST_MARKS), _RULER_S[-1])
    marks = np.arange(width) * pixel_s // every_s
    ruler = np.zeros((_RULER_HIGH, width, 3), dtype=np.uint8)
    ruler[:, 1:][:, np.diff(marks) > 0] = 255
    return ruler


def _coloured(values: NDArray[Any], most_s: float | None) -> NDArray[Any]:
    is_known = ~np.isnan(values)
    most_s = max(values[is_known].max(initial=0.0) if most_s is None else most_s, 10 * _LEAST_S)
    shown = np.clip(np.where(is_known, values, 0.0), _LEAST_S, most_s)
    share = np.log(shown / _LEAST_S) / np.log(most_s / _LEAST_S)
    pixels: NDArray[Any] = _colours()[np.rint(share * 255).astype(np.intp)]
    pixels[~is_known] = _UNKNOWN
    return pixels


def _colours() -> NDArray[Any]:
    """256 colours from black to white, shape (256, 3)."""
    share = np.linspace(0, 1, 256)
    angle = 2 * np.pi * (_START / 3 + 1 + _ROTATIONS * share)
    reach = _HUE * share * (1 - share) / 2
    colours = share[:, None] + reach[:, None] * (np.stack([np.cos(angle), np.sin(angle)], axis=1) @ _PLANE.T)
    made: NDArray[Any] = np.rint(np.clip(colours, 0, 1) * 255).astype(np.uint8)
    return made
