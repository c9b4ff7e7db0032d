"""The parts of `kvxfer bench serving`, without an engine: what it asks, sees, and makes of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.bench.engines.options import DISPATCHES
from kvxfer.bench.engines.server_process import reserved_port
from kvxfer.bench.report import document
from kvxfer.bench.serving import abandoned as serving_abandoned
from kvxfer.bench.serving import load as serving_load
from kvxfer.bench.serving import measure as serving
from kvxfer.bench.serving import observer as serving_observer
from kvxfer.bench.serving import shown as serving_shown
from kvxfer.bench.serving import systems as serving_systems
from kvxfer.bench.serving.events import FOLDER_VARIABLE, Observations, Seen
from kvxfer.bench.serving.load import Answer, Asked
from kvxfer.bench.serving.options import AbandonedOptions, ServingOptions
from kvxfer.bench.serving.stages import STAGES, Served, summarize
from kvxfer.bench.serving.systems import System
from kvxfer.cli.app import run as kvxfer

# ---- the observer, before a connector that moves nothing ------------------------------------------


@dataclass
class Results:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class Connector:
    """A connector of vLLM's interface, in memory: a load that is ordered in one step is done in the next."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.arguments = (vllm_config, role, kv_cache_config)
        self.metadata: Any = None
        self.loading: set[str] = set()
        self.failing: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = 32 if request.kv_transfer_params else 0
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(of="this connector")

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return request.kv_transfer_params is not None, None

    request_finished_all_groups = request_finished

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self.metadata

    def clear_connector_metadata(self) -> None:
        self.metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.get_finished(set())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), self.loading

    def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
        sent, received = self.get_finished(finished_req_ids)
        return Results(sent | finished_req_ids, received, self.failing)


def observed(folder: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> Any:
    (folder / "engine").mkdir(exist_ok=True)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "engine"))
    made = serving_observer.observed(Connector)("config", SimpleNamespace(name=role), "caches")
    assert made.arguments == ("config", SimpleNamespace(name=role), "caches")
    return made


def request(name: str, handed_over: bool = True) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params={"do_remote_prefill": True} if handed_over else None
    )


def test_events_of_a_request_are_seen_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = observed(tmp_path, monkeypatch, "SCHEDULER")
    worker = observed(tmp_path, monkeypatch, "WORKER")
    theirs = request("cmpl-mine-0-decode")
    scheduler.get_num_new_matched_tokens(request("other", handed_over=False), 0)
    # No room yet: it is asked about twice.
    assert scheduler.get_num_new_matched_tokens(theirs, 0) == (32, True)
    assert scheduler.get_num_new_matched_tokens(theirs, 0) == (32, True)
    scheduler.update_state_after_alloc(theirs, None, 32)
    metadata = scheduler.build_connector_meta(None)
    assert metadata.of == "this connector"

    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    assert worker.get_transfer_results(set()).finished_recving == set()
    worker.clear_connector_metadata()
    worker.loading = {theirs.request_id}
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    worker.start_load_kv(None)
    assert worker.get_transfer_results({"cmpl-mine-0-prefill"}).finished_recving == {theirs.request_id}
    worker.clear_connector_metadata()
    assert scheduler.request_finished(request("cmpl-mine-0-prefill"), [1])[0]
    assert not scheduler.request_finished(request("other", handed_over=False), [1])[0]

    seen = Observations(tmp_path)
    seen.read()
    found = seen.requests(["mine"])["mine"]
    ordered = [event for event, _ in sorted(found.at_ns.items(), key=lambda item: item[1])]
    assert ordered[:4] == ["asked", "allocated", "ordered", "loaded"]
    assert set(ordered) == {"asked", "allocated", "ordered", "loaded", "finished"}
    costs = seen.costs()["engine"]
    assert (costs["scheduler"]["steps"], costs["worker"]["steps"]) == (2, 2)
    assert costs["worker"]["total_ns"] > 0


def test_failed_load_is_told_from_one_that_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = observed(tmp_path, monkeypatch, "WORKER")
    worker.loading, worker.failing = {"a", "b"}, {"a"}
    worker.get_transfer_results(set())
    worker.clear_connector_metadata()
    seen = Observations(tmp_path)
    seen.read()
    assert {name: one.failed for name, one in seen.requests(["a", "b"]).items()} == {"a": True, "b": False}


def test_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = json.dumps({"event": "asked", "request": "r-1", "at_ns": 7}).encode() + b"\n"
    path = tmp_path / "engine" / "scheduler-1-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(line[:9])
    seen = Observations(tmp_path)
    seen.read()
    assert seen.requests(["r-1"])["r-1"].at_ns == {}
    path.write_bytes(line)
    seen.read()
    assert seen.requests(["r-1"])["r-1"].at_ns == {"asked": 7}


# ---- stages ---------------------------------------------------------------------------------------

MS = 1_000_000


def served(prefill: dict[str, int], decode: dict[str, int], first_token: int = 100) -> Served:
    """Returns a request that came at 0 ms; times are in milliseconds."""
    answer = Answer(Asked("r", "p" * 64, 2), 0, [first_token * MS, (first_token + 4) * MS], [1, 2])

    at = {**prefill, **decode}
    return Served(answer, Seen({event: ms * MS for event, ms in at.items()}, dict.fromkeys(at, MS // 2)))


@pytest.mark.parametrize(
    ("prefill", "decode", "took"),
    [
        # A pull.
        ({"finished": 40}, {"asked": 44, "allocated": 45, "ordered": 50, "loaded": 70}, (40, 5, 5, 20, 30)),
        # In a push decode allocates its blocks first, and hidden waits do not count.
        ({"finished": 40}, {"asked": 1, "allocated": 2, "ordered": 3, "loaded": 55}, (40, 0, 0, 15, 45)),
        # A request that is answered before prefill knows of its end counts as prefill only.
        ({"finished": 120}, {"asked": 1, "allocated": 2, "ordered": 3, "loaded": 90}, (100, 0, 0, 0, 0)),
    ],
)
def test_stages_add_up_to_the_time_to_first_token(
    prefill: dict[str, int], decode: dict[str, int], took: tuple[int, ...]
) -> None:
    one = served(prefill, decode)
    assert one.was_handed_over
    assert one.stages_ms() == dict(zip(STAGES, took, strict=True))
    assert sum(one.stages_ms().values()) == one.answer.first_token_ms
    load = took[3]
    assert one.own_ms() == {"decide": 1.5, "load": load, "own": load + 1.5, "hold": 1}


def test_request_that_decode_computed_itself_is_not_handed_over() -> None:
    one = served({"finished": 40}, {})
    assert not one.was_handed_over
    figures = summarize([one])
    assert "stages_ms" not in figures
    assert figures["first_token_ms"]["p50"] == 100
    assert figures["between_tokens_ms"]["p50"] == 4


# ---- a stand-in for engines ----------------------------------------------------------------------

# A server of vLLM's interface that computes nothing; it says what an observed connector would have seen.
VLLM = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from kvxfer.bench.serving.observer import Log

told = dict(zip(sys.argv, sys.argv[1:]))
role = json.loads(told.get("--kv-transfer-config", "{}")).get("kv_role")
logs = [Log("scheduler"), Log("worker")]
served = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer(b"" if self.path == "/health" else b"vllm:num_requests_running 0.0\\n")

    def do_POST(self):
        global served
        served += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = f"cmpl-{self.headers['X-Request-Id']}-0-1a2b"
        if os.environ.get("STAND_IN_DIES") == f"{role}:{served}":
            print("stand-in: the engine is on fire", flush=True)
            os._exit(3)
        how = body["prompt"]
        if how == "refused":
            self.answer(b"out of memory", 500)
            return
        if role == "kv_producer":
            self.see("finished", name)
            told = {"kvxfer": {"ranks": []}}
            self.answer(json.dumps({"choices": [{}], "kv_transfer_params": told}).encode())
            return
        if role:
            assert body["kv_transfer_params"]
            for event in ("asked", "allocated", "ordered", "loaded"):
                self.see(event, name)
        count = 1 if how == "cut" else body["max_tokens"]
        lines = [{"choices": [{"token_ids": [number]}]} for number in range(count)]
        if how == "fails":
            lines[1:] = [{"error": {"message": "the engine died"}}]
        events = [*map(json.dumps, lines), "[DONE]"]
        self.answer("".join(f"data: {event}\\n\\n" for event in events).encode(), hangs=how == "hangs")

    def see(self, event, name):
        for log in logs:
            log.num_steps += 1
            log.total_ns += 5000
        worker = event in ("ordered", "loaded")
        logs[worker].event(event, name, time.monotonic_ns(), took_ns=1000)
        for log in logs:
            log.write()

    def answer(self, content, status=200, hangs=False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        time.sleep(60 if hangs else 0)
        self.wfile.write(content)


ThreadingHTTPServer(("127.0.0.1", int(told["--port"])), Handler).serve_forever()
"""


# ---- clients --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with reserved_port() as reserved:
        port = str(reserved.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", VLLM, "--port", port],
            env={**os.environ, FOLDER_VARIABLE: str(tmp_path_factory.mktemp("seen"))},
        )
        try:
            address = f"http://127.0.0.1:{port}"
            while ask(address, "well").error.startswith("Connect"):
                time.sleep(0.05)
            yield address
        finally:
            process.kill()
            process.wait()


def ask(url: str, how: str, timeout_s: float = 20.0) -> Answer:
    (answer,) = serving_load.run(url, [Asked("one", how, 3)], 1, timeout_s)
    return answer


def test_every_token_is_stamped_between_sending_and_the_end(url: str) -> None:
    before_ns = time.monotonic_ns()
    answer = ask(url, "well")
    assert answer.error == ""
    assert answer.token_ids == [0, 1, 2]
    stamps = [before_ns, answer.sent_ns, *answer.token_ns, time.monotonic_ns()]
    assert stamps == sorted(stamps)
    assert len(answer.between_tokens_ms()) == 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refused", "answered 500: out of memory"),
        ("cut", "ended after 1 of 3 tokens"),
        ("fails", "the engine died"),
    ],
)
def test_request_that_goes_wrong_says_how(url: str, how: str, words: str) -> None:
    assert words in ask(url, how).error


def test_server_that_falls_silent_or_is_gone_is_given_up(url: str) -> None:
    assert "ReadTimeout" in ask(url, "hangs", timeout_s=2.0).error
    with socket.socket() as taken:  # no socket listens there, and the port stays taken
        taken.bind(("127.0.0.1", 0))
        assert "ConnectError" in ask(f"http://127.0.0.1:{taken.getsockname()[1]}", "well").error


# ---- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serving --trace nowhere", "the trace 'nowhere' is neither"),
        ("serving --requests 100000", "fewer than --requests 100000"),
        ("serving --systems tpu", "unknown --systems 'tpu'; known are all, alone, kvxfer-pull, kvxfer-push"),
        ("serving --systems ,", "--systems is empty"),
        ("serving --max-tokens 5000", "more than the 4096 tokens of the model"),
        ("abandoned --leave 101", "--leave 101 is more than --clients 100"),
        ("abandoned --systems kvxfer-push", "unknown --systems 'kvxfer-push'; known are kvxfer-pull, nixl"),
        ("abandoned --prompt-tokens 2000", "--prompt-tokens must be above 0 and at most 1000, not 2000"),
    ],
)
def test_command_refuses_before_any_engine_is_looked_for(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_systems, "enter_environment", lambda: pytest.fail("looked for an engine"))
    assert kvxfer(["bench", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_missing_engine_is_told_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_systems, "tree", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kvxfer(["bench", "serving"]) == 2
    assert "`make bench-serving-setup` in a clone of kvxfer sets up .vllm" in capsys.readouterr().err


def test_both_roles_get_one_connector_and_the_one_engine_none() -> None:
    alone, ours, *others = serving_systems.chosen(serving_systems.NAMES)
    assert alone.kv_transfer_config("kv_producer") is None
    for system in (ours, *others):
        prefill, decode = (system.kv_transfer_config(role) for role in ("kv_producer", "kv_consumer"))
        assert prefill is not None
        assert decode is not None
        assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
        assert prefill == decode
        assert prefill["kv_connector_module_path"].startswith("kvxfer.bench.serving.")
        assert system.dispatch in DISPATCHES


# ---- whole runs, with a stand-in for the engines --------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in where vLLM is searched for: beside the interpreter."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(f"#!{sys.executable} -P\n{VLLM}")
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(serving, "_REST_S", 0.0)
    monkeypatch.setattr(serving, "_IDLE_S", 0.05)

    def save(name: str, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text('{"dtype": "float32"}')
        return folder

    monkeypatch.setattr("kvxfer.bench.engines.tiny_models.save", save)


SYSTEMS = (
    System("alone", "one engine"),
    System("kvxfer-pull", "ours", {"kv_connector": "KvxferConnector"}),
    System("kvxfer-push", "both at once", {"kv_connector": "KvxferConnector"}, dispatch="concurrent"),
    System("nixl", "theirs", {"kv_connector": "NixlConnector"}, environment={"A_VARIABLE": "1"}),
    System("nixl+thread", "not here", {"kv_connector": "NixlConnector"}, needs=("no_such_module",)),
)
SMALL: dict[str, Any] = {
    "requests": 3,
    "max_tokens": 64,
    "max_output_tokens": 4,
    "rounds": 2,
    "timeout_s": 20.0,
}


def run(
    progress: Any = lambda at: None, known: tuple[System, ...] = SYSTEMS, **fields: Any
) -> dict[str, Any]:
    names = tuple(system.name for system in known)
    return serving.run(ServingOptions(**{"systems": names, **SMALL, **fields}), progress, known)


@pytest.mark.usefixtures("stand_in")
def test_every_system_serves_every_request_of_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    result = run()
    assert list(result["systems"]) == ["alone", "kvxfer-pull", "kvxfer-push", "nixl"]
    for name in ("kvxfer-pull", "kvxfer-push", "nixl"):
        assert result["served"][name] == {"requests": 6, "failed": 0, "failure": "", "handed_over": 6}
        system = result["systems"][name]
        assert list(system["stages_ms"]) == list(STAGES)
        # Each of the two halves reports 5 us a step.
        assert system["step_us"]["decode"]["median"] == 10.0
        assert system["own_ms"]["decide"]["p50"] == 0.003
    assert "stages_ms" not in result["systems"]["alone"]
    assert set(result["ratios"]) == {"alone", "kvxfer-push", "nixl"}
    # The failure of a missing system names the command that installs it, and does not stop the others.
    assert "`make bench-serving-setup` installs it" in result["failures"]["nixl+thread"]
    assert json.loads(json.dumps(result))["verified"] is True
    document.print_parts(serving_shown.parts(result))
    shown = capsys.readouterr().out
    assert "load (own)" in shown
    assert "6 requests, 6 handed over" in shown
    assert "nixl+thread was left out" in shown


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_engine_that_dies_is_left_out_with_its_last_words_and_what_it_gave_is_kept(role: str) -> None:
    # One of the first requests, and a warm-up of all blocks, come before the rounds of three.
    num_before = 1 + serving.num_warm_ups(ServingOptions(**SMALL))
    fatal = System(
        "nixl", "dies", {"kv_connector": "N"}, environment={"STAND_IN_DIES": f"{role}:{num_before + 3 + 2}"}
    )
    result = run(known=(SYSTEMS[1], fatal))
    assert "the engine is on fire" in result["failures"]["nixl"]
    assert {name: told["requests"] for name, told in result["served"].items()} == {
        "kvxfer-pull": 6,
        "nixl": 3,
    }
    assert len(result["ratios"]["nixl"]["load_ms"]["rounds"]) == 1


@pytest.mark.usefixtures("stand_in")
def test_engine_that_never_comes_up_is_left_out() -> None:
    never = System("nixl", "dies", {"kv_connector": "N"}, environment={"STAND_IN_DIES": "kv_consumer:1"})
    result = run(known=(SYSTEMS[1], never))
    assert "nixl: the first request failed 3 times" in result["failures"]["nixl"]
    assert "the engine is on fire" in result["failures"]["nixl"]
    assert list(result["systems"]) == ["kvxfer-pull"]


@pytest.mark.usefixtures("stand_in")
def test_clients_that_leave_are_asked_for_at_prefill_alone(capsys: pytest.CaptureFixture[str]) -> None:
    # Six requests come before the ten clients, and more after them; four of the ten leave.
    fatal = (
        System(name, "dies", {"kv_connector": "N"}, environment={"STAND_IN_DIES": at})
        for name, at in (("nixl", "kv_producer:17"), ("nixl+thread", "kv_consumer:13"))
    )
    options = AbandonedOptions(systems=("kvxfer-pull", "nixl", "nixl+thread"), clients=10, leave=4)
    result = serving_abandoned.run(options, lambda at: None, (SYSTEMS[1], *fatal))
    assert list(result["systems"]) == ["kvxfer-pull"]
    assert result["systems"]["kvxfer-pull"]["longest_ms"] > 0
    for name, role in (("nixl", "prefill"), ("nixl+thread", "decode")):
        assert f"{name}'s {role} engine did not answer" in result["failures"][name]
        assert "the engine is on fire" in result["failures"][name]
    assert json.loads(json.dumps(result))["verified"] is True
    document.print_parts(serving_abandoned.parts(result))
    shown = capsys.readouterr().out
    assert "4 of 10 clients leave" in shown
    assert "nixl was left out" in shown
