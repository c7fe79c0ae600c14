"""What `make clients` counts as different; the clients themselves are trained by it only."""

import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import run  # noqa: E402
from run import (  # noqa: E402
    CLIENTS,
    OURS,
    Compared,
    Outcome,
    Told,
    compared,
    contents,
    differences,
    median_interval,
    points,
    said_of,
    sentence,
    table,
)

FIT = {"losses": ["0x1p+0"], "weights": "abc", "guarded": True, "steps_s": [0.1], "fit_s": 1.0}


def outcome(**changed: object) -> Outcome:
    usual = {
        "codes": [0, 0],
        "found": [{"fits": [FIT]}, {"fits": [FIT]}],
        "logged": ["loss 1"],
        "checkpoints": {"one.ckpt": ["4 123"]},
        "incidents": [],
        "lines": 10,
    }
    return Outcome(**(usual | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"lines": 20}, []),
        ({"found": [{"fits": [FIT]}, {"fits": [FIT | {"fit_s": 2.0, "steps_s": [0.2]}]}]}, []),
        ({"found": [{"fits": [FIT]}, {"fits": [FIT | {"weights": "abd"}]}]}, ["weights of rank 1"]),
        ({"found": [{"fits": [FIT]}, None]}, ["0 fits came to their end, not 1: rank 1"]),
        ({"found": [{"raised": "ValueError"}, {"fits": [FIT]}]}, ["raised ValueError, not None: rank 0"]),
        ({"codes": [0, None]}, ["exit codes [0, None], not [0, 0]"]),
        ({"logged": []}, ["logged points"]),
        ({"checkpoints": {"one.ckpt": ["4 124"]}}, ["what is in checkpoints"]),
        ({"checkpoints": {}}, ["checkpoints [], not ['one.ckpt']"]),
        ({"incidents": ["incident-1"]}, ["reported incident-1"]),
        ({"found": [{"fits": [FIT | {"guarded": False}]}, {"fits": [FIT]}]}, []),
    ],
)
def test_whatever_a_run_leaves_counts_except_time_and_lines(changed: dict[str, object], told: list[str]) -> None:
    assert differences(outcome(), outcome(**changed), "plain") == told


def test_what_differs_is_excused_by_two_runs_of_stock_that_do_and_not_by_their_lack_of_a_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fits(weights: str, *, guarded: bool) -> Outcome:
        return outcome(found=2 * [{"fits": [FIT | {"weights": weights, "guarded": guarded}]}])

    def verdict(again: str) -> Compared:
        found = {
            ("stock", 0): fits("abc", guarded=False),
            ("SafeDDP", 0): fits("abd", guarded=True),
            ("safe_callbacks", 0): fits("abc", guarded=True),
            ("run", 0): fits("abc", guarded=False),
            ("stock", 1): fits(again, guarded=False),
        }
        monkeypatch.setattr(run, "trained", lambda _, client, strategy, variant, attempt=0: found[strategy, attempt])
        return compared(None, "pina", "plain")  # type: ignore[arg-type]

    assert verdict("abc").why_not == ""
    weights, no_guard = ([f"{what} rank {rank}" for rank in (0, 1)] for what in ("weights of", "no guard on"))
    assert verdict("abc").differences == {"SafeDDP": weights, "safe_callbacks": [], "run": no_guard}
    assert verdict("abe").why_not.startswith("two runs of stock differ: weights of rank 0")


def test_where_a_run_is_ended_only_how_it_ends_counts() -> None:
    cut_short = outcome(found=[None, None], checkpoints={}, logged=[], incidents=["incident-1"])
    assert differences(outcome(), cut_short, "sigint") == []
    assert differences(outcome(), outcome(codes=[0, 130]), "sigint") == ["exit codes [0, 130], not [0, 0]"]


def test_points_are_those_of_the_client(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("collectives/all_reduce/wait_ms,epoch,loss,step,straggler/rank\n,0,0.5,1,\n3.0,0,,1,1\n")
    assert points(file) == ["[('epoch', '0'), ('loss', '0.5'), ('step', '1')]"]


def test_a_checkpoint_is_compared_by_its_tensors_alone(tmp_path: Path) -> None:
    for name, path, number in (("one", "here", b"1.0"), ("two", "there", b"1.0"), ("three", "here", b"2.0")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name}/data.pkl", path)
            archive.writestr(f"{name}/data/0", number)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") != contents(tmp_path / "three")


def test_the_interval_of_a_median_is_what_the_binomial_distribution_says() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([float(value) for value in range(1, 6)]) == (1.0, 5.0)
    assert median_interval([float(value) for value in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([float(value) for value in range(1, 21)]) == (6.0, 15.0)


def test_the_table_says_what_was_not_equal_and_what_could_not_be_tried() -> None:
    equal: dict[str, list[str]] = {strategy: [] for strategy in OURS}
    told = Told(
        "chemprop",
        compared=[
            Compared("chemprop", "plain", differences=equal | {"safe_callbacks": ["logged points"]}),
            Compared("chemprop", "resume", why_not="has no way to resume"),
            Compared("chemprop", "spawn", differences=equal),
        ],
    )
    _, _, row, other = table([told, Told("darts", why_not="cannot be installed")]).splitlines()
    assert row.startswith("| chemprop | 2 of 2 | 1 of 2 (not plain) | 2 of 2 |")
    assert other.startswith("| darts | cannot be installed |")
    assert sentence(told.compared[1]).startswith("chemprop, resume: has no way to resume")


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_needs_is_known_without_importing_it(client: str) -> None:
    assert isinstance(said_of(client)["REQUIREMENTS"], list)
    assert isinstance(said_of(client)["MONITOR"], str)
