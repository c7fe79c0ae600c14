"""What distinguishes hosts and containers, of which many have one name."""

import os
import socket
from pathlib import Path

import pytest

from lightning_ncclsafe.code import this_host
from lightning_ncclsafe.code.this_host import host_boot_id, host_name, process_space


@pytest.fixture
def boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    told = tmp_path / "boot_id"
    told.write_text("6d0cfe11-22\n")
    monkeypatch.setattr(this_host, "_BOOT_ID", told)
    return told


def test_hosts_are_identified_by_their_boot_id(boot_id: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_boot_id() == "6d0cfe11-22"
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    boot_id.write_text("\n")
    assert host_boot_id() == "node7"
    boot_id.unlink()
    assert host_boot_id() == "node7"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("node7", "node7"),
        ("localhost", "localhost-6d0cfe11"),
        ("localhost.lan", "localhost.lan-6d0cfe11"),
    ],
)
def test_a_host_without_a_name_of_its_own_gets_one(
    name: str, words: str, boot_id: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert host_name() == words


def test_ids_of_processes_of_hosts_with_one_name_are_not_mixed_up(
    boot_id: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "train@er")
    here = process_space()
    assert "@" not in here and here.startswith("trainer-6d0cfe11-")
    boot_id.write_text("7a00aa00-22\n")
    assert process_space() != here
    boot_id.write_text("6d0cfe11-22\n")
    monkeypatch.setattr(os, "stat", lambda path: os.stat_result((0, 4711, *[0] * 8)))
    assert process_space() == "trainer-6d0cfe11-4711"
