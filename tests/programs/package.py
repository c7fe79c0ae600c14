"""Builds wheel and sdist, checks them, and trains from the wheel in an empty environment.

    python tests/programs/package.py [--torch "torch==2.13.0"] [--out dist]

The environment has torch and what the wheel asks for, and nothing else: there every module is imported, and a hang on
two ranks is told, also of a program that ``ncclsafe run`` guards. The demo, which comes out of the sdist, then runs
with the extra that it needs. Nothing of the checkout is on the path of either.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("build", "check-wheel-contents", "twine")
# Of one command; torch has to be downloaded.
LIMIT_S = 900.0

IMPORT_ALL = """
import importlib, pkgutil, sys, warnings
import lightning_ncclsafe as package
assert package.__file__.startswith(sys.prefix), package.__file__
names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of {package.__name__} {package.__version__} can be imported")
"""

HANG = """
import time
from datetime import timedelta
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_ncclsafe import SafeDDP


class Net(BoringModel):
    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            time.sleep(60)  # this line is the cause


if __name__ == "__main__":
    # Forked ranks need not import torch again, which on a busy machine takes longer than these limits.
    guarded = SafeDDP(start_method="fork", suspect_after=2, timeout=timedelta(seconds=5), report_dir="reports")
    L.Trainer(accelerator="cpu", devices=2, strategy=guarded, max_epochs=1, logger=False).fit(Net())
"""

# The same program where nobody has thought of a guard.
UNGUARDED = re.sub(r"SafeDDP\(.*\)", 'DDPStrategy(start_method="fork")', HANG).replace(
    "from lightning_ncclsafe import SafeDDP", "from lightning.pytorch.strategies import DDPStrategy"
)


def run(*command: object, cwd: Path, may_fail: bool = False) -> int:
    """Runs a command where nothing of the checkout is imported; ends this program where it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NCCLSAFE", "VIRTUAL"))}
    began = time.monotonic()
    code = subprocess.run([*map(str, command)], cwd=cwd, env=kept, timeout=LIMIT_S).returncode
    name = " ".join([Path(str(command[0])).name, *(str(part) for part in command[1:4])]).replace("\n", " ")[:70]
    print(f"--- {time.monotonic() - began:5.1f} s, status {code}: {name}", flush=True)
    if code and not may_fail:
        sys.exit(f"error: {name} has failed")
    return code


def environment(folder: Path) -> Path:
    """An empty one; its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def told(folder: Path, rule: str, file: str) -> None:
    """Ends this program unless the one report in a folder names this cause in this file."""
    reports = [*folder.glob("*/report.json")]
    findings = [json.loads(report.read_bytes())["findings"][0] for report in reports]
    first = findings[0] if len(findings) == 1 else {"rule": f"{len(findings)} reports"}
    if first["rule"] != rule or file not in first["location"]:
        sys.exit(f"error: expected one report of {rule} in {file}, found {first}")
    assert (reports[0].parent / "report.html").exists()
    print(f"told: {first['summary']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is to install first (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="ncclsafe-package-") as name:
        folder = Path(name)
        tools = environment(folder / "tools")
        run(tools / "python", "-m", "pip", "install", "--quiet", *TOOLS, cwd=folder)
        run(tools / "python", "-m", "build", "--outdir", out, ROOT, cwd=folder)
        [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
        run(tools / "twine", "check", "--strict", wheel, sdist, cwd=folder)
        run(tools / "check-wheel-contents", wheel, cwd=folder)

        empty = environment(folder / "empty")
        run(empty / "python", "-m", "pip", "install", "--quiet", *shlex.split(options.torch), cwd=folder)
        run(empty / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
        run(empty / "python", "-m", "pip", "check", cwd=folder)
        run(empty / "python", "-c", IMPORT_ALL, cwd=folder)
        run(empty / "ncclsafe", "explain", "rank-zero-only-work", cwd=folder)
        (folder / "hang.py").write_text(HANG)
        run(empty / "python", "hang.py", cwd=folder, may_fail=True)
        told(folder / "reports", "rank-zero-only-work", "hang.py")
        (folder / "unguarded.py").write_text(UNGUARDED)
        limits = ("--suspect-after", "2", "--timeout", "5", "--report-dir", "told")
        run(empty / "ncclsafe", "run", *limits, "unguarded.py", cwd=folder, may_fail=True)
        told(folder / "told", "rank-zero-only-work", "unguarded.py")

        run(empty / "python", "-m", "pip", "install", "--quiet", f"{wheel}[examples]", cwd=folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "sdist", filter="data")
        [unpacked] = (folder / "sdist").iterdir()
        # Beside the package a program would import that.
        shutil.rmtree(unpacked / "lightning_ncclsafe")
        run(empty / "python", "examples/digits.py", "--max-epochs", "1", cwd=unpacked)
        hang = ("examples/hangs/rank0_evaluation.py", "--start-method", "fork", "--root-dir", "runs")
        run(empty / "python", *hang, cwd=unpacked, may_fail=True)
        told(unpacked / "runs" / "ncclsafe", "rank-zero-only-work", "rank0_evaluation.py")
    for file in (wheel, sdist):
        print(f"{file.stat().st_size:>9,} bytes  {file}")


if __name__ == "__main__":
    main()
