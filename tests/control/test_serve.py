"""The daemon as a program: where it listens, what it refuses, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path

import httpx
import pytest

from kvxfer.control import serve as module
from kvxfer.control.http_protocol import QuietServer
from kvxfer.control.listening import Tls, parse_listen, require_safe
from kvxfer.errors import UsageError
from tests.control.engines import until
from tests.control.serving import BOUND_S, options, program, serving
from tests.control.test_access import DIGEST
from tests.control.waiting import until as wait_until


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_listen_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:65536", "host:-1", "host:x", "host:٣"])
def test_listen_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="--listen"):
        parse_listen(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org"])
def test_other_hosts_reach_it_by_tls_alone(host: str) -> None:
    with pytest.raises(UsageError, match="without TLS"):
        require_safe(host, None)
    require_safe(host, Tls(Path("c"), Path("k")))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_host_needs_none(host: str) -> None:
    require_safe(host, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:0"], "without TLS"),
        (["--listen", "nonsense"], "--listen"),
        (
            ["--listen", "host.invalid:1", "--tls-certificate", "cert.pem", "--tls-key", "key.pem"],
            "--listen host.invalid",
        ),
        (
            ["--listen", "192.0.2.1:1", "--tls-certificate", "cert.pem", "--tls-key", "key.pem"],
            "not an address of this",
        ),
        (
            ["--tls-certificate", "/no.pem", "--tls-key", "key.pem"],
            "--tls-certificate /no.pem cannot be read: No such",
        ),
        (
            ["--tls-certificate", "/", "--tls-key", "key.pem"],
            "--tls-certificate / cannot be read: Is a directory",
        ),
        (
            ["--tls-certificate", "cert.pem", "--tls-key", "/no.key"],
            "--tls-key /no.key cannot be read: No such file",
        ),
        (
            ["--tls-certificate", "key.pem", "--tls-key", "key.pem"],
            "--tls-certificate key.pem does not hold a certificate",
        ),
        (
            ["--tls-certificate", "cert.pem", "--tls-key", "cert.pem"],
            "--tls-key cert.pem does not hold a private key in PEM",
        ),
        (
            ["--tls-certificate", "cert.pem", "--tls-key", "other.pem"],
            "is not the key of --tls-certificate cert.pem",
        ),
        (["--tls-certificate", "cert.pem", "--tls-key", "locked.pem"], "--tls-key locked.pem has a password"),
        (
            ["--tls-certificate", "broken.pem", "--tls-key", "key.pem"],
            "broken.pem holds a malformed certificate",
        ),
        (
            ["--tls-certificate", "cert.pem", "--tls-key", "key.pem", "--tls-client-ca", "/no.ca"],
            "--tls-client-ca /no.ca cannot be read: No such file",
        ),
        (
            ["--tls-certificate", "cert.pem", "--tls-key", "key.pem", "--tls-client-ca", "key.pem"],
            "--tls-client-ca key.pem does not hold a certificate in PEM",
        ),
        (["--tls-key", "k"], "must be given together"),
        (["--tls-client-ca", "c"], "needs TLS"),
        (["--allow", "10.0.0.0/99"], "10.0.0.0/99"),
        (["--secret-file", "/nothing"], "--secret-file /nothing cannot be read: No such file"),
        (["--secret-file", "/dev/null"], "--secret-file /dev/null has 0 bytes"),
        (["--secret", "/nothing"], "/nothing"),
        (["--token", "reader=/etc/hostname"], "write a role (read, transfer, admin)"),
        (["--token", "read=/etc/hostname"], "a file with kvx_"),
        (["--token", "read=/nothing"], "--token read=/nothing: the file cannot be read: No such file"),
        (["--token", "token"], "--token token: write ROLE=FILE"),
        (["--token", "read="], "--token read=: write ROLE=FILE"),
        (["--runtime", "c/" + 60 * "d/"], "name a folder with a shorter path"),
        (["--pool-gib", "9e9"], "--pool-gib 9e+09 is not possible: this machine has"),
        (["--gpu", "0"], "own agent: leave --no-agent out"),
        (["--log", "xml"], "write plain or json"),
        (["--secret", __file__], "an agent uses certificates or a secret"),
    ],
)
def test_it_says_why_it_does_not_start(
    tmp_path: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words.startswith("an agent uses certificates"):
        monkeypatch.setenv("KVXFER_TLS_CERTIFICATE", "node.pem")
    if any(option.startswith("--tls") for option in arguments):
        pem_files(tmp_path)
    command = [sys.executable, "-m", "kvxfer.control", "--state", str(tmp_path / "s")]
    command += ["--runtime", str(tmp_path / "r"), "--no-agent", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "listening on" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvxfer.control", "--state", str(tmp_path / "s"), "--listen", ""]
    command += ["--runtime", str(tmp_path / "r"), "--gpu", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == 2
    assert "GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvxfer.control", "--state", str(tmp_path / "s")]
        command += ["--runtime", str(tmp_path / "r"), "--no-agent", "--listen", f"127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == 2
    assert f"--listen 127.0.0.1:{port} is in use: stop the other program" in done.stderr
    assert "listening on" not in done.stderr


async def test_it_answers_before_its_own_agent_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loaded = threading.Event()
    monkeypatch.setattr(module, "_load_own", lambda with_pool: is_loaded.wait(BOUND_S))
    daemon = serving(tmp_path, own_agent=True, pool_gib=1 / 64)
    starting = asyncio.create_task(daemon.__aenter__())
    try:
        await until((tmp_path / "run/api.sock").exists)
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
        command = [sys.executable, "-m", "kvxfer.control", "--listen", "", "--no-agent"]
        for option, folder in folders.items():
            command += [option, str(folder if option == shared else tmp_path / "other")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
        assert done.returncode == 2
        assert "another daemon uses" in done.stderr
        assert f"name another folder ({shared})" in done.stderr
        assert str(folders[shared]) in done.stderr
        assert (tmp_path / "run/api.sock").exists()
        assert client.get("/v1/node").status_code == 200


def reasons_of(client: httpx.Client) -> set[str]:
    """Returns the reasons that the gauge has, after a comparison with the gauge of readiness."""
    text = client.get("/metrics").text
    found = set(re.findall(r'^kvxfer_daemon_not_ready{reason="(.+)"} 1.0$', text, re.MULTILINE))
    assert f"kvxfer_daemon_ready {float(not found)}" in text
    return found


def test_a_required_transport_that_cannot_be_had_is_a_reason(tmp_path: Path) -> None:
    with program(tmp_path, "--require", "cuda_ipc") as daemon, daemon.client() as client:
        ready = client.get("/readyz")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert reason.startswith("transport cuda_ipc is required: ")
        assert daemon.said[-1].endswith(f" not ready: {reason}")
        assert reasons_of(client) == {"transport"}


def certificate(folder: Path) -> tuple[Path, Path]:
    """Returns a self-signed certificate of 127.0.0.1, and its key."""
    done = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=BOUND_S,
    )
    if done.returncode:
        pytest.skip("openssl makes no certificate here")
    return folder / "cert.pem", folder / "key.pem"


def pem_files(folder: Path) -> None:
    """Makes cert.pem with key.pem, another key, one with a password, and a file of a broken certificate."""
    certificate(folder)
    for arguments in (
        ("genpkey", "-algorithm", "ED25519", "-out", "other.pem"),
        ("pkey", "-in", "other.pem", "-aes256", "-passout", "pass:secret", "-out", "locked.pem"),
    ):
        subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, check=True, timeout=BOUND_S)
    (folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n")


async def test_a_listener_that_fails_ends_the_daemon_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(server: object, listener: socket.socket) -> None:
        listener.close()
        raise OSError("no certificate")

    monkeypatch.setattr(QuietServer, "run_on", fail)
    with pytest.raises(OSError, match="no certificate"):
        await module.serve(options(tmp_path), asyncio.Event())


def test_tls_and_tokens(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    listen = ("--listen", "0.0.0.0:0", "--tls-certificate", str(cert), "--tls-key", str(key))
    with program(tmp_path, *listen, "--host-name", "127.0.0.1") as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=trusted, timeout=BOUND_S) as client:
            assert client.get("/v1/node").status_code == 401
            header = {"Authorization": f"Bearer {daemon.token}"}
            assert client.get("/v1/node", headers=header).status_code == 200
            assert client.get("/v1/node", headers={**header, "Host": "node.evil.example"}).status_code == 403
        plain = url.replace("https", "http")
        with httpx.Client(base_url=plain, timeout=5) as client, pytest.raises(httpx.TransportError):
            client.get("/healthz")


# The rest that `kvxfer serve` and `python -m kvxfer.control` take; `program` gives four more.
ALL_OPTIONS = {
    "--host-name": "127.0.0.1",
    "--tls-certificate": "cert.pem",
    "--tls-key": "key.pem",
    "--tls-client-ca": "cert.pem",
    "--agent-listen": "tcp://127.0.0.1:0",
    "--agent-advertise": "tcp://localhost",
    "--secret-file": "secret",
    "--directory": "unix:run/api.sock",
    "--pool-gib": "0.01",
    "--allow": "10.0.0.0/8,localhost",
    "--require": "shm,tcp",
    "--most-transfers": "10",
    "--token": "read=token",
    "--otlp": "http://127.0.0.1:9",
    "--log": "json",
    "--stop-after-s": "1",
}


@pytest.mark.parametrize("module", [("kvxfer", "serve"), ("kvxfer.control",)], ids=" ".join)
def test_a_daemon_starts_with_every_option(
    tmp_path: Path, module: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    secret = f"kvx_{'0' * 16}_{'x' * 43}"
    for name, text in (("secret", "a shared secret of agents"), ("token", secret)):
        Path(name).touch(mode=0o600)
        Path(name).write_text(text)
    trusted = ssl.create_default_context(cafile=str(cert))
    trusted.load_cert_chain(cert, key)
    given = dict(ALL_OPTIONS)
    spec = importlib.util.find_spec
    if spec("opentelemetry") is None or spec("opentelemetry.exporter") is None:
        del given["--otlp"]
    with (
        program(tmp_path, *chain.from_iterable(given.items()), agent=True, module=module) as daemon,
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
    main = pytest.importorskip("typer.main", reason="kvxfer[cli] is not installed")
    from kvxfer.cli.app import app

    group = main.get_command(app)
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


def test_client_certificates_are_asked_for_beside_tokens(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with program(
        tmp_path, "--tls-certificate", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert)
    ) as daemon:
        header = {"Authorization": f"Bearer {daemon.token}"}
        plain = ssl.create_default_context(cafile=str(cert))
        stranger = httpx.Client(base_url=daemon.url, verify=plain, timeout=BOUND_S)
        with stranger, pytest.raises(httpx.TransportError):
            stranger.get("/v1/node", headers=header)
        known = ssl.create_default_context(cafile=str(cert))
        known.load_cert_chain(cert, key)
        with httpx.Client(base_url=daemon.url, verify=known, timeout=BOUND_S) as client:
            assert client.get("/v1/node", headers=header).status_code == 200
            assert client.get("/v1/node").status_code == 401


FULL = 3 * 1024 * 1024


def test_with_no_room_on_the_disk_reads_go_on_and_changes_are_refused(tmp_path: Path) -> None:
    """Files cannot grow, as on a full disk; later they can again."""
    import resource

    with program(tmp_path) as daemon, daemon.client() as client:
        assert client.post("/v1/tokens", json={"name": "before"}).status_code == 201
        limit = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1, FULL))
        for _ in range(3):
            answer = client.post("/v1/tokens", json={"name": "during"})
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), answer.text
        answer = client.put("/v1/drain", json={})
        assert answer.status_code == 503
        for path in ("/v1/node", "/v1/tokens", "/v1/transfers", "/metrics", "/healthz", "/v1/drain"):
            assert client.get(path).status_code == 200, path
        assert not client.get("/v1/drain").json()["draining"]
        assert client.get("/readyz").status_code == 503
        assert "store" in reasons_of(client)
        assert limit
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (FULL, FULL))
        # Also if nobody asks for a change meanwhile.
        wait_until(lambda: client.get("/readyz").status_code == 200, "it is not ready again")
        assert reasons_of(client) == set()
        assert client.post("/v1/tokens", json={"name": "after"}).status_code == 201
        names = {token["name"] for token in client.get("/v1/tokens").json()["items"]}
        assert names == {"admin", "before", "after"}


ON_TMPFS = 'mkdir "$0" && mount -t tmpfs -o size=16m,mode=700 tmpfs "$0" && exec "$@"'


def test_a_full_disk_is_a_reason_a_gauge_and_one_line_of_the_log(tmp_path: Path) -> None:
    """A file system of its own, which the test fills through the daemon's view of it."""
    mounted = ("unshare", "-m", "sh", "-c", ON_TMPFS, str(tmp_path / "state"))
    if subprocess.run([*mounted[:4], f"{mounted[4]}", str(tmp_path / "try"), "true"], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    uds = httpx.HTTPTransport(uds=str(tmp_path / "run/api.sock"), verify=False)
    with (
        program(tmp_path, under=mounted) as daemon,
        httpx.Client(base_url="http://localhost", transport=uds, timeout=BOUND_S) as client,
    ):
        assert client.get("/readyz").status_code == 200
        assert reasons_of(client) == set()
        filler = Path(f"/proc/{daemon.process.pid}/root{tmp_path}/state/filler")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        for _ in range(3):
            answer = client.post("/v1/tokens", json={"name": "x"})
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), answer.text
        (reason,) = client.get("/readyz").json()["reasons"]
        assert reason.startswith("the audit log cannot be written")
        assert reasons_of(client) == {"audit-log"}
        filler.unlink()
        wait_until(lambda: client.get("/readyz").status_code == 200, "it is not ready again")
        assert reasons_of(client) == set()
        assert client.put("/v1/drain", json={}).status_code == 200
        assert reasons_of(client) == {"draining"}
        wait_until(lambda: sum("not ready: it is draining" in line for line in daemon.said) == 1, "no line")
        told = [re.sub(r".* (WARNING|INFO) ", "", line.strip()) for line in daemon.said if "ready" in line]
        assert told == ["ready", f"not ready: {reason}", "ready", "not ready: it is draining"]
