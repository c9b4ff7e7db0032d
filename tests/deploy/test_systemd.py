"""The systemd unit: systemd's own check, and a daemon with the unit's command line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.serving import BOUND_S
from tests.deploy.command_line import serving

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvxfer.service"


def test_systemd_reads_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    text = UNIT.read_text()
    # This path is not installed here.
    (tmp_path / "kvxfer.service").write_text(text.replace("/opt/kvxfer/bin/kvxfer", sys.executable))
    done = subprocess.run(
        [analyze, "verify", "--man=no", tmp_path / "kvxfer.service"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "kvxfer" in line]
    assert not told
    assert done.returncode == 0, done.stderr


def test_its_command_is_one(tmp_path: Path) -> None:
    (found,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    (tmp_path / "secret").write_text("s" * 32)
    values = {
        "STATE_DIRECTORY": str(tmp_path / "state"),
        "RUNTIME_DIRECTORY": str(tmp_path / "run"),
        "CREDENTIALS_DIRECTORY": str(tmp_path),
    }
    filled = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], found).replace("$KVXFER_ARGUMENTS", "")
    with serving([*shlex.split(filled)[1:], "--listen", "127.0.0.1:0"]):
        pass
