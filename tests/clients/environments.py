"""The environments that clients run in: one with torch, Lightning and this package, and on top of it one for each client.

What a client needs in another version than others do it gets in its own environment; nothing is installed twice that all
can share. All of it lies in a folder that git ignores.
"""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients"
BASE = FOLDER / "base"
INSTALL_LIMIT_S = 3600


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def make_base(torch: str) -> None:
    """What all clients share."""
    if (BASE / "ready").exists():
        return
    venv.create(BASE, with_pip=True)
    _pip(BASE, "--upgrade", "pip")
    _pip(BASE, torch, "--editable", str(ROOT))
    (BASE / "ready").touch()


def installed(client: str, requirements: Sequence[str]) -> Path | str:
    """The Python of a client, or why there is none."""
    if not requirements:
        return python_of(BASE)
    environment = FOLDER / client
    ready, wanted = environment / "ready", "\n".join(requirements)
    if not (ready.exists() and ready.read_text() == wanted):
        venv.create(environment, with_pip=False)
        _packages(environment).joinpath("base.pth").write_text(f"{_packages(BASE)}\n")
        try:
            _pip(environment, *requirements)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            return f"cannot be installed: {next((line for line in lines if line.startswith('ERROR')), lines[-1])}"
        except subprocess.TimeoutExpired:
            return "cannot be installed in an hour"
        ready.write_text(wanted)
    return python_of(environment)


def _packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))


def _pip(environment: Path, *arguments: str) -> None:
    """The pip of the base installs into all."""
    subprocess.run(
        [python_of(BASE), "-m", "pip", "--python", python_of(environment), "install", "--quiet", *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=INSTALL_LIMIT_S,
    )
