"""What Lightning's strategies promise, ours keep: both train side by side, in few whole programs, and come to the same.

Every comparison is exact: losses, metrics, weights and predictions to the last bit, the random numbers that come next,
names in checkpoints, profiles.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Warm, ranks_of

PROGRAM = Path(__file__).with_name("conformance.py")
LIMIT_S = 150
# The first test waits for its program while others start.
FIRST = [("both-parallel",), ("data-parallel",), ("ddp",)]
AT_ONCE = 2

Found = dict[str, dict[str, Any]]


def run_program(warm: Warm, folder: Path, name: str) -> list[Found]:
    """What each rank has found."""
    ranks = 4 if name == "both-parallel" else 2
    envs = [env | {"OMP_NUM_THREADS": "1"} for env in ranks_of(ranks)]
    codes, output = warm.run([str(PROGRAM), name, str(folder)], folder, timeout_s=LIMIT_S, envs=envs)
    assert codes == [0] * ranks, output
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("safe/**/report.json"))]
    tables = [path.read_text() for path in sorted(folder.glob("safe/ncclsafe/collectives/*-collectives.txt"))]
    return [one | {"said": output, "reports": reports, "tables": tables} for one in found]


def both(outcome: list[Found], check: str) -> list[Any]:
    """What each rank has come to, which is the same with both strategies."""
    for found in outcome:
        assert found[check]["safe"] == found[check]["stock"]
    return [found[check]["safe"] for found in outcome]


def on(*names: str) -> pytest.MarkDecorator:
    """A test for each of these programs."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.program(name)) for name in names])


@on("ddp", "data-parallel", "tensor-parallel")
def test_all_trainer_calls_match_stock(outcome: Any, name: str) -> None:
    for told in both(outcome, "plain"):
        first, again = told["first"]["losses"], told["again"]["losses"]
        assert len(again) == 2 * len(first) > 0 and again[: len(first)] == first
        assert told["first"]["weights"] != told["again"]["weights"]
        assert "val_loss" in told["others"][0][0] and "test_loss" in told["others"][1][0]
        assert len(told["predicted"]) == len(first)
        assert "[Strategy]Strategy.training_step" in told["profiled"]


@on("ddp", "data-parallel", "tensor-parallel", "both-parallel")
def test_ranks_and_data_shards_match_the_mesh(outcome: Any, name: str) -> None:
    is_plain = name != "both-parallel"
    told = [told["first"] if is_plain else told for told in both(outcome, "plain" if is_plain else "watched")]
    assert [one["ranks"][:2] for one in told] == [[len(told), rank] for rank in range(len(told))]
    shares = [(one["sampler"]["rank"], one["sampler"]["num_replicas"]) for one in told]
    assert (
        shares
        == {
            "ddp": [(0, 2), (1, 2)],
            "data-parallel": [(0, 2), (1, 2)],
            "tensor-parallel": [(0, 1), (0, 1)],
            "both-parallel": [(0, 2), (0, 2), (1, 2), (1, 2)],
        }[name]
    )
    # Peers see equal batches, others do not.
    losses = {share: [one["losses"] for one, its in zip(told, shares, strict=True) if its == share] for share in shares}
    assert all(alike == [alike[0]] * len(alike) for alike in losses.values())
    assert len({tuple(alike[0]) for alike in losses.values()}) == len(losses)


@on("ddp", "data-parallel", "fsdp")
def test_mixed_precision_and_accumulation_match_stock(outcome: Any, name: str) -> None:
    told = both(outcome, "accumulated")
    assert {one["precision"] for one in told} == {"FSDPPrecision" if name == "fsdp" else "MixedPrecision"}
    assert {one["steps"] for one in told} == {2}


@on("ddp", "tensor-parallel")
def test_manual_optimization_matches_stock(outcome: Any, name: str) -> None:
    assert all(told["steps"] == len(told["losses"]) > 0 for told in both(outcome, "manual"))


@on("ddp")
def test_data_is_read_at_the_same_moments_as_in_stock(outcome: Any, name: str) -> None:
    """Losses, metrics and subsequent random numbers are also compared with stock."""
    told = both(outcome, "played")
    assert [len(one["whole"]["losses"]) for one in told] == [10, 10]
    # Two batches make a step, and Lightning reads one ahead where it does not know how many come.
    sanity_check, first, second = [0], [0, 0, 0, 1, 1], [3, 3, 3, 4, 4]
    played_at = [*sanity_check, *first, 3, 3, 3, *second, 6, 6, 6]
    assert [one["whole"]["played at"] for one in told] == [played_at] * 2
    assert [len(one["limited"]["losses"]) for one in told] == [6, 6]
    assert [len(one["in a worker"]["losses"]) for one in told] == [10, 10]


@on("ddp", "fsdp")
def test_early_stopping_matches_stock(outcome: Any, name: str) -> None:
    assert {(told["stopped"], told["waited"], told["steps"]) for told in both(outcome, "stopped_early")} == {(1, 1, 8)}


@on("ddp", "data-parallel")
def test_a_checkpoint_on_an_exception_matches_stock(outcome: Any, name: str) -> None:
    assert all(told == {"steps": 2, "saved": "broken.ckpt"} for told in both(outcome, "broken"))


@on("ddp")
def test_weight_averaging_matches_stock(outcome: Any, name: str) -> None:
    assert {told["steps"] for told in both(outcome, "averaged")} == {12}


@on("ddp")
def test_sync_batch_norm_refuses_cpus_with_the_same_message(outcome: Any, name: str) -> None:
    assert all("SyncBatchNorm" in told["raised"] for told in both(outcome, "synchronised_norm"))


@on("ddp")
def test_a_compiled_model_matches_stock(outcome: Any, name: str) -> None:
    plain, compiled = both(outcome, "plain"), both(outcome, "compiled")
    assert [one["losses"] for one in compiled] == [one["first"]["losses"] for one in plain]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=pytest.mark.program(name))
        for name, how in [
            ("ddp", "whole"),
            ("data-parallel", "whole"),
            ("data-parallel", "in parts"),
            ("both-parallel", "whole"),
        ]
    ],
)
def test_checkpoints_of_either_strategy_can_be_resumed_by_both(outcome: Any, name: str, how: str) -> None:
    for told in both(outcome, f"checkpoint {how}"):
        resumed = told["resumed"]
        # Whoever has saved it, and whoever resumes: both() has compared the latter.
        assert resumed["safe"] == resumed["stock"]
        assert resumed["safe"]["steps"] == 8 and len(resumed["safe"]["losses"]) == 4
        assert "loops" in told["saved"]["keys"]
        if how == "in parts":
            assert told["saved"]["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
        else:
            assert told["saved"]["of model"] == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


@on("both-parallel")
def test_all_guard_features_change_no_result_and_cover_mesh_groups(outcome: Any, name: str) -> None:
    both(outcome, "watched")
    for rank, found in enumerate(outcome):
        # Everybody, and the rank's column and row in the mesh of two by two.
        groups = [(0, 1, 2, 3), (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)]
        assert found["own"]["stock"]["while"] == {str(group): 1800 for group in groups}
        assert found["own"]["safe"] == {
            "while": {str(group): 115 for group in groups},
            "after": {str(group): 1800 for group in groups},
        }
    said = outcome[0]["said"]
    if torch.__version__ < "2.11":
        return  # stock came first in this process, and has made the recorder: it is off by default there
    (table,) = outcome[0]["tables"]
    assert all(f"\n{group} " in table for group in ("mesh_data_parallel", "mesh_tensor_parallel"))
    # However late ranks are on this machine meanwhile: of so few steps nothing is printed, and nobody is named.
    assert "collectives of" not in said
    assert re.search(r"rank \d+ (was last|is no longer late)", said + table, re.IGNORECASE) is None
    assert "\nrank " not in table
    assert "failed and is off" not in said and "Traceback" not in said and "different-settings" not in said


@on("data-parallel")
def test_slow_gathering_of_a_full_checkpoint_is_diagnosed(outcome: Any, name: str) -> None:
    findings = [report["findings"][0] for report in outcome[0]["reports"]]
    assert ("slow-checkpoint", [0]) in [(finding["rule"], finding["ranks"]) for finding in findings]
