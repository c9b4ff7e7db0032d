"""What outlives the daemon, and what happens to changes on a full disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvxfer.control.audit_log import AuditLog
from kvxfer.control.problems import Refusal
from kvxfer.control.state.answers import KEPT_S, MOST, Answer, Answers, fingerprint
from kvxfer.control.state.store import Store
from tests.control.serving import BOUND_S


async def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    await store.put("kind", "a", {"x": [1, "ü"]})
    await store.put("kind", "b", 1)
    await store.put("kind", "b", 2)
    await store.put("other", "a", None)
    await store.remove("kind", "nothing")
    store.close()
    store.close()
    again = Store(tmp_path / "db")
    assert again.load("kind") == {"a": {"x": [1, "ü"]}, "b": 2}
    assert again.load("other") == {"a": None}
    again.close()


async def test_many_at_once_are_committed_together_and_each_has_its_own_result(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")

    async def one(number: int) -> int:
        if number % 10 == 3:
            with pytest.raises(Refusal, match="store cannot be written"):
                await store.run(lambda db: db.execute("INSERT INTO nothing VALUES (1)"))
            return -1
        await store.put("kind", str(number), number)
        return number

    results = await asyncio.gather(*(one(number) for number in range(200)))
    assert len(store.load("kind")) == sum(number >= 0 for number in results) == 180
    store.close()


async def test_a_change_that_is_cancelled_does_not_stop_the_later_ones(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    may_go_on, is_busy = threading.Event(), threading.Event()

    def hold_up(_: object) -> None:
        is_busy.set()
        assert may_go_on.wait(BOUND_S)

    begun = asyncio.create_task(store.run(hold_up))
    assert await asyncio.to_thread(is_busy.wait, BOUND_S)
    waiting = asyncio.create_task(store.put("kind", "waiting", 1))
    await asyncio.sleep(0)
    for task in (begun, waiting):
        task.cancel()
    await asyncio.wait([begun, waiting])
    may_go_on.set()
    await asyncio.wait_for(store.put("kind", "later", 2), BOUND_S)
    assert store.load("kind") == {"later": 2}
    store.close()


def test_a_file_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.submit(lambda db: db.execute("PRAGMA user_version=7")).result()
    store.close()
    with pytest.raises(RuntimeError, match=r"has version 7, .*: put back the copy from before the upgrade"):
        Store(tmp_path / "db")
    (tmp_path / "other").write_bytes(b"no database at all" * 1000)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        Store(tmp_path / "other")


async def test_pages_of_the_life_before_are_gone_and_no_older_ones(tmp_path: Path) -> None:
    for life, (parked, dropped) in enumerate([((b"a", b"b"), (b"b",)), ((b"c",), ()), ((), ())]):
        store = Store(tmp_path / "db")
        store.begin_life()
        expected: set[bytes] = ({b"a"}, {b"c"})[life - 1] if life else set()
        assert await store.find_gone([b"a", b"b", b"c"]) == expected
        await store.add_parked(parked)
        store.drop_parked(dropped)
        store.close()


async def test_a_page_that_is_parked_again_is_not_gone(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    await store.add_parked([b"a"])
    store.begin_life()
    assert await store.find_gone([b"a"]) == {b"a"}
    await store.add_parked([b"a"])
    assert await store.find_gone([b"a"]) == set()
    store.close()


# ---- answers to idempotency keys -------------------------------------------------------------------


async def test_the_first_answer_is_given_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    answers = Answers(store)
    one, other = fingerprint("op", "/x", b"1"), fingerprint("op", "/x", b"2")
    assert await answers.begin("key", one, 1.0) is None
    with pytest.raises(Refusal, match="under way") as under_way:
        await answers.begin("key", one, 1.0)
    assert under_way.value.code == "conflict"
    await answers.end("key", Answer(201, b"{}"))
    for _ in range(2):
        assert await answers.begin("key", one, 2.0) == Answer(201, b"{}")
    with pytest.raises(Refusal, match="another request"):
        await answers.begin("key", other, 2.0)
    assert await answers.begin("key", other, 2.0 + KEPT_S) is None
    await answers.abandon("key")
    assert await answers.begin("key", one, 3.0 + KEPT_S) is None
    store.close()


async def test_what_was_under_way_when_the_daemon_ended_is_not_done_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    assert await Answers(store).begin("key", "request", 1.0) is None
    with pytest.raises(Refusal, match="may or may not have been carried out"):
        await Answers(store).begin("key", "request", 2.0)
    store.close()


async def test_answers_are_bounded(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    answers = Answers(store)
    store.submit(
        lambda db: db.executemany(
            "INSERT INTO answers VALUES (?, ?, '', 200, '')",
            ((f"k{n}", 100.0 + n / 1e6) for n in range(MOST + 50)),
        )
    ).result()
    await answers.begin("new", "r", 200.0)
    count = store.submit(lambda db: db.execute("SELECT COUNT(*) FROM answers").fetchone()[0]).result()
    assert count == MOST
    assert await answers.begin("k0", "", 201.0) is None, "the oldest gave way"
    store.close()


# ---- the audit log ---------------------------------------------------------------------------------


def lines(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_lines_are_appended_and_files_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path, max_nbytes=100, kept=3)
    for number in range(100):
        log.append({"n": number})
    log.close()
    files = [path, *(path.with_name(f"audit.log.{number}") for number in (1, 2, 3))]
    assert sorted(path.parent.iterdir()) == sorted(files)
    kept = [number for file in reversed(files) for number in lines(file)]
    assert kept == list(range(kept[0], 100))
    again = AuditLog(path)
    again.append({"n": 100})
    again.close()
    assert lines(path)[-1] == 100


def test_a_new_file_that_could_not_be_made_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.log", max_nbytes=1)
    log.append({"n": 0})
    with monkeypatch.context() as patch:

        def full(_: AuditLog) -> int:
            raise OSError(errno.ENOSPC, "no space left")

        patch.setattr(AuditLog, "_open", full)
        log.append({"n": 1})
        assert "no space left" in log.fault
        with pytest.raises(Refusal, match="no space left"):
            log.require_room()
    assert log.fault == ""
    log.close()
    assert [lines(tmp_path / name) for name in ("audit.log.1", "audit.log")] == [[0], [1]]


def test_it_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "audit.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        AuditLog(tmp_path / "audit.log")


FULL = """
import json, pathlib, resource, signal, sys
from kvxfer.control.audit_log import AuditLog
from kvxfer.control.problems import Refusal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = AuditLog(pathlib.Path(sys.argv[1]))
log.append({"n": 0})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
log.append({"n": 1, "long": "x" * 100})
try:
    log.require_room()
except Refusal as refusal:
    print(refusal.code)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.require_room()
log.append({"n": 2})
"""


def test_a_line_that_did_not_fit_is_written_first_and_nothing_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "unavailable\n"
    assert lines(path) == [0, 1, 2]
