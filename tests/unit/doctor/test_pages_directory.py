"""doctor: a directory for pages in files. Real directories, of a disk and of memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.doctor import pages_directory, report
from kvxfer.doctor.finding import Finding, State

ROOT = Path("/")
HERE = Path(__file__).parent
SHM = Path("/dev/shm")
ON_TMPFS = pages_directory.file_system(SHM, ROOT).found.startswith("tmpfs")


@pytest.fixture(params=[HERE, SHM], ids=["disk", "memory"])
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=request.param) as made:
        yield Path(made)


def by_name(directory: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in pages_directory.examine(directory, ROOT)}


def test_a_directory_of_ones_own_is_examined_and_left_as_it_was(directory: Path) -> None:
    found = by_name(directory)
    assert set(found) == {"directory", "file system", "direct I/O", "room"}
    assert found["directory"].state is State.GOOD
    assert "mode 0700" in found["directory"].found
    if found["direct I/O"].state is State.GOOD:
        assert "4096 bytes were written and came back" in found["direct I/O"].found
    else:  # of overlayfs, for example
        assert "local disk" in found["direct I/O"].change
    assert not list(directory.iterdir())


@pytest.mark.skipif(not ON_TMPFS, reason="/dev/shm is no tmpfs here")
def test_memory_is_no_disk() -> None:
    finding = pages_directory.file_system(SHM, ROOT)
    assert finding.state is State.LIMITS
    assert "name a directory on a local disk" in finding.change


@pytest.mark.parametrize(
    ("mode", "files", "change"),
    [
        (0o755, [], "chmod 700 {}"),
        (0o770, ["format", "00000.pages"], "chmod 700 {}"),
        (0o1777, ["somebody's"], "{}/kvxfer-pages"),
        (0o500, [], "chmod 700 {}"),
    ],
)
def test_a_directory_that_others_may_enter_blocks(
    mode: int, files: list[str], change: str, directory: Path
) -> None:
    for name in files:
        (directory / name).touch()
    directory.chmod(mode)
    finding = by_name(directory)["directory"]
    directory.chmod(0o700)
    assert finding.state is State.BLOCKS
    assert f"mode {mode:04o}" in finding.found
    assert finding.change.endswith(change.format(directory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_directory_blocks(directory: Path) -> None:
    os.chown(directory, 4242, -1)
    finding = by_name(directory)["directory"]
    assert finding.state is State.BLOCKS
    assert finding.change == f"run the daemon as user 4242, or chown 0 {directory}"


def test_where_there_is_no_directory_yet_its_parent_is_examined(directory: Path) -> None:
    found = by_name(directory / "pages")
    assert found["directory"].state is State.GOOD
    assert "room" in found
    found = by_name(directory / "no" / "pages")
    assert found["directory"].state is State.BLOCKS
    assert found["directory"].change.endswith(f"install -d -m 700 -o {os.geteuid()} {directory}/no/pages")
    (directory / "file").touch()
    assert by_name(directory / "file")["directory"].change == "name a directory"


def test_a_directory_that_takes_no_files_blocks() -> None:
    finding = pages_directory.direct(Path("/proc"))
    assert finding.state is State.BLOCKS
    assert "no file can be made in /proc" in finding.found


MOUNTS = """22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / {0}/a\\040b rw - xfs /dev/nvme0n1 rw
24 22 0:41 / {0}/net rw shared:4 - nfs4 server:/pages rw
25 22 0:42 / {0}/over rw - overlay overlay rw
26 25 0:43 / {0}/over rw - fuse.sshfs there: rw
nonsense
"""


@pytest.mark.parametrize(
    ("inside", "state", "words"),
    [
        ("elsewhere", State.GOOD, "ext4 on /dev/vda"),
        ("a b/pages", State.GOOD, "xfs on /dev/nvme0n1"),
        ("net", State.LIMITS, "nfs4 on server:/pages: a server's"),
        ("over", State.LIMITS, "fuse.sshfs on there:: served by a program"),
        ("network", State.GOOD, "ext4 on /dev/vda"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(
    inside: str, state: State, words: str, tmp_path: Path
) -> None:
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(MOUNTS.format(tmp_path))
    finding = pages_directory.file_system(tmp_path / inside, tmp_path)
    assert finding.state is state
    assert finding.found.startswith(words)
    shutil.rmtree(mounts.parent)
    assert pages_directory.file_system(tmp_path / inside, tmp_path).state is State.NOTE


def test_the_report_has_it_only_if_a_directory_is_named(directory: Path) -> None:
    subjects = [finding.subject for finding in report.examine((), ROOT, directory).findings]
    assert subjects.count(pages_directory.SUBJECT) == 4
    assert all(finding.subject != pages_directory.SUBJECT for finding in report.examine((), ROOT).findings)
