"""Environments that clients are installed in: each has its own, on top of the one that this program runs in.

What that one has, torch above all, is there for all; what a client needs in another version, it gets in its own. They
lie in a folder that git ignores.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from lightning_ncclsafe import running

FOLDER = Path(__file__).parents[3] / ".clients"
LIMIT_S = 3600


def installed(client: str, requirements: Sequence[str]) -> Path | str:
    """The Python of a client, or why there is none."""
    if not requirements:
        return Path(sys.executable)
    environment = FOLDER / client
    python, ready, wanted = environment / "bin" / "python", environment / "ready", "\n".join(requirements)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    is_ready = ready.exists() and ready.read_text() == wanted
    if not is_ready:
        venv.create(environment, with_pip=False)
        (packages / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # What is below has it for its own interpreter only.
    shutil.copy(Path(running.__path__[0]) / "lightning_ncclsafe.pth", packages)
    if is_ready:
        return python
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requirements],
            check=True,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        return f"cannot be installed: {next((line for line in lines if line.startswith('ERROR')), lines[-1])}"
    except subprocess.TimeoutExpired:
        return f"cannot be installed within {LIMIT_S} s"
    ready.write_text(wanted)
    return python
