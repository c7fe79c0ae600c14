"""What is read with py-spy beside Python frames, and what is said of what it cannot read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until

from lightning_ncclsafe.inspecting.inspection import inspect
from lightning_ncclsafe.inspecting.looks import StackReader, denied_words, native_in
from lightning_ncclsafe.inspecting.ranks import SeenProcess
from lightning_ncclsafe.report.text import render_text


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error: Unsupported version of Python: 3.16.0", "pip install --upgrade py-spy"),
        ("Error: Failed to find python version from target process", "pip install --upgrade py-spy"),
        ("Error: Permission Denied: Try running again with elevated permissions", denied_words(1)),
        ("Error: No such process", "py-spy could not read its stack (Error: No such process)"),
        ("", "py-spy could not read its stack (no output)"),
    ],
)
def test_the_reason_is_one_line_with_a_remedy(said: str, words: str, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable} -S\nimport sys\nsys.exit({said!r})\n")
    program.chmod(0o755)
    threads, why = StackReader(str(program)).read(1)
    assert threads == () and words in why and "\n" not in why


def test_native_frames_below_the_last_python_frame_are_outermost_first() -> None:
    names = [("ncclWait", "/lib/libnccl.so.2"), ("all_reduce", None), ("main", None), ("Py_Main", "/lib/libpython.so")]
    frames = [{"name": name, "module": module} for name, module in [("poll", "/lib/libc.so.6"), *names]]
    other = {"os_thread_id": 8, "thread_name": "other", "frames": [{"name": "read", "module": "/lib/libc.so.6"}]}
    plain = [other, {"os_thread_id": 7, "thread_name": None, "frames": frames}]
    assert native_in(json.dumps(plain).encode(), 7) == ("ncclWait (libnccl.so.2)", "poll (libc.so.6)")


WAITS = """
import sys, threading
waits = threading.Event()
open(sys.argv[1], "w").close()
waits.wait(100)
"""


@pytest.mark.parametrize("may_stop", [False, True])
def test_native_frames_are_read_if_the_process_may_be_paused(may_stop: bool, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with subprocess.Popen([sys.executable, "-c", WAITS, str(begun)]) as process:
        try:
            until(begun.exists)
            environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
            seen = [SeenProcess(pid=process.pid, environment=environment)]
            said: list[str] = []
            (diagnosis,) = inspect(
                looks=2, over_s=0.2, may_stop=may_stop, say=said.append, processes=lambda: seen
            ).diagnoses
            assert process.poll() is None
        finally:
            process.kill()
    (facts,) = diagnosis.job.ranks
    assert facts.inspection is not None and said == []
    assert any("acquire_lock" in function for function in facts.inspection.native) is may_stop
    assert ("  native: " in render_text(diagnosis)) is may_stop


def test_missing_native_frames_are_explained_in_one_line(tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable} -S\nimport sys\nsys.exit('Error: no native unwinding here')\n")
    program.chmod(0o755)
    functions, why = StackReader(str(program)).native(1)
    assert (functions, why) == ((), "its native frames could not be read (Error: no native unwinding here)")
