"""What outlives the daemon, and what happens to changes on a full disk."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.control.daemon.audit_log import AuditLog
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state import answers as module
from kvxfer.control.state.answers import KEPT_S, Answer, Answers, fingerprint
from kvxfer.control.state.store import Store
from tests.control.serving import BOUND_S, serving

KEY = ("token:1", "key")


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


@pytest.mark.parametrize(
    ("kind", "id_", "text"),
    [
        ("token", "5a5a", "{"),
        ("token", "5a5a", '{"role": "root"}'),
        ("node", "drain", '"soon"'),
        ("entry", "prefill", "{}"),
        ("entry", "prefill", '{"entry": {"kvxfer_agent": 1, "name": ""}, "ttl_s": null}'),
        ("settings", "log_level", '"loud"'),
        ("settings", "agents", '{"a": {"rails": 1}}'),
    ],
)
async def test_a_damaged_document_ends_the_start_and_is_named(
    tmp_path: Path, kind: str, id_: str, text: str
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    store = Store(tmp_path / "state/daemon.sqlite")
    store.submit(lambda db: db.execute("INSERT INTO documents VALUES (?, ?, ?)", (kind, id_, text))).result()
    store.close()
    words = rf"state/daemon.sqlite is damaged: its document {kind} '{id_}' cannot be read .*: put back a copy"
    with pytest.raises(RuntimeError, match=words):
        async with serving(tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("", lambda path: path.chmod(0o777)),
        ("", lambda path: os.chown(path, 12345, 12345)),
        *(
            (name, lambda path: (path.rename(path.with_name("x")), path.symlink_to(path.with_name("x"))))
            for name in ("", "daemon.sqlite", "daemon.lock")
        ),
        ("daemon.sqlite", lambda path: path.chmod(0o666)),
        ("daemon.sqlite-wal", lambda path: (path.touch(), path.chmod(0o622))),
        ("daemon.sqlite", lambda path: os.chown(path, 12345, 12345)),
        ("daemon.lock", lambda path: os.chown(path, 12345, 12345)),
        ("audit.log", lambda path: (path.unlink(), path.mkdir(mode=0o700))),
        ("audit.log", lambda path: path.chmod(0o666)),
    ],
)
async def test_a_state_folder_that_others_may_have_written_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], object]
) -> None:
    async with serving(tmp_path):
        pass
    path = tmp_path / "state" / name if name else tmp_path / "state"
    try:
        spoil(path)
    except PermissionError:
        pytest.skip("only root can give files away")
    with pytest.raises((PermissionError, NotADirectoryError), match=re.escape(str(path))):
        async with serving(tmp_path):
            pass


# ---- answers to idempotency keys -------------------------------------------------------------------


async def test_the_first_answer_is_given_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    answers = Answers(store)
    one, other = fingerprint("op", "/x", b"1"), fingerprint("op", "/x", b"2")
    assert await answers.begin(KEY, one, 1.0) is None
    with pytest.raises(Refusal, match="under way") as under_way:
        await answers.begin(KEY, one, 1.0)
    assert under_way.value.code == "conflict"
    await answers.end(KEY, Answer(201, b"{}"))
    for _ in range(2):
        assert await answers.begin(KEY, one, 2.0) == Answer(201, b"{}")
    with pytest.raises(Refusal, match="another request"):
        await answers.begin(KEY, other, 2.0)
    assert await answers.begin(KEY, other, 2.0 + KEPT_S) is None
    await answers.abandon(KEY)
    assert await answers.begin(KEY, one, 3.0 + KEPT_S) is None
    store.close()


async def test_what_was_under_way_when_the_daemon_ended_is_not_done_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    assert await Answers(store).begin(KEY, "request", 1.0) is None
    with pytest.raises(Refusal, match="may or may not have been carried out"):
        await Answers(store).begin(KEY, "request", 2.0)
    store.close()


async def test_a_callers_answers_are_bounded_and_take_nothing_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MOST_EACH": 20, "MOST_EACH_NBYTES": 50_000, "_LOOK_EACH": 3}.items():
        monkeypatch.setattr(module, name, value)
    store = Store(tmp_path / "db")
    answers = Answers(store)
    body = b"x" * 10_000

    async def post(caller: str, key: str) -> None:
        assert await answers.begin((caller, key), "r", 1.0 + len(kept)) is None
        kept.append((caller, key))
        await answers.end((caller, key), Answer(201, body))

    kept: list[tuple[str, str]] = []
    await post("uid:0", "first")
    assert await answers.begin(("greedy", "slow"), "r", 1.0) is None
    for number in range(60):
        await post("greedy", str(number))
    assert await answers.begin(("uid:0", "first"), "r", 99.0) == Answer(201, body)
    with pytest.raises(Refusal, match="under way"):
        await answers.begin(("greedy", "slow"), "r", 99.0)
    await answers.end(("greedy", "slow"), Answer(200, b"{}"))
    digest = Answer(201, b"", hashlib.sha256(body).digest())
    found = [await answers.begin(("greedy", str(number)), "r", 99.0) for number in (59, 57, 45)]
    assert found == [Answer(201, body), Answer(201, body), digest]
    assert await answers.begin(("greedy", "30"), "r", 99.0) is None, "the oldest gave way"
    store.close()


async def test_all_callers_together_are_bounded_and_small_ones_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MOST": 50, "MOST_NBYTES": 10_000, "_LOOK": 1}.items():
        monkeypatch.setattr(module, name, value)
    store = Store(tmp_path / "db")
    answers = Answers(store)
    shares = {"small": 5, "large": 40, "huge": 90}
    for caller, share in shares.items():
        for number in range(share):
            assert await answers.begin((caller, str(number)), "r", float(number)) is None
            await answers.end((caller, str(number)), Answer(200, b"x" * 1000))
    count = "SELECT substr(key, 1, instr(key, ' ') - 1), count(*), sum(length(body)) FROM answers GROUP BY 1"
    rows = store.submit(lambda db: db.execute(count).fetchall()).result()
    assert {caller: keys for caller, keys, _ in rows} == {"small": 5, "large": 22, "huge": 23}
    assert sum(nbytes for _, _, nbytes in rows) <= 10_000
    digests = store.submit(lambda db: db.execute("SELECT key FROM long_answers").fetchall()).result()
    keys = store.submit(lambda db: db.execute("SELECT key FROM answers").fetchall()).result()
    assert set(digests) <= set(keys)
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
    with pytest.raises(PermissionError, match="is a link"):
        AuditLog(tmp_path / "audit.log")
