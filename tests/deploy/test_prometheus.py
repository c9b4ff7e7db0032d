"""Alert rules and dashboard: Prometheus' own checks, and a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.control.serving import Program, program
from tests.deploy.command_line import serving
from tests.etcd_server import Cluster, free_ports
from tests.system_program import system_program
from tests.waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "kvxfer.json"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
BOUND_S = 60.0
SECRET = f"kvx_{'1f' * 8}_{'p' * 43}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("daemon")
    (folder / "prometheus").write_text(SECRET)
    token = f"read={folder / 'prometheus'}"
    files = ["--pages-dir", str(folder / "kv"), "--pages-gib", "0.25"]
    with program(folder, "--pool-gib", "0.01", *files, "--token", token, agent=True) as running:
        yield running


def promtool(*arguments: str | Path, given: str | None = None) -> str:
    done = subprocess.run(
        [system_program("prometheus", "promtool"), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yaml"),
        ("check", "config", "--syntax-only", "prometheus.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=" ".join,
)
def test_prometheus_own_checks_pass(arguments: tuple[str, ...]) -> None:
    assert "SUCCESS" in promtool(*arguments[:-1], RULES.parent / arguments[-1])


def test_what_is_asked_for_is_there(daemon: Program) -> None:
    """A running daemon exports each name in the rules and the dashboard."""
    with daemon.client(SECRET) as client:
        text = client.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    for path in (RULES, DASHBOARD):
        asked = set(re.findall(r"kvxfer_[a-z_]+", path.read_text()))
        assert len(asked) > 5
        assert not asked - known, path


def test_each_alert_has_its_cause_and_cure() -> None:
    headings = {line.strip("# \n").lower() for line in OPERATIONS.read_text().splitlines() if line[:1] == "#"}
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    runbooks = re.findall(
        r"runbook_url: https://docs.kvxfer.example/operations.html#(\w+)", RULES.read_text()
    )
    assert runbooks == [name.lower() for name in alerts]
    assert set(runbooks) <= headings


def test_an_alert_is_critical_if_its_harm_is_that_requests_fail() -> None:
    sections = re.split(r"^### ", OPERATIONS.read_text(), flags=re.MULTILINE)
    texts = {section.partition("\n")[0]: section for section in sections}
    for name, severity in re.findall(r"alert: (\w+).*?severity: (\w+)", RULES.read_text(), re.DOTALL):
        (harm,) = re.findall(r"\*Harm\*: (.*?)[.,;]", texts[name])
        assert (severity == "critical") == (harm == "requests fail"), name


def test_panels_lie_side_by_side_and_their_expressions_are_read() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [each["expr"] for each in dashboard["annotations"]["list"]]
    for expression in expressions:
        # What Grafana substitutes.
        filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".+")
        rules = {"groups": [{"name": "g", "rules": [{"record": "r", "expr": filled}]}]}
        promtool("check", "rules", "/dev/stdin", given=json.dumps(rules))


class Prometheus:
    """The distribution's Prometheus, with a folder's configuration and shorter times."""

    def __init__(self, folder: Path, config: str) -> None:
        self._folder = folder
        (folder / "alerts.yaml").write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
        (folder / "prometheus.yaml").write_text(re.sub(r"interval: 15s", "interval: 1s", config))
        (port,) = free_ports(1)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        self._command = [
            system_program("prometheus", "prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(BOUND_S)
        self._client.close()

    def _asked(self, path: str, **query: str) -> dict[str, Any]:
        try:
            told: dict[str, Any] = self._client.get(f"/api/v1/{path}", params=query).json()["data"]
        except (httpx.HTTPError, ValueError):
            return {}
        return told

    def value(self, expression: str) -> str:
        found = self._asked("query", query=expression).get("result")
        return str(found[0]["value"][1]) if found else ""

    def firing(self) -> list[dict[str, Any]]:
        return [alert for alert in self._asked("alerts").get("alerts", ()) if alert["state"] == "firing"]


def test_a_daemon_that_dies_is_an_alert(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    with program(tmp_path, "--token", f"read={tmp_path / 'token'}") as daemon:
        at = daemon.url.partition("//")[2]
        (tmp_path / "targets.yaml").write_text(json.dumps([{"targets": [at]}]))
        with Prometheus(tmp_path, (RULES.parent / "prometheus.yaml").read_text()) as prometheus:
            # A scrape that is late on a busy machine counts as failed for a second.
            until(
                lambda: prometheus.value("kvxfer_daemon_ready and on (instance) up == 1") == "1", "no scrape"
            )
            until(lambda: not prometheus.firing(), "it fires")
            daemon.end(signal.SIGKILL)
            fired = until(prometheus.firing, "no alert")
            assert {alert["labels"]["alertname"] for alert in fired} == {"KvxferDaemonDown"}
            assert at in fired[0]["annotations"]["summary"]


def test_the_nodes_of_compose_are_scraped(tmp_path: Path) -> None:
    """The nodes' command lines, the secrets of prepare, and Prometheus' configuration work together."""
    yaml = pytest.importorskip("yaml")
    shutil.copytree(DEPLOY / "compose", tmp_path / "compose", ignore=shutil.ignore_patterns("private"))
    subprocess.run([tmp_path / "compose" / "prepare"], check=True, timeout=BOUND_S)
    private = tmp_path / "compose" / "private"
    document = yaml.safe_load((tmp_path / "compose" / "compose.yaml").read_text())
    given = {
        f"/run/secrets/{name}": str(tmp_path / "compose" / each["file"])
        for name, each in document["secrets"].items()
    }
    config = (
        (tmp_path / "compose" / "prometheus.yaml")
        .read_text()
        .replace("/run/secrets/metrics-token", str(private / "token"))
    )
    config = config.replace("/run/secrets/tls-ca", str(private / "ca.pem"))
    with Cluster() as etcd, ExitStack() as stack:
        for node, port in zip(("node-a", "node-b"), free_ports(2), strict=True):
            places = {
                **given,
                "/var/lib/kvxfer": str(tmp_path / node / "state"),
                "/run/kvxfer": str(tmp_path / node / "run"),
                "0.0.0.0:7380": f"127.0.0.1:{port}",
                "0.0.0.0:7381": "127.0.0.1:0",
                "etcd:2379": etcd.members[0].at,
            }
            arguments = document["services"][node]["command"]
            for ours, theirs in places.items():
                arguments = [each.replace(ours, theirs) for each in arguments]
            stack.enter_context(serving(arguments))
            # Names of a network that does not exist here.
            config = config.replace(f"{node}:7380", f"localhost:{port}")
        with Prometheus(tmp_path, config) as prometheus:
            until(lambda: prometheus.value("count(kvxfer_daemon_ready == 1)") == "2", "no scrape")
            pools = str(2 * 256 << 20)
            until(lambda: prometheus.value("sum(kvxfer_pool_bytes)") == pools, "no pools")
