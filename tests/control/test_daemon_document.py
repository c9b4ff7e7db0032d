"""docs/daemon.md agrees with the daemon: codes, figures, topics, options."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from kvxfer.cli.app import build
from kvxfer.control.schema.problems import STATUSES
from kvxfer.control.state.transfer_counts import FAILURES, TransferCounts
from kvxfer.errors import CODE_NAMES
from tests.control.records import attached, record
from tests.control.serving import Served

ERRORS = (Path(__file__).parents[2] / "docs/errors.md").read_text()
DOCUMENT = (Path(__file__).parents[2] / "docs/daemon.md").read_text()
SOURCES = Path(__file__).parents[2] / "kvxfer/control"


def test_each_code_of_the_daemons_own_is_explained_with_its_status() -> None:
    told = {code: int(status) for code, status in re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", DOCUMENT, re.M)}
    assert told == {code: status for code, status in STATUSES.items() if code not in CODE_NAMES.values()}
    assert set(CODE_NAMES.values()) - set(STATUSES) <= {"forked", "system"}, "these are answered as 502"


async def test_each_figure_is_explained(served: Served) -> None:
    peer = {"session": 1, "incarnation": "b" * 32, "name": "b", "rails": ["x"]}
    region = {"id": 1, "name": "kv", "nbytes": 100, "num_blocks": 10}
    lease = {"lease": "b1", "mode": "read", "num_blocks": 2, "region": 1, "state": "active"}
    agent = attached("a" * 32, "a", peers=[peer], regions=[region], leases=[lease])
    served.daemon.links.agents[agent.incarnation] = agent
    served.daemon.certificates.expires_at_s["rest"] = 1.0
    served.daemon.intake.records(agent, [record(posted_ns=1, begun_ns=2, first_piece_ns=3, ended_ns=4)])
    async with served.unix() as client:
        text = (await client.get("/metrics")).text
    served.daemon.links.agents.clear()
    assert 'kvxfer_exports_outstanding_bytes{agent="a"} 20.0' in text
    assert 'kvxfer_transfer_stage_seconds_count{role="source",stage="total",verb="write"} 1.0' in text
    shown = {name.removesuffix("_bucket") for name in re.findall(r"^(kvxfer_\w+)[{ ]", text, re.M)}
    shown -= {"kvxfer_transfer_stage_seconds_count", "kvxfer_transfer_stage_seconds_sum"}
    rows = re.findall(r"^\| (`kvxfer_.*?) \|", DOCUMENT, re.M)
    told = {name for row in rows for name in re.findall(r"`(kvxfer_\w+)`", row)}
    of_pools = {name for name in told if name.startswith("kvxfer_pool_")}
    of_files = {name for name in told if name.startswith("kvxfer_page_files_")}
    assert shown == told - of_pools - of_files
    source = (SOURCES / "app/scrape.py").read_text()
    made = re.findall(r'(counter|gauge)\("(\w+)"', source)
    ends = {f"{name}_total" if kind == "counter" else name for kind, name in made}
    assert of_files == {f"kvxfer_page_files_{end}" for end in {*ends, "read_seconds", "faults_total"}}
    assert of_pools == {
        f"{name}_total" if kind == "Counter" else name
        for kind, name in re.findall(r'(Counter|Gauge)MetricFamily\(\s*"(kvxfer_pool_\w+)"', source)
    }


def test_codes_that_end_transfers_are_counted_from_0() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| `\w+` \| [^|]+ \| (\w*) ?\|", ERRORS, re.M)
    awaiting = {code for code, mark in rows if mark}
    # A child of a fork reports nothing, and what was cancelled has an outcome of its own.
    assert set(FAILURES) == awaiting - {"forked", "cancelled"}
    ended = TransferCounts().ended
    assert set(ended.values()) == {0}
    assert len(ended) == 3 * (2 + len(FAILURES))
    for role in ("source", "destination", "expectation"):
        assert {(role, "done", ""), (role, "cancelled", "cancelled"), (role, "failed", "peer-lost")} <= set(
            ended
        )


async def test_a_first_failure_is_an_increase(served: Served) -> None:
    async with served.unix() as client:
        text = (await client.get("/metrics")).text
    for line in (
        'kvxfer_transfers_ended_total{code="peer-lost",outcome="failed",role="destination"} 0.0',
        'kvxfer_transfers_ended_total{code="",outcome="done",role="source"} 0.0',
        'kvxfer_transfer_bytes_total{role="source"} 0.0',
    ):
        assert f"\n{line}\n" in text


TOPIC = r"(?:agents|transfers|leases|pages|memory|drain|settings)\.[a-z]+"


def test_each_topic_is_explained() -> None:
    section = DOCUMENT.partition("## Events")[2].partition("## Settings")[0]
    told = set(re.findall(f"`({TOPIC})`", section))
    found = {"transfers.done", "transfers.failed", "transfers.cancelled"}
    for path in SOURCES.rglob("*.py"):
        found |= set(re.findall(f'"({TOPIC})"', path.read_text()))
    assert told == found - {"settings.set", "memory.sock"}, "a verb, and a socket"


def test_each_option_is_one_of_the_programs() -> None:
    serve = get_command(build(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    taken = {name for parameter in serve.params for name in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", DOCUMENT)) <= taken
