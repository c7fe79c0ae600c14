"""A training on two ranks that goes on from a checkpoint comes to the same weights, bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, ranks_of

PROGRAM = Path(__file__).with_name("resumed_fit.py")
LIMIT_S = 150
BATCHES, WINDOW, SAMPLES = 11, 3, 22


@pytest.fixture(scope="module")
def told(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("resumed")
    codes, output = warm.run([str(PROGRAM), str(folder)], folder, timeout_s=LIMIT_S, envs=ranks_of(2))
    assert codes == [0, 0], output
    (line,) = (line for line in output.splitlines() if line.startswith('{"whole"'))
    return json.loads(line), output


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize(("step", "batches"), [(2, 6), (4, BATCHES), (6, BATCHES + 2 * WINDOW)])
def test_a_resumed_fit_ends_with_the_same_weights(told: tuple[dict[str, Any], str], step: int, batches: int) -> None:
    whole, later = told[0]["whole"], told[0][f"from {step}"]
    assert later["batches"] == whole["batches"][batches:], "it starts with the very next batch"
    assert later["weights"] == whole["weights"]
    assert later["step"] == whole["step"] == 2 * (BATCHES // WINDOW + 1)
    assert later["loaded"] == 2 * SAMPLES - 2 * batches, "no sample is loaded again"


@pytest.mark.timeout(LIMIT_S + 10)
def test_an_iterable_dataset_restarts_its_epoch(told: tuple[dict[str, Any], str]) -> None:
    found, output = told
    assert found["stream"]["batches"] == [*range(BATCHES)] * 2
    assert output.count("training restarts epoch 0 from its first batch, after 6 batches") == 1


@pytest.mark.timeout(LIMIT_S + 10)
def test_only_a_resumed_start_prints_its_checkpoint(told: tuple[dict[str, Any], str]) -> None:
    lines = [line for line in told[1].splitlines() if "resuming from" in line]
    assert [re.findall(r"step=(\d+)", line) for line in lines] == [["2"], ["4"], ["6"], ["2"]]
