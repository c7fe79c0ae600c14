"""Hosts compared by ranks that are threads, and from the command line."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, ranks_of

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.errors import HostPreflightError
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.facts import DirectoryFacts, LoadFacts, Phase, PreflightFacts, Progress, RankFacts, SwapFacts
from lightning_ncclsafe.preflight import check
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.probes.process.environment import Launched, launched
from lightning_ncclsafe.report import folder as report_folder
from lightning_ncclsafe.settings import OnProblem

HEALTHY = PreflightFacts(versions={"torch": "2.13.0"})
UNUSABLE = DirectoryFacts(role="logs", path="/logs", problem="Permission denied")


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment only, and where that is too short it is said."""
    monkeypatch.setattr(report_folder, "write_page", lambda *_: "")


class Job:
    """Ranks that look at hosts of which the test says what they are."""

    def __init__(
        self, looks: list[Callable[[], PreflightFacts]], on_problem: OnProblem, folder: Path, told: Any = None
    ) -> None:
        shared = SharedMemory()
        self.said: list[str] = []
        self.exchanges = [MemoryExchange(shared) for _ in looks]
        self.ranks = [
            Preflight(
                look,
                on_problem=on_problem,
                identity=RankFacts(rank=rank, host=f"host-{rank}", progress=Progress(phase=Phase.INIT)),
                world_size=len(looks),
                report_dir=folder,
                say=self.said.append,
                printed=told,
            )
            for rank, look in enumerate(looks)
        ]
        for one in self.ranks:
            one.begin()

    def run(self, act: Callable[[Preflight, MemoryExchange], Any] = Preflight.compare) -> list[Any]:
        """What becomes of each rank: what it returns, or its error."""
        outcomes: list[Any] = [None] * len(self.ranks)

        def body(rank: int) -> None:
            try:
                outcomes[rank] = act(self.ranks[rank], self.exchanges[rank])
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


def job(folder: Path, *facts: PreflightFacts, on_problem: OnProblem = "warn") -> Job:
    return Job([lambda found=found: found for found in facts], on_problem, folder)  # type: ignore[misc]


def test_nothing_is_printed_about_healthy_hosts(tmp_path: Path) -> None:
    ranks = job(tmp_path, HEALTHY, HEALTHY)
    assert [agreed.complete for agreed in ranks.run()] == [True, True]
    assert ranks.said == [] and [*tmp_path.iterdir()] == []


def test_a_difference_is_printed_once_with_a_report(tmp_path: Path) -> None:
    ranks = job(tmp_path, HEALTHY, PreflightFacts(versions={"torch": "2.9.1"}))
    ranks.run()
    (text,) = ranks.said
    assert "different-versions" in text and "2.9.1" in text
    (folder,) = tmp_path.iterdir()
    assert str(folder) in text and (folder / "report.json").exists()
    assert folder.name.endswith("Z-incident-1")


def test_a_second_call_prints_only_new_problems_and_still_raises(tmp_path: Path) -> None:
    told: set[Any] = set()
    other = DirectoryFacts(role="checkpoints", path="/checkpoints", problem="Permission denied")
    said = []
    for found in ((UNUSABLE,), (UNUSABLE,), (other,)):
        ranks = Job([lambda found=found: PreflightFacts(directories=found)], "warn", tmp_path, told)  # type: ignore[misc]
        ranks.run()
        said.append(ranks.said)
    assert [len(texts) for texts in said] == [1, 0, 1]
    assert "/checkpoints" in said[2][0]
    for _ in range(2):
        refused = Job([lambda: PreflightFacts(directories=(UNUSABLE,))], "raise", tmp_path, told).run()
        assert isinstance(refused[0], HostPreflightError) and "/logs" in str(refused[0])


def test_a_fatal_problem_raises_on_all_ranks(tmp_path: Path) -> None:
    ranks = job(tmp_path, PreflightFacts(directories=(UNUSABLE,)), HEALTHY, on_problem="raise")
    errors = ranks.run()
    assert all(isinstance(error, HostPreflightError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "unusable-directory" in str(errors[1]) and "Permission denied" in str(errors[1])
    assert [finding.rule for finding in errors[1].findings] == ["unusable-directory"]
    assert ranks.said == [], "the error makes a printed message unnecessary"


def test_a_slowdown_does_not_raise(tmp_path: Path) -> None:
    swaps = PreflightFacts(swap=SwapFacts(total_bytes=10**9, used_bytes=10**9, swapped_out_bytes=10**8))
    ranks = job(tmp_path, swaps, HEALTHY, on_problem="raise")
    assert all(agreed.complete for agreed in ranks.run())
    assert "swap-in-use" in ranks.said[0]


def test_a_failing_check_does_not_fail_the_run(tmp_path: Path) -> None:
    ranks = Job([lambda: HEALTHY, lambda: 1 / 0], "raise", tmp_path)  # type: ignore[list-item,return-value]
    assert all(agreed.complete for agreed in ranks.run())


def test_a_slow_check_does_not_delay_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LOOK_S", -0.9)
    gate = threading.Event()

    def look() -> PreflightFacts:
        gate.wait(20)
        return HEALTHY

    ranks = Job([lambda: HEALTHY, look], "raise", tmp_path)
    try:
        assert all(agreed.complete for agreed in ranks.run())
    finally:
        gate.set()


def test_clocks_are_compared_with_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job(tmp_path, HEALTHY, HEALTHY)
    ranks.run()
    zero, one = (rank._found for rank in ranks.ranks)
    assert zero is not None and zero.clock_offset_s == 0.0
    assert one is not None and one.clock_offset_s is not None and one.clock_error_s is not None
    # Of threads of one process: the same clock, seen after at most a poll and what a busy machine adds.
    assert -one.clock_error_s <= one.clock_offset_s < 1


def test_loader_needs_are_compared_later_without_repeating_findings(tmp_path: Path) -> None:
    limited = PreflightFacts(versions={"torch": "2.9.1"}, open_files_limit=1024, open_files=10)
    ranks = job(tmp_path, PreflightFacts(versions={"torch": "2.13.0"}, open_files_limit=1024, open_files=10), limited)
    ranks.run()
    ranks.run(lambda one, _: one.compare_load(LoadFacts(loader_workers=64, batches_in_flight=4096)))
    first, second = ranks.said
    assert "different-versions" in first and "different-versions" not in second
    assert "too-few-open-files" in second


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched()),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            Launched(rank=5, local_rank=1, world_size=8, master_addr="a", master_port=29500),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "3",
                "SLURM_NTASKS": "4",
                "MASTER_ADDR": "b",
                "MASTER_PORT": "1234",
            },
            Launched(rank=3, local_rank=3, world_size=4, master_addr="b", master_port=1234),
        ),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Launched()),  # nobody says where the others are
        ({"RANK": "8", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}, Launched()),
        ({"RANK": "x", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}, Launched()),
    ],
)
def test_the_rank_comes_from_the_launchers_environment(environment: dict[str, str], expected: Launched) -> None:
    assert launched(environment) == expected


def test_the_command_checks_this_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["preflight", "--log-dir", str(tmp_path), "--all"]) == 0
    said = capsys.readouterr().out
    assert f"logs at {tmp_path}" in said and "/dev/shm" in said and "torch: " in said
    assert [*tmp_path.iterdir()] == []


def test_the_command_fails_if_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["preflight", "--log-dir", str(tmp_path / "file")]) == 1
    assert "unusable-directory" in capsys.readouterr().out


def test_ranks_of_a_launcher_meet_and_one_prints(warm: Warm, tmp_path: Path) -> None:
    program = tmp_path / "command.py"
    program.write_text("import sys\nfrom lightning_ncclsafe.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    envs = [{**env, "RANK": env["LOCAL_RANK"], "NCCL_TIMEOUT": "3"} for env in ranks_of(2)]
    codes, output = warm.run([str(program), "preflight"], tmp_path, timeout_s=40, envs=envs)
    assert codes == [0, 0], output
    assert output.count("ignored-settings") == 1 and "Ranks 0-1" in output and "NCCL_TIMEOUT" in output


def test_a_rank_that_reaches_no_other_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_ncclsafe._torch import stores

    within_s = []

    def unreachable(*_: Any, timeout_s: float) -> Any:
        within_s.append(timeout_s)
        raise RuntimeError("connect() timed out")

    monkeypatch.setattr(stores, "launched_store", unreachable)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    for timeout in ([], ["--timeout", "3"], ["--timeout", "inf"]):
        assert main(["preflight", "--log-dir", str(tmp_path), *timeout]) == 2
        assert "rank 1 cannot reach the other ranks at nowhere:1: connect() timed out" in capsys.readouterr().err
    assert within_s == [5.0, 1.5, 86_400.0], "half of it, as torch tries twice"


def test_an_unreachable_host_is_reported_in_one_line(tmp_path: Path) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", "import sys; from lightning_ncclsafe.cli import main; sys.exit(main())"]
    command += ["preflight", "--log-dir", str(tmp_path), "--timeout", "0.2"]
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"} | job
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=40)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 1 cannot reach") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("port", ["99999999", "65536", "0", "-1", "abc"])
def test_an_invalid_port_is_a_single_error(port: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert main(["preflight"]) == 2
    said = f"error: MASTER_PORT={port} is not a port; set it to a number from 1 to 65535, the same on all ranks\n"
    assert capsys.readouterr().err == said
    assert launched({"MASTER_ADDR": "a", "MASTER_PORT": port}) == Launched(), "without a launcher no peers"


@pytest.mark.parametrize("option", ["--workers=-5", "--timeout=0"])
def test_numbers_out_of_range_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["preflight", option])
    assert ended.value.code == 2 and "does not conform to restriction v>" in capsys.readouterr().err


def test_a_missing_interface_is_an_error_on_a_single_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    said_code = main(["preflight", "--log-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert "GLOO_SOCKET_IFNAME=nope fits no interface of the host" in said
    # With a GPU, gloo is only the second back end.
    assert said_code == (1 if "error: unreachable-interface" in said else 0)
