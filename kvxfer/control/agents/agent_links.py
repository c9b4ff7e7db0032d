"""The daemon's end of the link: accepts agents, keeps their reports, and calls them."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kvxfer.control.agents.agent_errors import AgentGone
from kvxfer.control.agents.agent_link import MOST_AGENTS, AgentLink, LinkTable
from kvxfer.control.agents.attached import Attached
from kvxfer.control.state.own_files import own_folder
from kvxfer.daemon_link.runtime_folder import SOCKET_NAME, checked
from kvxfer.session.records import Record, decode


class AgentLinks:
    """Accepts agents on ``agents.sock`` of a folder, keeps their reports, and calls them.

    All methods belong to one event loop, which also runs the callbacks. A callback must not block; if it
    raises, the connection that caused it ends. 256 agents may be attached, and each may hold 4 MiB of
    buffers. An agent that is too slow, or breaks the protocol, loses only its own connection, and can attach
    again.

    Parameters
    ----------
    folder
        The daemon's runtime folder; made (0700) if it does not exist.
    on_records
        Called with the agent and records of transfers and expectations that have ended, oldest first.
    on_change
        Called with the agent and the names of what has changed: ``"attached"`` (everything), ``"gone"``
        (it is no longer in `agents`), or some of ``"regions"``, ``"peers"``, ``"leases"``,
        ``"leases_ended"``, ``"stats"``, ``"draining"``.
    allowed_uids
        Users whose agents may attach; None for the daemon's own user and root.
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
        self._links = LinkTable(on_records, on_change, uids)
        #: Attached agents, by incarnation (hexadecimal digits). Read only.
        self.agents = self._links.agents
        self._server: asyncio.Server | None = None
        self._lock_fd = -1

    async def start(self) -> None:
        """Starts to listen.

        Raises
        ------
        OSError
            The folder or socket cannot be made. ``BlockingIOError``: another daemon has the folder.
        PermissionError
            The folder belongs to another user, or others may write to it.
        UsageError
            ``invalid-argument``: the path is too long for a socket.
        """
        path = checked(self._folder / SOCKET_NAME)
        for_others = bool(self._links.allowed_uids - {0, os.geteuid()})
        own_folder(self._folder, 0o711 if for_others else 0o700)
        # The lock ends with the process, however the process ends; the socket's name stays.
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
            path.chmod(0o666 if for_others else 0o600)  # before it listens: nothing can connect yet
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: AgentLink(self._links, loop), sock=listening, backlog=MOST_AGENTS
            )
        except BlockingIOError as error:
            listening.close()
            self._unlock()
            raise BlockingIOError(error.errno, "another daemon uses the folder", str(self._folder)) from None
        except BaseException:
            listening.close()
            self._unlock()
            raise

    async def aclose(self) -> None:
        """Ends all connections and the socket; agents take that as the daemon's end. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for link in list(self._links.open):
            link.end("")
        (self._folder / SOCKET_NAME).unlink(missing_ok=True)
        self._unlock()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Calls an agent, and returns its answer.

        Parameters
        ----------
        verb, args
            One of:

            - ``show.state`` {}: the current sections, in the form of `Attached`.
            - ``drain`` {deadline_s}: seconds; None ends the drain. Returns ``{}``
            - ``move.read``, ``move.write`` {region, remote_agent, remote_region, src_blocks, dst_blocks,
              layers, heads, tokens, lease, notify, timeout_s, priority, context, allow}: everything after
              `dst_blocks` is optional, and as in `Agent.write`; `layers` lists each layer. `remote_agent` is
              a name, an incarnation or an address; the agent connects to it if it is not a peer yet, and then
              dials only hosts of `allow` (as in `AllowedHosts`), whatever a directory or a name server says.
              `lease` is a token's text, and `notify` is text. Returns when the transfer is posted:
              ``{"session", "handle", "is_source"}``;
              the record with that handle reports the end.
            - ``move.cancel`` {handle} for a transfer that was posted so, or {session, transfer, is_source} as
              in records: ``{"found": bool}``
            - ``move.connect`` {remote_agent, allow}: as above. Returns the open session, or a new one:
              ``{"peer": row}``, as in `Attached.peers`
            - ``grant.grant`` {region, holder, session, blocks, mode, ttl_s}: `holder` is a name or None. With
              `session` the holder is that peer; a write lease needs a session.
              ``{"lease": id, "token": text}``
            - ``grant.extend`` {lease, ttl_s}: the lease lasts at least `ttl_s` from now. ``{"found": bool}``
            - ``grant.revoke`` {lease}: by its id; returns when the fence is complete. ``{"found": bool}``
            - ``settings.set`` {log_level, peers, rails}, all optional. `log_level` is debug, info, warning,
              error or critical. `peers` maps names to ``{max_bytes_per_s, least_priority}``, as in
              `Agent.limit`, or None. `rails` maps transports to whether they are on. If rails cannot be
              switched, no limit and no level is changed. ``{}``
        timeout_s
            How long the answer may take.

        Raises
        ------
        CallRefused
            The agent refused or failed; it did nothing, unless the words say otherwise.
        AgentGone
            The agent is not attached, or went away.
        TimeoutError
            No answer in time; the agent may still carry out the call.
        """
        link = self._link(incarnation)
        return await link.call(verb, args, timeout_s)

    async def open_transfers(
        self, incarnation: str, most: int = 256, timeout_s: float = 10.0
    ) -> list[Record]:
        """Returns records of an agent's open transfers and expectations, at most 1024.

        Raises
        ------
        CallRefused, AgentGone, TimeoutError
            As for `call`.
        """
        link = self._link(incarnation)
        answer = await link.call("show.transfers", {"most": most}, timeout_s)
        try:
            return decode(base64.b64decode(answer["records"], validate=True))
        except (KeyError, TypeError, ValueError, IndexError):
            link.end("its answer has no valid records")
            raise AgentGone(
                f"agent {incarnation} answered without valid records, and was disconnected"
            ) from None

    def _link(self, incarnation: str) -> AgentLink:
        link = self._links.by_agent.get(incarnation)
        if link is None:
            raise AgentGone(f"no agent of incarnation {incarnation} is attached")
        return link

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
