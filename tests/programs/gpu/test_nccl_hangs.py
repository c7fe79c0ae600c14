"""The five example hangs on NCCL: the verdict and the end that they have on gloo."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hit_rate import HANGS, TRUTHS, errors
from one_gpu import Ended, run_ranks

from lightning_ncclsafe.guard.ending import EXIT_CODE

LIMIT_S = 150
# Each waits for its limits most of the time; more at once would make one another late.
AT_ONCE = 2
pytestmark = pytest.mark.timeout(len(TRUTHS) * LIMIT_S)

# Started alone its ranks disagree before the first step, and nothing has to be woken.
BEFORE_THE_FIRST_STEP = "unseeded_split"


@dataclass
class Outcome:
    """How the ranks of an example have ended, and what was reported, in the order of incidents."""

    ended: Ended
    reports: list[dict[str, Any]]


def run_hang(name: str, folder: Path) -> Outcome:
    """Runs an example until it ends by itself: each rank is a node with one device, which is the same for all."""
    limits = ("--suspect-after", "4", "--timeout", "12", "--stall", "90")
    arguments = [str(HANGS / f"{name}.py"), "--devices", "1", "--root-dir", str(folder / "root"), *limits]
    ended = run_ranks(arguments, 2, folder, timeout_s=LIMIT_S)
    paths = sorted(folder.glob("root/ncclsafe/*/report.json"))
    return Outcome(ended, [json.loads(path.read_text()) for path in paths])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[Outcome]"]]:
    """Of all examples."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run_hang, name, tmp_path_factory.mktemp(name)) for name in TRUTHS}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_verdict_is_that_of_gloo(name: str, outcomes: dict[str, "Future[Outcome]"]) -> None:
    outcome = outcomes[name].result()
    assert outcome.reports, outcome.ended.story
    # The last word on the first incident, too: it is written over the first one.
    assert not errors(name, outcome.reports[0]), outcome.ended.story


@pytest.mark.parametrize("name", TRUTHS)
def test_all_ranks_end_by_themselves_and_not_with_zero(name: str, outcomes: dict[str, "Future[Outcome]"]) -> None:
    ended = outcomes[name].result().ended
    assert None not in ended.exit_codes and 0 not in ended.exit_codes, ended.story


@pytest.mark.parametrize("name", TRUTHS)
def test_a_rank_that_waits_in_nccl_is_ended(name: str, outcomes: dict[str, "Future[Outcome]"]) -> None:
    ended = outcomes[name].result().ended
    if name == BEFORE_THE_FIRST_STEP:
        assert all("DatasetMismatchError" in said for said in ended.said), ended.story
        return
    culprit = TRUTHS[name].rank
    assert all(ended.exit_codes[rank] == EXIT_CODE for rank in range(2) if rank != culprit), ended.story
