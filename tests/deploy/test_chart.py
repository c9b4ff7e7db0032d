"""The chart: rendered by Helm, checked against Kubernetes' schemas; its daemon runs with its command line."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.certificates import Authority
from tests.control.serving import BOUND_S
from tests.deploy.command_line import serving
from tests.etcd_server import free_ports

helm = pytest.importorskip("helm_python", reason="no Helm: `make test-deploy` fetches it as a library")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "deploy" / "chart"
VERSIONS = ("1.29", "1.34")
# Objects of operators; their schemas are not available here.
UNKNOWN = {"PodMonitor", "PrometheusRule", "LeaderWorkerSet"}

ENGINES = {"engines": {"enabled": True}}
VALUES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "engines": ENGINES,
    "autoscaling": {"engines": {"enabled": True, "decode": {"autoscaling": {"enabled": True}}}},
    "groups": {"engines": {"enabled": True, "leaderWorkerSet": {"enabled": True, "size": 4}}},
    "RDMA": {
        "daemon": {
            "hostNetwork": True,
            "require": "verbs",
            "capabilities": ["IPC_LOCK"],
            "resources": {"limits": {"rdma/hca": 1, "memory": "1Gi"}},
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"rdma": "true"},
        }
    },
    "monitoring": {
        "monitoring": {"podMonitor": True, "rules": True, "runbook": "https://wiki/operations"},
        "daemon": {"log": "plain", "otlp": "http://collector:4318"},
    },
    "alone": {"networkPolicy": {"enabled": False}, "imagePullSecrets": [{"name": "pull"}]},
    "doctor": {"networkPolicy": {"doctorPort": 7301}},
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm.Chart.load(CHART).render(values, name="kv", namespace="llm")
    return [document for text in files.values() for document in yaml.safe_load_all(text) if document]


def one(documents: list[dict[str, Any]], kind: str, name: str) -> Any:
    (found,) = (each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_takes_it(values: dict[str, Any]) -> None:
    documents = rendered(values)
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)
    for document in documents:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.SchemaNotFoundError:
                assert document["kind"] in UNKNOWN


def test_helm_has_no_complaint() -> None:
    told = helm.lint(CHART, strict=True, quiet=True)
    assert not told["errors"]
    assert {each["error"] for each in told["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"daemon": {"port": 0}}, "/daemon/port"),
        ({"daemon": {"directory": "consul://x"}}, "/daemon/directory"),
        ({"daemons": {}}, "daemons"),
        ({"secrets": {"agents": ""}}, "/secrets/agents"),
        ({"networkPolicy": {"doctorPort": 65536}}, "/networkPolicy/doctorPort"),
        ({"monitoring": {"serverName": ""}}, "/monitoring/serverName"),
        ({"monitoring": {"runbook": "operations.md"}}, "/monitoring/runbook"),
    ],
)
def test_values_that_are_wrong_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        rendered(values)


def test_pods_are_confined() -> None:
    for document in rendered(ENGINES):
        if document["kind"] not in ("DaemonSet", "Deployment"):
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["capabilities"]["drop"] == ["ALL"]
            assert own["allowPrivilegeEscalation"] is False
            # An engine from a foreign image writes where that image wants to.
            assert own.get("readOnlyRootFilesystem", False) is (document["kind"] == "DaemonSet")


def test_services_and_budgets_find_their_pods() -> None:
    documents = rendered(ENGINES)
    for role in ("prefill", "decode"):
        labels = one(documents, "Deployment", f"kv-{role}")["spec"]["template"]["metadata"]["labels"]
        chosen = [one(documents, "Service", f"kv-{role}")["spec"]["selector"]]
        chosen.append(one(documents, "PodDisruptionBudget", f"kv-{role}")["spec"]["selector"]["matchLabels"])
        for selector in chosen:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/component"] == role


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"image": {"tag": "9.9.9"}}, {"kv-daemon"}),
        ({"engines": {"enabled": True, "image": "engine:2"}}, {"kv-prefill", "kv-decode"}),
    ],
    ids=["daemon", "engines"],
)
def test_an_upgrade_restarts_no_other_pods(change: dict[str, Any], restarted: set[str]) -> None:
    """docs/operations.md lists them. Kubernetes restarts pods whose template has changed."""
    before, after = (
        {
            each["metadata"]["name"]: each["spec"]["template"]
            for each in rendered(values)
            if each["kind"] in ("DaemonSet", "Deployment")
        }
        for values in (ENGINES, {**ENGINES, **change})
    )
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == restarted


@pytest.mark.parametrize("page", ["", "https://wiki/operations"], ids=["no page", "page"])
def test_the_rules_are_those_of_deploy(page: str) -> None:
    values = {"monitoring": {"rules": True, "runbook": page}}
    (group,) = one(rendered(values), "PrometheusRule", "kv")["spec"]["groups"]
    (wanted,) = yaml.safe_load((CHART.parent / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in wanted["rules"]:
        rule["annotations"].pop("runbook_url")
        if page:
            rule["annotations"]["runbook_url"] = f"{page}#{rule['alert'].lower()}"
    assert group == wanted


def test_prometheus_verifies_a_name_of_the_certificate() -> None:
    documents = rendered({"monitoring": {"podMonitor": True}})
    (endpoint,) = one(documents, "PodMonitor", "kv-daemon")["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["serverName"] == "kvxfer"
    (container,) = one(documents, "DaemonSet", "kv-daemon")["spec"]["template"]["spec"]["containers"]
    assert "--host-name=kvxfer" in container["args"]


@pytest.mark.parametrize(("port", "admitted"), [(0, {7380, 7381}), (7301, {7380, 7381, 7301})])
def test_the_network_policy_admits_the_doctor_on_request(port: int, admitted: set[int]) -> None:
    values = {"networkPolicy": {"doctorPort": port}}
    agents, scrapers = one(rendered(values), "NetworkPolicy", "kv-daemon")["spec"]["ingress"]
    assert {each["port"] for each in agents["ports"]} == admitted
    assert {each["port"] for each in scrapers["ports"]} == {7380}


def test_the_doctor_finds_the_secret_in_the_daemons_pod() -> None:
    pod = one(rendered({}), "DaemonSet", "kv-daemon")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (secret,) = (each["value"] for each in container["env"] if each["name"] == "KVXFER_SECRET_FILE")
    assert f"--secret-file={secret}" in container["args"]
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(secret).parent) in folders


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, Path, Path]:
    made = Authority(tmp_path).issue("URI:node")
    return Path(made.certificate), Path(made.key), Path(made.authorities)


@pytest.mark.smoke
def test_the_daemon_starts_so_and_the_probes_find_it(tmp_path: Path, tls: tuple[Path, Path, Path]) -> None:
    port, agent_port = free_ports(2)
    values = {"daemon": {"port": port, "agentPort": agent_port, "poolGib": 0.01}}
    (container,) = one(rendered(values), "DaemonSet", "kv-daemon")["spec"]["template"]["spec"]["containers"]
    (tmp_path / "secret").write_text("s" * 32)
    token = f"kvx_{'2e' * 8}_{'p' * 43}"
    (tmp_path / "token").write_text(token)
    # What Kubernetes substitutes, and where it mounts.
    places = {
        "$(NODE)": "node-7",
        "$(POD_IP)": "127.0.0.1",
        "/var/lib/kvxfer": str(tmp_path / "state"),
        "/run/kvxfer": str(tmp_path / "run"),
        "/etc/kvxfer/tls/tls.crt": str(tls[0]),
        "/etc/kvxfer/tls/tls.key": str(tls[1]),
        "/etc/kvxfer/agents/secret": str(tmp_path / "secret"),
        "/etc/kvxfer/metrics/token": str(tmp_path / "token"),
    }
    arguments = container["args"]
    for ours, theirs in places.items():
        arguments = [each.replace(ours, theirs) for each in arguments]
    context = ssl.create_default_context(cafile=str(tls[2]))
    context.check_hostname = False  # kubelets do not check the name either
    url = f"https://127.0.0.1:{port}"
    with serving(arguments), httpx.Client(base_url=url, verify=context, timeout=BOUND_S) as client:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert get["scheme"] == "HTTPS"
            assert client.get(get["path"]).status_code == 200
        metrics = client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
        assert 'node="node-7"' in metrics.text
        assert client.get("/metrics").status_code == 401
