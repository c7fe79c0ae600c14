"""The suite on the versions that are supported, each session in an environment of its own.

    nox --report runs/matrix/report.json [--session NAME] [-- ARGUMENT OF tests/suite.py...]
    python noxfile.py

The second prints what has become of the sessions of the first, as a table for docs/compatibility.md.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nox

RESULTS = Path("runs/matrix")
# Each has the newest compatible version of every package that is not named.
SESSIONS = {
    # ``lightning`` asks for any ``pytorch-lightning``, and would get today's. Its RichProgressBar needs that rich.
    "oldest": ("3.10", "torch==2.8.0", "lightning==2.5.0", "pytorch-lightning==2.5.0", "rich<14.1"),
    "today": ("3.11", "torch==2.13.0", "lightning"),
    "newest": ("3.13", "torch", "lightning"),
    "newest-3.14": ("3.14", "torch", "lightning"),
    "pytorch-lightning": ("3.11", "torch==2.13.0", "pytorch-lightning"),
}
# With ``pytorch-lightning`` alone, programs use these names instead of those on the left.
OTHER_NAMES = {
    r"\blightning\.pytorch\b": "pytorch_lightning",
    r"\blightning\.fabric\b": "lightning_fabric",
    r"\blightning_ncclsafe\.lightning\b": "lightning_ncclsafe.pytorch_lightning",
    r"\bimport lightning as L\b": "import pytorch_lightning as L",
    r"\bfrom lightning import\b": "from pytorch_lightning import",
}
# Files of a checkout that are not part of the repository; and the package, which is used as it is.
LEFT_OUT = (
    ".git",
    ".nox",
    ".venv",
    ".clients",
    ".*_cache",
    "build",
    "dist",
    "runs",
    "__pycache__",
    "lightning_ncclsafe",
)
# These are about both names. What needs both packages is skipped where one is missing.
OF_BOTH_NAMES = {"test_import_names.py", "other_name.py"}

nox.options.default_venv_backend = "venv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

if shutil.which("pyenv") and "PYENV_VERSION" not in os.environ:
    # Of pyenv's interpreters, only those that are chosen are found under their names.
    found = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=True).stdout.split()
    os.environ["PYENV_VERSION"] = ":".join(reversed(found))


def suite(session: nox.Session) -> None:
    """Runs the suite, as ``make test`` does."""
    _, *wanted = SESSIONS[session.name]
    results = (RESULTS / f"{session.name}.json").resolve()
    results.unlink(missing_ok=True)
    session.install("--upgrade", *wanted, "--editable", ".[test]")
    if "lightning" not in {re.split("[=<>!]", each)[0] for each in wanted}:
        session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", "lightning")
        # Not in the folder of create_tmp, which also sets TMPDIR: the paths of unix sockets are short.
        session.chdir(under_the_other_name(Path(session.virtualenv.location)))
    session.run("python", "tests/suite.py", "--json", str(results), *session.posargs)


def under_the_other_name(folder: Path) -> Path:
    """A copy of this repository whose tests, examples and pages import ``pytorch_lightning``."""
    copy = folder / "repository"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(".", copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (copy / "lightning_ncclsafe").symlink_to(Path("lightning_ncclsafe").resolve())
    for file in [*copy.glob("docs/**/*"), *copy.glob("tests/**/*"), *copy.glob("examples/**/*")]:
        if file.suffix in {".py", ".md", ".yaml", ".ipynb"} and file.name not in OF_BOTH_NAMES:
            text = file.read_text()
            for pattern, name in OTHER_NAMES.items():
                text = re.sub(pattern, name, text)
            file.write_text(text)
    return copy


for name, (python, *_) in SESSIONS.items():
    nox.session(suite, name=name, python=python)


def table(sessions: list[dict[str, Any]]) -> str:
    """What has become of them, in Markdown."""
    rows = ["| | Python | torch | Lightning | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    for session in sessions:
        name, results = session["name"], RESULTS / f"{session['name']}.json"
        if "not found" in (session["reason"] or ""):
            cells = [f"not tried: no Python {SESSIONS[name][0]} here"]
        elif results.exists():
            cells = cells_of(json.loads(results.read_text()))
        else:
            cells = ["not tried: its environment could not be set up, or the suite did not start"]
        rows.append(f"| {' | '.join([name, *cells, *[''] * (6 - len(cells))])} |")
    return "\n".join(rows)


def cells_of(results: dict[str, Any]) -> list[str]:
    """Those of a session that ran: versions, and how many tests passed, failed and were skipped."""
    versions, counts = results["versions"], results["counts"]
    package = "lightning" if "lightning" in versions else "pytorch-lightning"
    passed, failed, skipped = (str(counts.get(outcome, 0)) for outcome in ("passed", "failed", "skipped"))
    if results["lost"]:
        failed += f"; the run was ended: {results['lost']}"
    return [versions["python"], versions["torch"], f"{package} {versions[package]}", passed, failed, skipped]


if __name__ == "__main__":
    print(table(json.loads((RESULTS / "report.json").read_text())["sessions"]))
