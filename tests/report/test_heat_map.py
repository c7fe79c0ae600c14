"""A picture of lateness: what is later is brighter, nobody who was late vanishes, and what is not known is grey."""

import numpy as np
import pytest

from lightning_ncclsafe.report.heat_map import _colours, _ruler, heat_map

RULER = 8
GREY = [128, 128, 128]


def brightness(pixels: np.ndarray) -> np.ndarray:
    """As ITU-R BT.601 weighs colours, by which cubehelix is made."""
    return pixels @ np.array([0.299, 0.587, 0.114])


def test_two_ranks_have_tall_rows_with_rank_0_on_top() -> None:
    late_s = np.array([[0.1, 0.1, 0.0], [0.0, 0.0, 0.0]])
    pixels = heat_map(late_s, bin_s=1.0)
    assert pixels.dtype == np.uint8
    height, width = 2 * 48, 3 * 16
    assert pixels.shape == (height + RULER, width, 3)
    assert brightness(pixels[:48, :32]).min() > 200
    assert brightness(pixels[:48, 32:]).max() == brightness(pixels[48:height]).max() == 0


def test_a_single_late_rank_of_a_thousand_is_visible() -> None:
    late_s = np.zeros((1024, 512))
    late_s[701, 100] = 0.5
    pixels = heat_map(late_s, bin_s=10.0)[:-RULER]
    assert pixels.shape == (512, 512, 3)
    assert np.argwhere(brightness(pixels) > 0).tolist() == [[350, 100]]


def test_shared_columns_show_the_greatest_lateness() -> None:
    late_s = np.zeros((1, 5000))
    late_s[0, 4999] = 1.0
    pixels = heat_map(late_s, bin_s=1.0)
    assert pixels.shape[1] == 1000
    assert brightness(pixels[0, -1]) > 250
    assert brightness(pixels[0, :-1]).max() == 0


def test_unknown_values_are_grey_and_hide_no_neighbour() -> None:
    late_s = np.full((1024, 2), np.nan)
    late_s[1, 1] = 1.0
    pixels = heat_map(late_s, bin_s=1.0)
    assert pixels[0, 0].tolist() == pixels[1, -1].tolist() == GREY
    assert brightness(pixels[0, -1]) > 250


def test_brightness_is_logarithmic() -> None:
    late_s = np.array([[0.0005, 0.001, 0.01, 0.1, 1.0, 50.0]])
    shown = brightness(heat_map(late_s, bin_s=1.0, most_s=1.0)[0, ::16])
    assert shown[0] == shown[1] == 0
    assert shown[4] == shown[5] == pytest.approx(255)
    assert np.diff(shown[1:5]) == pytest.approx(85, abs=2)


def test_noise_does_not_look_like_lateness() -> None:
    assert brightness(heat_map(np.full((4, 4), 1e-4), bin_s=1.0)[:-RULER]).max() == 0
    assert brightness(heat_map(np.full((4, 4), 2e-3), bin_s=1.0)[:-RULER]).max() < 100


def test_colours_rise_steadily_from_black_to_white() -> None:
    colours = _colours()
    assert (colours[0].tolist(), colours[-1].tolist()) == ([0, 0, 0], [255, 255, 255])
    assert (np.diff(brightness(colours)) > 0).all()
    # In colour, not only in grey.
    assert np.ptp(colours[128].astype(int)) > 50


def test_the_ruler_marks_minutes_and_in_long_runs_hours() -> None:
    minutes = np.flatnonzero(_ruler(600, 1.0)[0, :, 0])
    assert minutes.tolist() == [60 * n for n in range(1, 10)]
    hours = np.flatnonzero(_ruler(600, 60.0)[0, :, 0])
    assert hours.tolist() == [60 * n for n in range(1, 10)]
    assert len(np.flatnonzero(_ruler(1000, 3600.0)[0, :, 0])) <= 40


def test_the_ruler_matches_the_columns() -> None:
    marks = np.flatnonzero(heat_map(np.zeros((2, 20)), bin_s=30.0)[-1, :, 0])
    assert marks.tolist() == [32 * n for n in range(1, 10)]
    marks = np.flatnonzero(heat_map(np.zeros((2, 4000)), bin_s=1.0)[-1, :, 0])
    assert marks.tolist() == [150 * n for n in range(1, 7)]


@pytest.mark.parametrize("shape", [(0, 0), (4, 0), (1, 1)])
def test_a_run_without_times_has_a_picture(shape: tuple[int, int]) -> None:
    assert heat_map(np.zeros(shape), bin_s=1.0).ndim == 3


def test_the_input_is_unchanged() -> None:
    late_s = np.array([[np.nan, 0.5]])
    heat_map(late_s, bin_s=1.0)
    assert np.isnan(late_s[0, 0]) and late_s[0, 1] == 0.5
