"""An environment with this package in it: its Python loads what an installed one brings."""

import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import lightning_ncclsafe
from lightning_ncclsafe import running

PACKAGE = Path(lightning_ncclsafe.__file__).parent


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "_below.pth").write_text(f"{PACKAGE.parent}\n{sysconfig.get_path('purelib')}\n")
    shutil.copy(Path(running.__path__[0]) / "lightning_ncclsafe.pth", packages)
    return folder / "bin" / "python"
