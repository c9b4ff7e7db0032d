"""Machines that work and machines that fail; scripts stand in for qemu."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import pytest

from tests.rdma import machine
from tests.rdma.image import Image
from tests.rdma.machine import BootError, CommandLimitError, Machine, MachineError

#: Finds the shared folder and the accelerator among qemu's arguments.
HEAD: Final = """#!/bin/sh
for word in "$@"; do
  case $word in
    local,id=machine,*) folder=${word##*path=} ;;
    kvm | tcg) accelerator=$word ;;
  esac
done
"""


def scripted(tmp_path: Path, script: str, accelerator: str = "tcg") -> Machine:
    qemu = tmp_path / "qemu"
    qemu.write_text(HEAD + script)
    qemu.chmod(0o755)
    return Machine(Image(tmp_path), accelerator, qemu=str(qemu))


def test_output_and_status_are_the_commands(tmp_path: Path) -> None:
    script = 'touch "$folder/booted"; sh "$folder/command"; echo $? >"$folder/status"'
    stdout, stderr = io.BytesIO(), io.BytesIO()
    status = scripted(tmp_path, script).run(
        ["sh", "-c", 'echo "$WORD"; pwd; echo apart >&2; exit 7'],
        limit_s=60,
        environment={"WORD": "it's here"},
        stdout=stdout,
        stderr=stderr,
    )
    assert status == 7
    assert stdout.getvalue().decode().splitlines() == ["it's here", str(Path.cwd())]
    assert stderr.getvalue() == b"apart\n"


@pytest.mark.parametrize(
    ("script", "error", "says"),
    [
        ('echo Kernel panic >"$folder/console"', BootError, "Kernel panic"),
        ("echo no such option >&2; exit 1", BootError, "qemu ended with 1 before"),
        ("exec sleep 600", BootError, "had not booted under tcg"),
        ('touch "$folder/booted"; echo Out of memory >"$folder/console"', MachineError, "Out of memory"),
        ('touch "$folder/booted"; exec sleep 600', CommandLimitError, r"past its limit of 0\.1 s"),
    ],
    ids=["panic", "qemu refuses", "silent", "ends early", "command hangs"],
)
def test_a_machine_without_an_answer_is_an_error_with_its_reason(
    tmp_path: Path, script: str, error: type[MachineError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "booted" not in script:
        monkeypatch.setitem(machine._BOOT_LIMIT_S, "tcg", 0.1 if "sleep" in script else 60.0)
    with pytest.raises(error, match=says) as raised:
        scripted(tmp_path, script).run(["true"], limit_s=0.1)
    assert raised.type is error


def test_where_kvm_boots_nothing_it_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_kvm", lambda: True)
    script = '[ $accelerator = tcg ] || exit 1; touch "$folder/booted"; echo 0 >"$folder/status"'
    assert scripted(tmp_path, script, accelerator="").run(["true"], limit_s=60) == 0


def test_without_qemu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(BootError, match="qemu ended with 127"):
        Machine(Image(tmp_path), "tcg", qemu="/nowhere/qemu").run(["true"], limit_s=60)
