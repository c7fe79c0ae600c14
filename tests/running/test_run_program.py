"""Programs that know nothing of this package: they are run as Python runs them, and train the same, guarded."""

import re
import subprocess
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import Warm, environment, ranks_of

PROGRAM = Path(__file__).with_name("stock_fit.py")
LIMIT_S = 150
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
def test_a_program_runs_as_under_python(program: list[str], end: str, installed: Path, tmp_path: Path) -> None:
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


STOCK = ("fork",)
SUSPECTS = ("NCCLSAFE=1", "NCCLSAFE_SUSPECT_AFTER=77")
FORKED, POPEN, OWN_SPAWN = ("fork", *SUSPECTS), ("popen", *SUSPECTS), ("own-spawn", *SUSPECTS)
WITH_CALLBACKS = ("fork", "NCCLSAFE=1", "NCCLSAFE_CALLBACKS=recommended")
# Its ranks are started each for itself, and the variable is there on the first one.
ON_ONE_RANK = ("popen", "NCCLSAFE=1", "each")
HANG = ("fork", "hang", "NCCLSAFE=1", "NCCLSAFE_SUSPECT_AFTER=1.5", "NCCLSAFE_TIMEOUT=4")
FIRST = [OWN_SPAWN, POPEN, HANG]
NEEDS = ("installed",)


@dataclass
class Outcome:
    """The exit codes of a training, and what it has said."""

    codes: list[int]
    output: str

    @property
    def weights(self) -> list[str]:
        return re.findall(r"weights [0-9a-f]{64}", self.output)


Programs = dict[tuple[str, ...], "Future[Outcome]"]


def run_program(warm: Warm, folder: Path, *arguments: str, installed: Path) -> Outcome:
    variables = dict(one.split("=") for one in arguments if "=" in one)
    argv = [str(PROGRAM), *(one for one in arguments if one != "each" and "=" not in one)]
    # Whoever is started from it starts as an installed Python does.
    envs = [rank | {"PYTHON": str(installed)} for rank in (ranks_of(2) if "each" in arguments else [{}])]
    envs[0] |= variables
    # Both ranks that are spawned; the one that is started as a program is one of an installed Python.
    children = 2 if arguments[0] == "own-spawn" else 0
    return Outcome(*warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs, children=children))


def trained_as_stock(programs: Programs, program: tuple[str, ...]) -> str:
    """What a training has said that has come to the same weights as the one without us."""
    stock, outcome = programs[STOCK].result(), programs[program].result()
    assert stock.codes == [0] and "[ncclsafe]" not in stock.output, stock.output
    assert len(stock.weights) == 1
    assert not any(outcome.codes) and outcome.weights == stock.weights, outcome.output
    return outcome.output


@pytest.mark.program(*STOCK)
@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=pytest.mark.program(*one), id=one[0]) for one in (FORKED, POPEN, OWN_SPAWN)]
)
def test_guarded_ranks_train_like_stock(program: tuple[str, ...], programs: Programs) -> None:
    output = trained_as_stock(programs, program)
    assert output.count("[ncclsafe] watching 2 ranks: reports a wait of 77 s") == output.count("[ncclsafe]") == 1
    assert sorted(re.findall(r"rank \d is guarded: (?:True|False)", output)) == [
        f"rank {rank} is guarded: True" for rank in range(2)
    ], output


@pytest.mark.program(*STOCK)
@pytest.mark.program(*WITH_CALLBACKS)
def test_ranks_with_recommended_callbacks_train_like_stock(programs: Programs) -> None:
    output = trained_as_stock(programs, WITH_CALLBACKS)
    assert "callbacks HostPreflight DatasetAgreement LoaderTuner LoggerOffload CollectiveTimer" in output


@pytest.mark.program(*STOCK)
@pytest.mark.program(*ON_ONE_RANK)
def test_the_guard_is_off_on_all_ranks_if_one_lacks_it(programs: Programs) -> None:
    """They train as without the guard."""
    output = trained_as_stock(programs, ON_ONE_RANK)
    (_, line) = (line for line in output.splitlines() if "[ncclsafe]" in line)
    assert line.startswith("[ncclsafe] not all ranks have the guard, so it is off on all of them"), output


@pytest.mark.program(*HANG)
def test_a_hang_is_reported(outcome: Outcome) -> None:
    assert outcome.codes != [0]
    assert "[ncclsafe] rank-zero-only-work: Rank 0 is working alone" in outcome.output, outcome.output
    assert "stock_fit.py:" in outcome.output and outcome.weights == []
