"""The daemon as a program: where it listens, what it refuses, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer.cli import main
from kvxfer.control import serve as module
from kvxfer.control.http.http_protocol import QuietServer
from kvxfer.control.http.listening import parse_listen, require_safe
from tests.control.authority import Authority, openssl
from tests.control.serving import BOUND_S, DIGEST, options, program, reasons_of, serving
from tests.waiting import until_on_loop


def pem_files(folder: Path) -> None:
    """Makes node.pem with node.key, another key, one with a password, and a file of a broken certificate."""
    Authority(folder / "tls").of_node()
    openssl(folder / "tls", "genpkey", "-algorithm", "ED25519", "-out", "other.pem")
    locked = ("-aes256", "-passout", "pass:secret", "-out", "locked.pem")
    openssl(folder / "tls", "pkey", "-in", "other.pem", *locked)
    broken = "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n"
    (folder / "tls/broken.pem").write_text(broken)


# What a command line has, and what the refusal names: the option, and what to do or what is wrong with it.
NOT_STARTED = (
    *((f"--listen {host}:0", "without TLS") for host in ("0.0.0.0", "[::]", "10.0.0.1", "example.org")),
    ("--listen 127.0.0.1.example.org:0", "without TLS"),
    *((f"--listen {text}", "--listen") for text in ("host", ":80", "host:", "host:65536", "host:-1", "h:٣")),
    ("--listen host.invalid:1 --tls-certificate node.pem --tls-key node.key", "--listen host.invalid"),
    ("--listen 192.0.2.1:1 --tls-certificate node.pem --tls-key node.key", "not an address of this"),
    ("--tls-certificate /no.pem --tls-key node.key", "--tls-certificate /no.pem cannot be read"),
    ("--tls-certificate node.pem --tls-key /no.key", "--tls-key /no.key cannot be read"),
    ("--tls-certificate node.pem --tls-key node.pem", "--tls-key node.pem does not hold a private key"),
    ("--tls-certificate node.pem --tls-key other.pem", "is not the key of --tls-certificate node.pem"),
    ("--tls-certificate node.pem --tls-key locked.pem", "--tls-key locked.pem has a password"),
    ("--tls-certificate broken.pem --tls-key node.key", "broken.pem holds a malformed certificate"),
    ("--tls-certificate node.pem --tls-key node.key --tls-client-ca /no.ca", "--tls-client-ca /no.ca"),
    ("--tls-certificate node.pem --tls-key node.key --tls-client-ca node.key", "--tls-client-ca node.key"),
    ("--tls-key k", "must be given together"),
    ("--tls-client-ca c", "needs TLS"),
    ("--allow 10.0.0.0/99", "10.0.0.0/99"),
    ("--secret-file /dev/null", "--secret-file /dev/null has 0 bytes"),
    ("--token reader=/etc/hostname", "write a role (read, transfer, admin)"),
    ("--token read=/etc/hostname", "a file with kvx_"),
    ("--token token", "--token token: write ROLE=FILE"),
    ("--runtime c/" + 60 * "d/", "name a folder with a shorter path"),
    ("--pool-gib 9e9", "--pool-gib 9e+09 is not possible: this machine has"),
    ("--log xml", "write plain or json"),
    ("--gpu 0", "own agent: leave --no-agent out"),
)


def test_it_says_why_it_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pem_files(tmp_path)
    with contextlib.chdir(tmp_path / "tls"):
        for number, (arguments, words) in enumerate(NOT_STARTED):
            folders = ("--state", str(tmp_path / f"s{number}"), "--runtime", str(tmp_path / f"r{number}"))
            status = main(["serve", *folders, "--no-agent", *arguments.split()])
            said = capsys.readouterr().err
            assert (status, words in said, "listening on" in said) == (2, True, False), (arguments, said)


def test_an_address_of_this_host_needs_no_tls() -> None:
    for host, port in (("127.0.0.1", 80), ("127.1.2.3", 1), ("::1", 0), ("localhost", 65535)):
        assert parse_listen(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") == (host, port)
        require_safe(host, None)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--gpu", "99"], {}, "GPU"),
        (
            ["--no-agent", "--secret-file", __file__],
            {"KVXFER_TLS_CERTIFICATE": "node.pem"},
            "certificates or a",
        ),
        (["--no-agent", "--listen", "127.0.0.1:{port}"], {}, "is in use: stop the other program"),
    ],
)
def test_a_daemon_that_cannot_run_ends_without_a_traceback(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [each.replace("{port}", str(taken.getsockname()[1])) for each in arguments]
        command = [sys.executable, "-m", "kvxfer", "serve", "--state", str(tmp_path / "s"), "--listen", ""]
        done = subprocess.run(
            [*command, "--runtime", str(tmp_path / "r"), *given],
            capture_output=True,
            text=True,
            check=False,
            timeout=BOUND_S,
            env={**os.environ, **environment},
        )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_it_answers_before_its_own_agent_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loaded = threading.Event()
    monkeypatch.setattr(module, "_load_own", lambda with_pool: is_loaded.wait(BOUND_S))
    daemon = serving(tmp_path, own_agent=True, pool_gib=1 / 64)
    starting = asyncio.create_task(daemon.__aenter__())
    try:
        await until_on_loop((tmp_path / "run/api.sock").exists)
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "run/api.sock"))
        async with httpx.AsyncClient(transport=transport, base_url="http://node", timeout=BOUND_S) as client:
            assert (await client.get("/healthz")).status_code == 200
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["it is starting"])
            asked = {"model": "m", "keys": ["k"], "layout": DIGEST}
            refused = await client.post("/v1/pages/pin", json=asked)
            assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
            is_loaded.set()
            await starting
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.post("/v1/pages/pin", json=asked)).status_code == 200
    finally:
        is_loaded.set()
        await starting
        await daemon.__aexit__(None, None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told_to_and_leaves_no_socket(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path) as daemon, daemon.client() as client:
        assert client.get("/v1/node").status_code == 200
        ends: list[int] = []

        def watch() -> None:
            with client.stream("GET", "/v1/events") as stream:
                started.set()
                ends.extend(1 for _ in stream.iter_lines())
                ends.append(-1)

        started = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        assert started.wait(BOUND_S)
        assert daemon.end(number) == 0
        watcher.join(BOUND_S)
        assert ends[-1] == -1, "the stream ended as a stream does"
    assert not (tmp_path / "run/api.sock").exists()


def test_a_socket_that_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    with program(tmp_path) as daemon:
        daemon.end(signal.SIGKILL)
    assert (tmp_path / "run/api.sock").exists()
    with program(tmp_path):
        transport = httpx.HTTPTransport(uds=str(tmp_path / "run/api.sock"))
        with httpx.Client(transport=transport, base_url="http://node", timeout=BOUND_S) as client:
            assert client.get("/v1/whoami").json()["role"] == "admin"


@pytest.mark.parametrize("shared", ["--state", "--runtime"])
def test_a_folder_of_another_daemon_is_refused_and_stays_that_ones(tmp_path: Path, shared: str) -> None:
    folders = {"--state": tmp_path / "state", "--runtime": tmp_path / "run"}
    with program(tmp_path) as daemon, daemon.client() as client:
        command = [sys.executable, "-m", "kvxfer", "serve", "--listen", "", "--no-agent"]
        for option, folder in folders.items():
            command += [option, str(folder if option == shared else tmp_path / "other")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
        assert done.returncode == 2
        assert "another daemon uses" in done.stderr
        assert f"name another folder ({shared})" in done.stderr
        assert str(folders[shared]) in done.stderr
        assert (tmp_path / "run/api.sock").exists()
        assert client.get("/v1/node").status_code == 200


def test_a_required_transport_that_cannot_be_had_is_a_reason(tmp_path: Path) -> None:
    with program(tmp_path, "--require", "cuda_ipc") as daemon, daemon.client() as client:
        ready = client.get("/readyz")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert reason.startswith("transport cuda_ipc is required: ")
        assert daemon.said[-1].endswith(f" not ready: {reason}")
        assert reasons_of(client) == {"transport"}


async def test_a_listener_that_fails_ends_the_daemon_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(server: object, listener: socket.socket) -> None:
        listener.close()
        raise OSError("no certificate")

    monkeypatch.setattr(QuietServer, "run_on", fail)
    with pytest.raises(OSError, match="no certificate"):
        await module.serve(options(tmp_path), asyncio.Event())


# The rest that `kvxfer serve` takes; `program` gives four more.
ALL_OPTIONS = {
    "--host-name": "127.0.0.1",
    "--tls-certificate": "tls/node.pem",
    "--tls-key": "tls/node.key",
    "--tls-client-ca": "tls/ca.pem",
    "--agent-listen": "tcp://127.0.0.1:0",
    "--agent-advertise": "tcp://localhost",
    "--secret-file": "secret",
    "--directory": "unix:run/api.sock",
    "--pool-gib": "0.01",
    "--pages-dir": "kv",
    "--pages-gib": "0.25",
    "--allow": "10.0.0.0/8,localhost",
    "--require": "shm,tcp",
    "--most-transfers": "10",
    "--token": "read=token",
    "--otlp": "http://127.0.0.1:9",
    "--log": "json",
    "--stop-after-s": "1",
}


def test_a_daemon_starts_with_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Authority(tmp_path / "tls").of_node()
    monkeypatch.chdir(tmp_path)
    secret = f"kvx_{'0' * 16}_{'x' * 43}"
    for name, text in (("secret", "a shared secret of agents"), ("token", secret)):
        Path(name).touch(mode=0o600)
        Path(name).write_text(text)
    trusted = ssl.create_default_context(cafile="tls/ca.pem")
    trusted.load_cert_chain("tls/node.pem", "tls/node.key")
    given = dict(ALL_OPTIONS)
    spec = importlib.util.find_spec
    if spec("opentelemetry") is None or spec("opentelemetry.exporter") is None:
        del given["--otlp"]
    with (
        program(tmp_path, *chain.from_iterable(given.items()), agent=True) as daemon,
        httpx.Client(
            base_url=daemon.url,
            verify=trusted,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=BOUND_S,
        ) as client,
    ):
        assert client.get("/readyz").json() == {"ready": True, "reasons": []}
        entries = client.get("/v1/directory").json()["items"]
        assert [entry["name"] for entry in entries] == ["daemon/node-a", "daemon/node-a/memory"]
        assert all(entry["address"].startswith("tcp://localhost:") for entry in entries)
        assert client.get("/v1/pools").json()["items"]
        assert daemon.end() == 0, daemon.said


def test_every_option_of_each_command_is_run_by_a_test() -> None:
    """Those of `kvxfer serve` by one start together."""
    from typer.main import get_command

    from kvxfer.cli.app import build

    group: Any = get_command(build())
    texts = [path.read_text() for path in (Path(__file__).parents[1]).rglob("test_*.py")]
    whole = "\n".join(texts)
    # A machine with a GPU is needed for the one.
    left_out = {"--gpu", "--help", "--install-completion", "--show-completion"}
    missing = []
    for name, command in group.commands.items():
        verbs = getattr(command, "commands", {}) if name != "bench" else {}
        for verb, of in {"": command, **verbs}.items():
            options = {each for parameter in of.params for each in parameter.opts if each.startswith("--")}
            missing += [
                f"{name} {verb} {option}"
                for option in sorted(options - left_out)
                if f'"{option}"' not in whole
            ]
    assert not missing
    given = {*ALL_OPTIONS, "--state", "--runtime", "--node", "--listen", "--agent", "--no-agent"}
    serve = {each for parameter in group.commands["serve"].params for each in parameter.opts}
    assert serve - left_out <= given
