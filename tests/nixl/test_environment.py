"""Variables of the environment: each is set once, with a value that counts and with one that is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.connectors.nixl import _bindings, _utils, nixl_agent, nixl_agent_config
from kvxfer.connectors.nixl.statuses import NixlError

ROOT = Path(__file__).parents[2]


def _address(agent: Any) -> str:
    """The first address in the metadata; digits may follow, as what comes next is any bytes."""
    found = re.search(rb"tcp://[^\0]*?:\d+", agent.get_agent_metadata())
    assert found is not None
    return found[0].decode()


CASES: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    # variable: a value, what shows that it counts, a wrong value
    "KVXFER_NIXL_LISTEN": (
        "tcp://127.0.0.2:0",
        lambda agent: _address(agent).startswith("tcp://127.0.0.2:"),
        "127.0.0.1",
    ),
    "KVXFER_NIXL_ADVERTISE": (
        "tcp://10.1.2.3:77",
        lambda agent: _address(agent).startswith("tcp://10.1.2.3:77"),
        "10.1.2.3",
    ),
    "KVXFER_NIXL_TRANSPORTS": ("tcp, unix", lambda _: True, "carrier-pigeons"),
    "KVXFER_NIXL_TIMEOUT_S": ("7.5", lambda _: True, "soon"),
    "KVXFER_SECRET_FILE": ("{folder}/secret", lambda _: True, "{folder}/missing"),
}


@pytest.mark.parametrize("variable", CASES)
def test_a_variable_counts_and_a_wrong_value_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("a secret of a test, 32 bytes long\n")
    (tmp_path / "secret").chmod(0o600)
    value, counts, wrong = CASES[variable]
    monkeypatch.setenv(variable, value.format(folder=tmp_path))
    agent = nixl_agent("one", nixl_agent_config())
    assert counts(agent)
    agent.agent.close()
    for each in (wrong, *(("0", "-1", "nan") if variable.endswith("_S") else ())):
        monkeypatch.setenv(variable, each.format(folder=tmp_path))
        with pytest.raises(_bindings.nixlInvalidParamError, match=variable):
            nixl_agent("one", nixl_agent_config())


def test_the_device_is_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("first", "-1", "4096"):
        monkeypatch.setenv("KVXFER_NIXL_DEVICE", wrong)
        with pytest.raises(_bindings.nixlInvalidParamError, match="KVXFER_NIXL_DEVICE"):
            nixl_agent("one", nixl_agent_config())
    monkeypatch.setenv("KVXFER_NIXL_DEVICE", "1000")  # no machine has it, whether or not it has a GPU
    with pytest.raises(NixlError, match=r"(?i)gpu|cuda|device"):
        nixl_agent("one", nixl_agent_config())


def test_every_documented_variable_is_set_by_a_test() -> None:
    table = (ROOT / "connectors/nixl/README.md").read_text()
    documented = set(re.findall(r"^\| `(KVXFER_\w+)` \|", table, re.MULTILINE))
    assert documented == {*CASES, "KVXFER_NIXL_DEVICE"}


def test_messages_are_printed_from_info_on_unless_the_program_says_otherwise() -> None:
    program = (
        "from kvxfer.connectors.nixl.logging import get_logger as g; l = g('_x'); l.info('A'); l.debug('B')"
    )
    configured = "import logging; logging.basicConfig(level=logging.ERROR); " + program

    def run(program: str, **environment: str) -> str:
        environment = {**os.environ, **environment}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
        ).stdout

    assert re.fullmatch(r"[-\d]+ [:\d]+ NIXL INFO +<string>:1 A\n", run(program))
    assert run(program, NIXL_LOG_LEVEL="WARNING") == ""
    assert len(run(program, NIXL_LOG_LEVEL="DEBUG").splitlines()) == 2
    assert run(configured) == ""


def test_a_size_is_not_cut_off() -> None:
    for size in (-1, 2**64 + 16, 2**63):
        for call in (_utils.malloc_passthru, lambda n: _utils.ba_buf(0, n)):
            with pytest.raises(ValueError, match="is not a number of bytes"):
                call(size)
    one, other = _utils.malloc_passthru(8), _utils.malloc_passthru(8)
    _utils.ba_buf(one, 8)
    _utils.ba_buf(other, 8)
    _utils.verify_transfer(one, other, 8)
    _utils.ba_buf(one, 0)
    for address in (one, other):
        _utils.free_passthru(address)
