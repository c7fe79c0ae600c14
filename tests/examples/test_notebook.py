"""The notebook, as a user runs it: its training hangs, is ended, and its report stands in the last cell."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "hang.ipynb"
# It hangs for eight seconds; before that a kernel starts and imports torch.
LIMIT_S = 150
EXECUTE = "import sys; from nbclient.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Its cells with their outputs, after it was executed from the first to the last."""
    folder = tmp_path_factory.mktemp("notebook")
    shutil.copy(NOTEBOOK, folder)
    # What Jupyter and IPython keep of a user is not looked at, and left alone.
    environ = os.environ | {name: str(folder) for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR")}
    with (folder / "output").open("w") as output:
        kernel = subprocess.Popen(
            [sys.executable, "-c", EXECUTE, "--timeout=80", "--inplace", NOTEBOOK.name],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = kernel.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(kernel.pid, signal.SIGKILL)
            kernel.wait()
    assert status == 0, (folder / "output").read_text()
    executed: list[dict[str, Any]] = json.loads((folder / NOTEBOOK.name).read_text())["cells"]
    return executed


def printed(cells: list[dict[str, Any]], stream: str) -> str:
    outputs = [output for cell in cells for output in cell.get("outputs", ()) if output.get("name") == stream]
    return "".join("".join(output["text"]) for output in outputs)


def test_the_hang_is_reported_and_the_kernel_survives(cells: list[dict[str, Any]]) -> None:
    assert not [output for cell in cells for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    assert printed(cells, "stderr").count("[ncclsafe] rank-zero-only-work: Rank 0 ") == 1
    said = printed(cells, "stdout")
    assert "terminated with exit code 124" in said
    [source] = ["".join(cell["source"]) for cell in cells if "# <- rank 0 is here" in "".join(cell["source"])]
    line = next(number for number, code in enumerate(source.splitlines(), 1) if "# <- rank 0 is here" in code)
    assert f".py:{line} in evaluate, batch 7 of epoch 0" in said.partition("rank-zero-only-work: Rank 0")[2]


def test_its_last_cell_shows_the_page(cells: list[dict[str, Any]]) -> None:
    [output] = cells[-1]["outputs"]
    page = "".join(output["data"]["text/html"])
    assert page.startswith('<div><iframe srcdoc="&lt;!doctype html&gt;') and page.endswith("</iframe></div>")
    assert "&lt;h1&gt;rank-zero-only-work&lt;/h1&gt;" in page and "# &amp;lt;- rank 0 is here" in page


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
