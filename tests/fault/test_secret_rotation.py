"""Secrets change while agents run: no session or transfer is lost, and a wrong secret is refused."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from kvxfer.agent import Agent
from kvxfer.errors import AgentError, KvxferError, PeerError, UsageError
from kvxfer.shared_secret import find_secrets
from tests.fault.node import BOUND_S, LONG_S, ROOT, Local, Node, options_for
from tests.seeds import seed_of
from tests.waiting import until

Secret = bytes | tuple[bytes, ...] | Path

OLD: Final = b"the secret that goes: 0123"
NEW: Final = b"the secret that comes: 4567"
THIRD: Final = b"what nobody was given: 89"
_numbers: Final = count()


@pytest.fixture
def agents() -> Iterator[Callable[..., Agent]]:
    """Makes agents that end with the test."""
    made: list[Agent] = []

    def make(secret: Secret, **options: Any) -> Agent:
        made.append(Agent(f"agent-{next(_numbers)}", options_for("tcp", secret=secret, **options)))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with the old secret, in a folder of its own."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/kvxfer").write_bytes(OLD)
    return tmp_path / "secrets/kvxfer"


def outcome(caller: Agent, called: Agent) -> str:
    """Returns how a session between them begins: "" or an error's code."""
    try:
        caller.connect_blocking(called.address, BOUND_S)
    except PeerError as error:
        return error.code
    return ""


def as_called(secret: Secret, called: Agent) -> str:
    """Returns the outcome for a new agent with this secret that dials."""
    with Agent(f"caller-{next(_numbers)}", options_for("tcp", secret=secret, listen="")) as caller:
        return outcome(caller, called)


def as_caller(secret: Secret, caller: Agent) -> str:
    """Returns the outcome for a new agent with this secret that is dialled."""
    with Agent(f"called-{next(_numbers)}", options_for("tcp", secret=secret)) as called:
        return outcome(caller, called)


def takes(called: Agent, *accepted: Secret, refused: tuple[Secret, ...] = ()) -> None:
    """Asserts with which secrets new agents may dial."""
    found = {secret: as_called(secret, called) for secret in (*accepted, *refused)}
    assert found == dict.fromkeys(accepted, "") | dict.fromkeys(refused, "auth-failed")


def until_accepted(secret: Secret, called: Agent) -> None:
    until(lambda: not as_called(secret, called), lambda: as_called(secret, called))


def logged(agent: Agent, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines of the log so far."""
    agent.take_notification()
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvxfer")]


def until_logged(agent: Agent, caplog: pytest.LogCaptureFixture, words: str) -> None:
    until(lambda: any(words in line for line in logged(agent, caplog)), lambda: logged(agent, caplog))


# ---- by a call ------------------------------------------------------------------------------------


def test_a_secret_is_exchanged_and_no_session_or_transfer_is_lost(
    local: Local, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvxfer")
    here, there = local("here", "tcp", secret=OLD), local("there", "tcp", secret=OLD)
    there.fill(5)
    here.connect(there.address())
    there.accept("here")
    there.grant("read")
    now: dict[str, Secret] = {"here": OLD, "there": OLD}
    both = (NEW, OLD)
    steps: tuple[tuple[Node, Any], ...] = ((here, both), (there, both), (here, NEW), (there, NEW))
    for step, (node, secret) in enumerate(steps):
        here.set(0)
        work = here.read_until_bytes_land(held=True)
        node.agent.set_secret(secret)
        now[node.agent.name] = secret
        here.let_go()
        assert here.end(work) is None, f"step {step}"
        assert here.holds(5)
        for end, other in ((here, there), (there, here)):
            assert as_called(now[end.agent.name], other.agent) == "", f"step {step}"
            assert as_caller(now[end.agent.name], other.agent) == "", f"step {step}"
    assert here.peer_state() == there.peer_state() == ("open", "")
    for node in (here, there):
        takes(node.agent, (OLD, NEW), refused=(OLD,))
        assert as_caller(OLD, node.agent) == "auth-failed"
    for line in logged(here.agent, caplog) + logged(there.agent, caplog):
        assert OLD.decode() not in line
        assert NEW.decode() not in line


def test_sessions_that_begin_while_secrets_change_find_the_common_one(agents: Callable[..., Agent]) -> None:
    """Both ends change their secrets continuously, and always have one in common."""
    called, callers = agents((OLD, NEW)), [agents((NEW, OLD), listen="") for _ in range(3)]
    lists = ((OLD, NEW), (NEW, OLD), (NEW, THIRD), (THIRD, NEW), NEW)
    over = threading.Event()
    failed: list[str] = []

    def change(agent: Agent, seed: int) -> None:
        chosen = random.Random(seed)
        while not over.is_set():
            agent.set_secret(chosen.choice(lists))

    def call(caller: Agent) -> None:
        for _ in range(60):
            try:
                caller.connect_blocking(called.address, BOUND_S).disconnect()
            except PeerError as error:
                failed.append(f"{error.code}: {error}")

    changing = [
        threading.Thread(target=change, args=(agent, seed_of("secrets") + index))
        for index, agent in enumerate((called, *callers))
    ]
    calling = [threading.Thread(target=call, args=(caller,)) for caller in callers]
    for thread in (*changing, *calling):
        thread.start()
    for thread in calling:
        thread.join()
    over.set()
    for thread in changing:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OLD, NEW),
        ((OLD, NEW), THIRD),
        ((OLD, NEW), (THIRD, THIRD + b"x")),
        ((OLD, NEW), b""),
    ],
)
def test_disjoint_secrets_are_refused_in_words(
    agents: Callable[..., Agent], one: Secret, other: Secret
) -> None:
    first, second = agents(one), agents(other)
    for caller, called in ((first, second), (second, first)):
        with pytest.raises(PeerError) as caught:
            caller.connect_blocking(called.address, BOUND_S)
        assert caught.value.code == "auth-failed"
        assert "secret" in str(caught.value)
        for secret in (OLD, NEW, THIRD):
            assert secret.decode() not in str(caught.value)


REFUSED: Final[tuple[object, ...]] = (
    *(b"", "short", (), (OLD, b""), (OLD, "short"), (OLD, NEW, THIRD), [OLD, NEW], (OLD, 5), 5, None),
)


@pytest.mark.parametrize("secret", REFUSED, ids=repr)
def test_what_is_no_secret_is_refused_and_changes_nothing(agents: Callable[..., Agent], secret: Any) -> None:
    agent = agents(OLD)
    with pytest.raises(UsageError) as caught:
        agent.set_secret(secret)
    assert caught.value.code == "invalid-argument"
    assert OLD.decode() not in str(caught.value)
    takes(agent, OLD)
    with pytest.raises(UsageError, match="was not read from a file"):
        agent.reload_secret()


@pytest.mark.parametrize(
    ("is_closed", "error", "words"),
    [
        (False, UsageError, r"(?s)made without a secret.*\[invalid-argument"),
        (True, AgentError, r"(?s)closed.*\[closed"),
    ],
)
def test_an_agent_of_its_users_own_secret_or_a_closed_one_is_given_none(
    agents: Callable[..., Agent], is_closed: bool, error: type[KvxferError], words: str
) -> None:
    agent = agents(OLD if is_closed else b"")
    if is_closed:
        agent.close()
    verbs: tuple[Callable[[], None], ...] = (lambda: agent.set_secret(NEW), agent.reload_secret)
    for verb in verbs:
        with pytest.raises(error, match=words):
            verb()
    if not is_closed:
        takes(agent, b"", refused=(NEW,))


# ---- by a file --------------------------------------------------------------------------------------


def replace_by_rename(file: Path, text: bytes) -> None:
    fresh = file.with_name(".fresh")
    fresh.write_bytes(text)
    fresh.rename(file)


def write_in_place(file: Path, text: bytes) -> None:
    file.write_bytes(text)


def remove_and_return(file: Path, text: bytes) -> None:
    file.unlink()
    file.write_bytes(text)


def return_with_its_folder(file: Path, text: bytes) -> None:
    shutil.rmtree(file.parent)
    file.parent.mkdir()
    file.write_bytes(text)


def link_whole(file: Path, text: bytes) -> None:
    """Writes a whole file elsewhere, links it to its place, and removes its first name."""
    fresh = file.with_name(".fresh")
    fresh.write_bytes(text)
    file.unlink()
    file.hardlink_to(fresh)
    fresh.unlink()


CHANGES: Final = (replace_by_rename, write_in_place, remove_and_return, return_with_its_folder, link_whole)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_a_file_that_changes_is_read_again(
    agents: Callable[..., Agent], file: Path, change: Callable[[Path, bytes], None]
) -> None:
    agent, friend = agents(file), agents(OLD)
    assert outcome(friend, agent) == ""
    for text, accepted, refused in (
        (NEW + b"\n" + OLD + b"\n", (NEW, OLD), THIRD),
        (NEW, (NEW,), OLD),
        (OLD + b"\r\n" + THIRD + b"\r\n", (OLD, THIRD), NEW),
    ):
        change(file, text)
        for secret in accepted:
            until_accepted(secret, agent)
            assert as_caller(secret, agent) == ""
        until(lambda: as_called(refused, agent) == "auth-failed", f"{refused!r} is still taken")  # noqa: B023
    assert [peer.state for peer in friend.peers] == ["open"], "what was open stays"


class Mounted:
    """A folder as Kubernetes mounts a Secret: a link to a file behind ``..data``, a link that is swapped."""

    def __init__(self, folder: Path, text: bytes) -> None:
        self.folder = folder
        self.file = folder / "kvxfer"
        folder.mkdir()
        self.swap(text)
        self.file.symlink_to("..data/kvxfer")

    def swap(self, text: bytes) -> None:
        old = (self.folder / "..data").resolve() if (self.folder / "..data").is_symlink() else None
        fresh = self.folder / f"..{next(_numbers)}"
        fresh.mkdir()
        (fresh / "kvxfer").write_bytes(text)
        (self.folder / "..data_tmp").symlink_to(fresh.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")
        if old is not None:
            shutil.rmtree(old)


def test_a_link_that_is_swapped_is_seen(agents: Callable[..., Agent], tmp_path: Path) -> None:
    mounted = Mounted(tmp_path / "mounted", OLD)
    agent = agents(mounted.file)
    for secret, last in ((NEW, OLD), (THIRD, NEW), (OLD, THIRD)):
        mounted.swap(secret)
        until_accepted(secret, agent)
        takes(agent, refused=(last,))


def test_a_file_that_is_being_written_counts_when_it_is_closed(
    agents: Callable[..., Agent], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = agents(file)
    with file.open("wb") as opened:
        opened.write(NEW[:18])
        opened.flush()
        file.with_name("another").write_bytes(b"of the same folder")
        takes(agent, OLD, refused=(NEW[:18],))
        opened.write(NEW[18:])
    until_accepted(NEW, agent)
    assert not [line for line in logged(agent, caplog) if "keeps its previous secrets" in line]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "a line of 0 bytes"),
        (b"\n".join((OLD, NEW, THIRD)), "more than two lines"),
    ],
)
def test_a_file_without_secrets_leaves_the_last_ones_and_is_one_line_in_the_log(
    agents: Callable[..., Agent], file: Path, caplog: pytest.LogCaptureFixture, text: bytes | None, words: str
) -> None:
    caplog.set_level(logging.DEBUG, "kvxfer")
    agent = agents(file)
    for _ in range(3):
        if text is None:
            file.unlink(missing_ok=True)
            file.symlink_to("nowhere")
            file.unlink()
        else:
            file.write_bytes(text)
        until_logged(agent, caplog, words)
        with pytest.raises(UsageError, match=words):
            agent.reload_secret()
        takes(agent, OLD)
    complaints = [line for line in logged(agent, caplog) if "keeps its previous secrets" in line]
    assert len(complaints) == 1, complaints
    assert str(file) in complaints[0]
    file.write_bytes(NEW)
    until_accepted(NEW, agent)
    takes(agent, refused=(OLD,))
    for line in logged(agent, caplog):
        assert not any(secret.decode() in line for secret in (OLD, NEW, THIRD))


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (OLD, (OLD,)),
        (OLD + b"\n", (OLD,)),
        (OLD + b"\r\n\r\n\n", (OLD,)),
        (OLD + b"\n" + NEW, (OLD, NEW)),
        (OLD + b"\r\n" + NEW + b"\r\n", (OLD, NEW)),
        (b"  " + OLD + b" \n", (b"  " + OLD + b" ",)),
        (b"x" * 4096, (b"x" * 4096,)),
        (b"\xff\0" * 8, (b"\xff\0" * 8,)),
        (b"", None),
        (b"\n\n", None),
        (b"x" * 15, None),
        (OLD + b"\n\n" + NEW, None),
        (b"\n" + OLD, None),
        (OLD + b"\n" + b"x" * 15, None),
        (OLD + b"\n" + NEW + b"\n" + THIRD, None),
        (b"x" * 4097, None),
    ],
)
def test_a_file_is_read_alike_at_first_and_again(
    agents: Callable[..., Agent], file: Path, text: bytes, accepted: tuple[bytes, ...] | None
) -> None:
    file.write_bytes(THIRD)
    agent = agents(file)
    file.write_bytes(text)
    if accepted is None:
        with pytest.raises(UsageError, match=str(file)):
            find_secrets(file)
        with pytest.raises(UsageError, match=str(file)):
            agent.reload_secret()
        accepted = (THIRD,)
    else:
        assert find_secrets(file).accepted == accepted
        agent.reload_secret()
    takes(agent, *accepted)


def test_what_a_call_set_holds_until_the_file_changes(agents: Callable[..., Agent], file: Path) -> None:
    agent = agents(file)
    agent.set_secret(NEW)
    takes(agent, NEW)
    os.utime(file)
    takes(agent, refused=(OLD,))
    agent.reload_secret()
    takes(agent, OLD, refused=(NEW,))
    file.write_bytes(THIRD)
    until_accepted(THIRD, agent)


def _descriptors() -> list[str]:
    """Returns the target of each descriptor of this process, except the one that lists them."""
    gc.collect()  # agents that have ended keep some while their objects live
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(f"{fd.name} {fd.readlink()}")
    return found


def _watches() -> list[int]:
    """Returns how many folders each inotify descriptor of this process watches."""
    inotify = [line.split()[0] for line in _descriptors() if line.endswith("anon_inode:inotify")]
    return sorted(Path(f"/proc/self/fdinfo/{fd}").read_text().count("inotify wd:") for fd in inotify)


def test_hundreds_of_changes_leak_no_descriptor_and_no_watch(
    agents: Callable[..., Agent], file: Path, tmp_path: Path
) -> None:
    mounted = Mounted(tmp_path / "mounted", OLD)
    before = _watches()
    one, two = agents(mounted.file), agents(file)
    watched, num_open = _watches(), len(_descriptors())
    assert len(watched) == len(before) + 2
    for step in range(300):
        secret = THIRD + str(step).encode()
        mounted.swap(secret)
        CHANGES[step % 3](file, secret)
    for agent in (one, two):
        until_accepted(secret, agent)
    # Sockets of refused callers close last.
    until(lambda: _watches() == watched and len(_descriptors()) <= num_open, _descriptors)
    one.close()
    two.close()
    assert _watches() == before


_UNWATCHED: Final = """
import logging, sys
from pathlib import Path
from tests.fault import confinement
from kvxfer import Agent

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("kvxfer").addHandler(handler)
confinement.forbid_inotify()
file = Path(sys.argv[1])
with Agent("unwatched", secret=file) as agent:
    agent.take_notification()
    said = [line for line in lines if "reload_secret()" in line and "inotify" in line]
    assert len(said) == 1, lines
    file.write_bytes(file.read_bytes()[::-1])
    agent.reload_secret()
    with Agent("caller", secret=file.read_bytes()) as caller:
        caller.connect_blocking(agent.address)
"""


def test_without_inotify_the_log_says_so_and_a_call_reads_the_file(file: Path) -> None:
    command = [sys.executable, "-c", _UNWATCHED, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fork_keeps_no_watch(agents: Callable[..., Agent], file: Path) -> None:
    agent = agents(file)
    pid = os.fork()
    if pid == 0:
        os._exit(len(_watches()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    file.write_bytes(NEW)
    until_accepted(NEW, agent)
