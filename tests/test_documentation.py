"""What the documentation shows is what is in our files, and what happens."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
from warm import Warm, ranks_of

from lightning_ncclsafe.guard.ending import EXIT_CODE

DOCS = Path(__file__).parents[1] / "docs"
LIMIT_S = 150
FIRST = [(True,)]
# Of the program on the page: what is to be deleted, so that it trains.
MISTAKE = re.compile(r"\n    def on_train_epoch_end.*?\n\n\n", re.DOTALL)


def blocks(page: str, *languages: str) -> list[str]:
    """What stands in the blocks of a page, without its indentation."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"^( *)```(?:{'|'.join(languages)})\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [dedent(block) for _, block in found]


@pytest.mark.parametrize(
    ("block", "file"),
    zip(
        blocks("how/adding-a-cause.md", "python", "text"),
        ("lightning_ncclsafe/rules/hang/at_breakpoint.py", "tests/rules/scenes.py", "tests/rules/scenes.py"),
        strict=True,
    ),
    ids=["rule", "scene", "registration"],
)
def test_documented_code_matches_its_file(block: str, file: str) -> None:
    assert block.strip() in (DOCS.parent / file).read_text()


def run_program(warm: Warm, folder: Path, has_mistake: bool) -> tuple[list[int], str, Path]:
    """The exit codes of two ranks of the program on the first page, what they said, and where."""
    program = blocks("start.md", "python")[0]
    mended, count = MISTAKE.subn("\n\n", program)
    assert count == 1 and len(program.splitlines()) - len(mended.splitlines()) == 7
    path = folder / "train.py"
    path.write_text(program if has_mistake else mended)
    return *warm.run([str(path)], folder, timeout_s=LIMIT_S, envs=ranks_of(2)), folder


def said(output: str) -> str:
    """In one line, with what differs from run to run and from version to version left out."""
    words = " ".join(output.replace("[ncclsafe]", " ").split())
    return re.sub(r"(?<=for )\d+(?= s)|(?<=sequence number )\d+", "…", words)


@pytest.mark.program(True)
def test_the_program_on_the_first_page_hangs_as_documented(outcome: tuple[list[int], str, Path]) -> None:
    codes, output, folder = outcome
    # In what the other rank waits depends on Lightning.
    shown, waits, _ = said(blocks("start.md", "text")[0]).partition(", while rank 1 waits in ")
    assert waits and shown + waits in said(output), output
    assert codes == [EXIT_CODE, EXIT_CODE]
    assert {path.name for path in folder.glob("ncclsafe/*/*")} >= {"report.html", "report.json", "report.txt"}


@pytest.mark.program(False)
def test_the_corrected_program_trains_and_prints_one_line(outcome: tuple[list[int], str, Path]) -> None:
    codes, output, folder = outcome
    assert codes == [0, 0], output
    ours = [line for line in output.splitlines() if "[ncclsafe]" in line]
    assert len(ours) == 1 and ours[0].startswith("[ncclsafe] watching 2 ranks"), output
    assert not (folder / "ncclsafe").exists()
