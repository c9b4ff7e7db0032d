"""The daemon's side of the attachment: accepts agents, keeps what they told, and calls them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kvxfer.attachment.runtime_folder import SOCKET_NAME, checked
from kvxfer.control.agent_errors import AgentGone
from kvxfer.control.agent_line import MOST_AGENTS, AgentLine, Lines
from kvxfer.control.attached import Attached
from kvxfer.session.records import Record, decode


class Attachments:
    """Accepts agents on ``agents.sock`` of a folder, keeps what they told, and calls them.

    All on one event loop, whose own methods these are; callbacks are called on it, must not block, and end
    the connection that made them raise. 256 agents may be attached; each may hold 4 MiB of buffers. One that
    is slow, or says what no agent says, loses its connection alone, and comes back if it is one.

    Parameters
    ----------
    folder
        The daemon's runtime folder; made (0700) where it is not there.
    on_records
        Called with the agent and records of transfers and expectations that have ended, oldest first.
    on_change
        Called with the agent and the names of what has changed: ``"attached"`` (all of it), ``"gone"``
        (it is in `agents` no more), or some of ``"regions"``, ``"peers"``, ``"leases"``,
        ``"leases_ended"``, ``"stats"``, ``"draining"``.
    allowed_uids
        Users whose agents may attach; None for the daemon's own and root.
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_records: Callable[[Attached, list[Record]], None],
        on_change: Callable[[Attached, frozenset[str]], None],
        allowed_uids: Collection[int] | None = None,
    ) -> None:
        self._folder = folder
        uids = frozenset({0, os.geteuid()} if allowed_uids is None else allowed_uids)
        self._lines = Lines(on_records, on_change, uids)
        #: Those that are attached, by incarnation (hexadecimal digits). Read only.
        self.agents = self._lines.agents
        self._server: asyncio.Server | None = None
        self._lock_fd = -1

    async def start(self) -> None:
        """Listens.

        Raises
        ------
        OSError
            The folder or socket cannot be made. ``BlockingIOError``: another daemon has the folder.
        PermissionError
            The folder belongs to another user, or others may write to it.
        UsageError
            ``invalid-argument``: no socket can have that path.
        """
        path = checked(self._folder / SOCKET_NAME)
        for_others = bool(self._lines.allowed_uids - {0, os.geteuid()})
        _make_folder(self._folder, 0o711 if for_others else 0o700)
        # It goes with the process, however that ends; the socket's name stays.
        self._lock_fd = os.open(
            path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        listening = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            listening.bind(os.fspath(path))
            path.chmod(0o666 if for_others else 0o600)  # before it listens, so that nobody is in between
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: AgentLine(self._lines, loop), sock=listening, backlog=MOST_AGENTS
            )
        except BlockingIOError as error:
            listening.close()
            self._unlock()
            raise BlockingIOError(error.errno, "another daemon has the folder", str(self._folder)) from None
        except BaseException:
            listening.close()
            self._unlock()
            raise

    async def aclose(self) -> None:
        """Ends all connections, which agents take for the daemon's end, and the socket. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for line in list(self._lines.open):
            line.end("")
        (self._folder / SOCKET_NAME).unlink(missing_ok=True)
        self._unlock()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Has an agent do something, and returns what it answers.

        Parameters
        ----------
        verb, args
            One of:

            - ``show.state`` {}: sections as `Attached` has them, of now.
            - ``drain`` {deadline_s}: a number of seconds; None takes it back. ``{}``
            - ``move.read``, ``move.write`` {region, remote_agent, remote_region, src_blocks, dst_blocks,
              layers, heads, tokens, lease, notify, timeout_s, priority, context}: all after `dst_blocks` may
              be left out, and are as in `Agent.write`. `remote_agent` is a name, an incarnation or an
              address, connected to where it is none of the agent's peers; `lease` a token's text, `notify`
              text. Returns when it is posted: ``{"session", "handle", "is_source"}``; the record with that
              handle tells the end.
            - ``move.cancel`` {handle} of one that was posted so, or {session, transfer, is_source} as records
              have them: ``{"found": bool}``
            - ``move.connect`` {remote_agent}: named as above. Returns the session that is open, or a new one:
              ``{"peer": row}``, as in `Attached.peers`
            - ``grant.grant`` {region, holder, session, blocks, mode, ttl_s}: `holder` is a name or None; with
              `session`, which alone may write, it is that peer. ``{"lease": id, "token": text}``
            - ``grant.extend`` {lease, ttl_s}: it ends no earlier than that from now. ``{"found": bool}``
            - ``grant.revoke`` {lease}: its id; returns when the fence is complete. ``{"found": bool}``
            - ``settings.set`` {log_level, peers, rails}, each of which may be left out: debug, info, warning,
              error or critical; by peers' names ``{max_bytes_per_s, least_priority}`` as in `Agent.limit`, or
              None; by transports whether their rails are on. Where rails cannot be switched, no limit and no
              level is changed. ``{}``
        timeout_s
            How long the answer may take.

        Raises
        ------
        CallRefused
            The agent refused, or failed: nothing was done, unless the words say otherwise.
        AgentGone
            It is not attached, or went.
        TimeoutError
            No answer in time; what was asked may be done yet.
        """
        line = self._line(incarnation)
        return await line.call(verb, args, timeout_s)

    async def open_transfers(
        self, incarnation: str, most: int = 256, timeout_s: float = 10.0
    ) -> list[Record]:
        """Returns records of an agent's transfers and expectations that are open: 1024 at most.

        Raises
        ------
        CallRefused, AgentGone, TimeoutError
            As `call` does.
        """
        line = self._line(incarnation)
        answer = await line.call("show.transfers", {"most": most}, timeout_s)
        try:
            return decode(base64.b64decode(answer["records"], validate=True))
        except (KeyError, TypeError, ValueError, IndexError):
            line.end("it answered with no records")
            raise AgentGone(f"agent {incarnation} answered with no records, and was left") from None

    def _line(self, incarnation: str) -> AgentLine:
        line = self._lines.by_agent.get(incarnation)
        if line is None:
            raise AgentGone(f"no agent of incarnation {incarnation} is attached")
        return line

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make_folder(folder: Path, mode: int) -> None:
    """Makes the runtime folder, or finds it this user's own."""
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}: it must be this "
            "user's, and nobody else may write to it"
        )
    folder.chmod(mode)
