"""Programs that know nothing of this package: they are run as Python runs them, and train the same, guarded."""

import re
import subprocess
from pathlib import Path

import pytest
from warm import Warm, environment, ranks_of

PROGRAM = Path(__file__).with_name("stock_fit.py")
LIMIT_S = 100
ABOUT_ITSELF = """
import os, signal, sys
print(sys.argv, __file__, __name__, __spec__ and __spec__.name, sys.path, sys.flags, sys.stdin.isatty())
print(sorted(vars(sys.modules["__main__"])))
print({name: value for name, value in os.environ.items() if not name.startswith("NCCLSAFE")})
class End(Exception): pass
def end():
    match sys.argv[1]:
        case "raise": raise End(__name__)
        case "exit": sys.exit(7)
        case "words": sys.exit("in words")
        case "signal": os.kill(os.getpid(), signal.SIGTERM)
        case "interrupt": os.kill(os.getpid(), signal.SIGINT)
end()
"""


@pytest.mark.parametrize(
    ("program", "end"),
    [
        *((["about_itself.py"], end) for end in ("raise", "exit", "words", "signal", "interrupt")),
        (["-m", "package.about_itself"], "raise"),
    ],
)
def test_a_program_is_as_python_runs_it(program: list[str], end: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "about_itself.py").write_text(ABOUT_ITSELF)
    plain, ours = (
        subprocess.run(
            [installed, "-O", *start, *program, end, "--timeout", "-5"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
        )
        for start in ([], ["-m", "lightning_ncclsafe", "--timeout", "60"])
    )
    assert ours.stdout == plain.stdout and "about_itself" in plain.stdout
    assert (ours.stderr, ours.returncode) == (plain.stderr, plain.returncode) and plain.returncode != 0


def trained(warm: Warm, folder: Path, installed: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The exit code of a training, and what it has said."""
    # Whoever is started from it starts as an installed Python does.
    env = {"PYTHON": str(installed), **variables}
    (code,), output = warm.run([str(PROGRAM), *arguments], folder, timeout_s=LIMIT_S, envs=[env])
    return code, output


def weights(output: str) -> list[str]:
    return re.findall(r"weights [0-9a-f]{64}", output)


@pytest.fixture(scope="module")
def stock(warm: Warm, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The weights that come of it without us."""
    code, output = trained(warm, tmp_path_factory.mktemp("stock"), installed, "fork")
    assert code == 0 and "[ncclsafe]" not in output, output
    assert len(weights(output)) == 1
    return weights(output)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("start", ["fork", "popen", "own-spawn"])
def test_all_ranks_train_the_same_and_are_guarded(
    start: str, stock: list[str], warm: Warm, installed: Path, tmp_path: Path
) -> None:
    code, output = trained(warm, tmp_path, installed, start, NCCLSAFE="1", NCCLSAFE_SUSPECT_AFTER="77")
    assert code == 0 and weights(output) == stock, output
    assert output.count("[ncclsafe] watching 2 ranks: reports a wait of 77 s") == output.count("[ncclsafe]") == 1
    assert sorted(re.findall(r"rank \d is guarded: (?:True|False)", output)) == [
        f"rank {rank} is guarded: True" for rank in range(2)
    ], output


@pytest.mark.timeout(LIMIT_S + 20)
def test_with_recommended_callbacks_too(stock: list[str], warm: Warm, installed: Path, tmp_path: Path) -> None:
    code, output = trained(warm, tmp_path, installed, "fork", NCCLSAFE="1", NCCLSAFE_CALLBACKS="recommended")
    assert code == 0 and weights(output) == stock, output
    assert "callbacks HostPreflight DatasetAgreement LoaderTuner LoggerOffload CollectiveTimer" in output


@pytest.mark.timeout(LIMIT_S + 20)
def test_where_a_rank_is_without_all_are(stock: list[str], warm: Warm, installed: Path, tmp_path: Path) -> None:
    """And train as ever."""
    first, second = (rank | {"PYTHON": str(installed)} for rank in ranks_of(2))
    envs = [first | {"NCCLSAFE": "1"}, second]
    codes, output = warm.run([str(PROGRAM), "popen"], tmp_path, timeout_s=LIMIT_S, envs=envs)
    assert codes == [0, 0] and weights(output) == stock, output
    (_, line) = (line for line in output.splitlines() if "[ncclsafe]" in line)
    assert line.startswith("[ncclsafe] not all ranks have the guard, so it is off on all of them"), output


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_hang_is_told(warm: Warm, installed: Path, tmp_path: Path) -> None:
    code, output = trained(
        warm, tmp_path, installed, "fork", "hang", NCCLSAFE="1", NCCLSAFE_SUSPECT_AFTER="1.5", NCCLSAFE_TIMEOUT="4"
    )
    assert code != 0
    assert "[ncclsafe] rank-zero-only-work: Rank 0 is working alone" in output, output
    assert "stock_fit.py:" in output and weights(output) == []
