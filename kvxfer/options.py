"""How an agent behaves: what it listens on, whom it trusts, and its bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from kvxfer.address import Address
from kvxfer.errors import invalid
from kvxfer.session import transport_registry as registry
from kvxfer.shared_secret import SecretOption, find_secrets, warn_of_value
from kvxfer.tls import Tls

ShmPeers = Literal["user", "secret"]
SHM_PEERS: Final[tuple[str, ...]] = get_args(ShmPeers)
_MOST_CTAS = 65535
_MOST_GPU = 1023
_MOST_COPY_THREADS = 64
#: Families of what a node's daemon asks of an agent.
DAEMON_VERBS: Final = ("show", "drain", "move", "grant", "settings")


def _default_spin_us() -> int:
    return 50 if len(os.sched_getaffinity(0)) >= 4 else 0


def default_copy_threads() -> int:
    """Returns `AgentOptions.copy_threads` of an agent that names none."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of an agent; the defaults suit one machine.

    Attributes
    ----------
    listen
        ``"tcp://host:port"`` (port 0: any free one), or ``""`` to accept nobody. Another host than
        loopback needs a secret.
    advertise
        At which address others reach it, ``"tcp://host:port"``, or ``"tcp://host"`` for the port that it
        listens on: behind a port that is forwarded, or to name one network of several. None: where it
        listens; of ``0.0.0.0`` and ``[::]``, which nobody can dial, the address of this host from which the
        default route leaves (see `Agent.address`).
    directory_ttl_s
        How long the directory keeps its entry without hearing of it; None for as long as the directory
        likes. The agent then renews it three times in that time, by a thread that sleeps in between, and an
        agent that dies is forgotten.
    secret
        Shared by all agents that may connect, as any user and from any host; at least 16 bytes. A tuple of
        two while one is exchanged for another: both are accepted, and the first is preferred
        (`Agent.set_secret`). A path names a file with one secret a line, one or two lines; the agent reads it
        again where it changes. None takes the file that ``KVXFER_SECRET_FILE`` names, or the value of
        ``KVXFER_SECRET``, which all programs inherit that the process starts: a line in the log says so.
        Without any of these, and with ``b""`` whatever the environment says, peers are this user's own
        processes on this host alone: they share a secret of the user's that is made on first use
        (`kvxfer.session.user_secret`).
    tls
        Certificates instead of a secret: whom they show an agent to be decides who may connect, and what goes
        over TCP is encrypted (`Tls`). None takes what ``KVXFER_TLS_CERTIFICATE`` and its like name. With a
        secret beside it, given or in the environment, the agent is refused, unless ``secret`` is ``b""``.
    shm_peers
        To whom shared memory goes, with all that lies in it: a peer that has it can read every page without a
        lease. ``"user"``: to processes of this user. ``"secret"``: to all on this host that know the secret.
        Peers that do not get it are sent their pages over a stream.
    transports
        Kinds of rails that it is willing to use (`kvxfer.session.transport_registry`; ``kvxfer doctor`` lists
        them). A session uses those that go least far; among these, pages that this agent reads or expects
        come over the first named that is up and carries them. A kind that reaches only part of a host's
        memory brings the one that reaches the rest. With ``"verbs"`` peers are given a NIC's keys of every
        region: whoever may connect can read all of it without a lease, and write it where ``verbs.ways`` is
        not ``"read"``, its default. With ``"ucx"`` and ``"libfabric"`` those listen, and authenticate nobody
        (docs/fabrics.md).
    require
        Of these, kinds without which no session goes on: `Agent.connect` fails (``unreachable``) where none
        of its rails comes up, though others would carry the pages, and a session ends with the last of them.
        Held by the agent that connects; one that is called takes what its caller dials, and ends with what
        it had.
    transport_options
        Options of transports by their names, e.g. ``{"tcp.rails": 4}``; those that are not named keep their
        defaults.
    gpu
        Index of the GPU whose memory it registers as well, as CUDA_VISIBLE_DEVICES leaves them: one an agent
        for now. It loads the kernels that copy there: seconds, the first time that they are compiled. None:
        GPU 0 where a transport that moves pages of GPUs alone is named, and else none.
    gpu_ctas
        Most CTAs of a kernel that copies there: what it may take of the model's. None: what the rail's speed
        wants. Where pages are staged these are the fewest of 1 to 8 with which the machine was found to copy
        to and from host memory nearly as fast as with more (4 where nothing could be measured); that takes a
        second the first time that a machine has such an agent, and the result is kept (``kvxfer doctor``
        shows it). Where another GPU's memory is read they are 16, by arithmetic: a link to a peer cannot be
        measured before there is a peer. A number is for both. Within one GPU more are faster, up to one for
        each of its multiprocessors.
    staging_nbytes
        Pinned host memory through which that GPU's pages go over streams: to and from
        other hosts, host memory, and GPUs that this one does not reach. Half is for what is sent, half for
        what comes; taken when the first region on the GPU is registered, less where there is less. 0, or at
        least 4 MiB; with 0 such transfers are refused.
    copy_engines
        Whether staging may copy by the GPU's copy engines what they were measured to copy as fast as
        kernels, in the same second. False leaves them to the engine, and copies by kernels alone; with
        ``gpu_ctas`` given as well nothing is measured.
    transfer_timeout_s
        Deadline of transfers and expectations that name none.
    connect_timeout_s
        The same for connecting, with the handshake and the rails.
    heartbeat_interval_s, silent_timeout_s
        A peer is lost when nothing was heard of it for ``silent_timeout_s``, not counting the time
        for which this process itself stood still; heartbeats go out every ``heartbeat_interval_s``.
    handshake_timeout_s
        How long a stranger may take to prove itself.
    lease_margin_s
        How much earlier than the owner a holder considers a lease ended.
    spin_us
        How long a busy agent spins before it sleeps. An idle one never does. 50, or 0 where this
        process may use fewer than four CPUs: there it would spin on the engine's.
    copy_threads
        Threads that copy pages between processes of one host at a time (shm: copies and conversions), or send
        and receive over several rails of streams at a time (``tcp.rails``: one rail a thread), or compute
        checksums (`integrity`: one piece a thread), with the one that drives the agent; 1 to 64. The others
        start with the first transfer that is worth it (half a MiB; of checksums 256 KiB), sleep while there
        is none, and end with the agent; 1 makes none. The default is a
        quarter of the CPUs that this process may use, 1 to 4: the engine and other ranks of the host want
        the rest, and few threads take all that memory gives (``kvxfer bench pages --copy-threads 1,2,4``).
    integrity
        Whether transfers carry a crc32c for each piece unless they say otherwise.
    max_transfers_per_peer
        Transfers that a peer may have open here, and that this agent opens at a peer; more of its
        own wait their turn. Up to 65,536; an agent serves as many at a time for all of its peers, and no more
        than two thirds of them for one.
    eager_nbytes
        A write of up to so many bytes, as they cross a stream, goes along with the frame that announces it
        where its peer would have to ask for them over a stream (tcp, unix): one trip instead of three. It
        lands at once where its tag is expected or a lease allows it, and is asked for as ever where that
        comes later. `Transfer.rails` says ``"eager"`` of what went so. The smaller number of both ends
        counts; 0 to 65,536. Not with ``integrity``, nor for pages of a GPU.
    meter_gate
        Whether the processor time for which threads hold the agent's progress gate is measured exactly
        (``gate_longest_hold_ns`` and ``gate_holds`` of `Agent.stats`). It costs two system calls for every
        call and every round; without it two readings of the processor's clock, and a system call for what
        took long by that.
    daemon
        The node's daemon that the agent attaches to (``kvxfer serve``): its runtime folder or its socket,
        which is called until it answers. None: the one whose socket is there when the agent is made, in
        ``KVXFER_DAEMON_DIR``, or else in this user's runtime folder (``kvxfer`` in ``XDG_RUNTIME_DIR``,
        ``/tmp/kvxfer-<uid>``) or root's (``/run/kvxfer``); with an empty ``KVXFER_DAEMON_DIR`` none.
        ``""``: none. A daemon of another user than this one or root is not obeyed. Attached, the agent has a
        thread of its own for it, which sleeps while nothing happens; without, none.
    daemon_may
        What the agent does for the daemon: ``"show"`` its state and transfers; ``"drain"``, which sets
        `Agent.draining`; ``"move"`` pages between its regions and peers'; ``"grant"`` leases on its regions,
        and end any; ``"settings"``, such as the log's level. All else is refused in words. With ``"move"``
        and ``"grant"`` whoever may ask the daemon reads and overwrites its caches.
    faults
        Injected faults (`kvxfer.testing.FaultPlan`); ``""`` for none. For tests alone.
    """

    listen: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    directory_ttl_s: float | None = None
    secret: SecretOption | None = None
    tls: Tls | None = None
    shm_peers: ShmPeers = "user"
    transports: tuple[str, ...] = field(default_factory=registry.default_names)
    require: tuple[str, ...] = ()
    transport_options: Mapping[str, registry.OptionValue] = field(default_factory=dict)
    gpu: int | None = None
    gpu_ctas: int | None = None
    # Each way 32 MiB, of which one peer has 8: two windows of a stream, or a piece between GPUs.
    staging_nbytes: int = 64 * 1024 * 1024
    copy_engines: bool = True
    transfer_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    heartbeat_interval_s: float = 0.5
    silent_timeout_s: float = 2.0
    handshake_timeout_s: float = 2.0
    lease_margin_s: float = 0.1
    spin_us: int = field(default_factory=_default_spin_us)
    copy_threads: int = field(default_factory=default_copy_threads)
    integrity: bool = False
    # A sixteenth of the fence table's slots (transport.h: FenceTable); no peer can take more than two thirds.
    max_transfers_per_peer: int = 4096
    eager_nbytes: int = 8192
    meter_gate: bool = False
    daemon: str | None = None
    daemon_may: tuple[str, ...] = ("show", "drain")
    faults: str = ""

    @property
    def device(self) -> int | None:
        """Index of the GPU that the agent has; None for none."""
        return 0 if self.gpu is None and registry.need_gpu(self.transports) else self.gpu

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__slots__}
        shown["secret"] = None if self.secret is None else "..."
        return f"AgentOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def to_native(self) -> dict[str, Any]:
        """Returns the native agent's options, checked, with the secret looked up; ``gpus`` is left to fill.

        Raises
        ------
        UsageError
            ``invalid-argument``, naming the option and what to set it to.
        """
        # By native code, without which options can be read.
        from kvxfer.arguments import check_kind, count, seconds

        for name in (
            "transfer_timeout_s",
            "connect_timeout_s",
            "heartbeat_interval_s",
            "silent_timeout_s",
            "handshake_timeout_s",
        ):
            if not seconds(value := getattr(self, name), f"option {name}"):
                raise invalid(f"option {name} is {value!r}, but must be a positive number of seconds")
        if self.silent_timeout_s < 2 * self.heartbeat_interval_s:
            raise invalid(
                f"option silent_timeout_s ({self.silent_timeout_s}) is less than two heartbeat_interval_s "
                f"({self.heartbeat_interval_s}): one late heartbeat would lose the peer"
            )
        seconds(self.lease_margin_s, "option lease_margin_s")
        if self.directory_ttl_s is not None and not seconds(self.directory_ttl_s, "option directory_ttl_s"):
            raise invalid("option directory_ttl_s is 0, but must be a positive number of seconds, or None")
        check_kind(self.listen, "option listen", str, '"tcp://host:port", or "" to accept nobody')
        _check_advertise(self.advertise, self.listen)
        for name, low, high in (
            ("staging_nbytes", 0, 1 << 40),
            ("spin_us", 0, 1_000_000),
            ("copy_threads", 1, _MOST_COPY_THREADS),
            ("max_transfers_per_peer", 1, 65536),
            ("eager_nbytes", 0, 65536),
        ):
            count(getattr(self, name), f"option {name}", low, high)
        if self.gpu is not None:
            count(self.gpu, "option gpu", 0, _MOST_GPU)
        if self.gpu_ctas is not None:
            count(self.gpu_ctas, "option gpu_ctas", 1, _MOST_CTAS)
        if not isinstance(self.copy_engines, bool):
            raise invalid(f"option copy_engines is {self.copy_engines!r}, but must be True or False")
        if not isinstance(self.meter_gate, bool):
            raise invalid(f"option meter_gate is {self.meter_gate!r}, but must be True or False")
        if 0 < self.staging_nbytes < (least := registry.least_staging_nbytes()):
            raise invalid(
                f"option staging_nbytes is {self.staging_nbytes}, but must be 0 for none or at least {least}"
            )
        check_kind(self.daemon, "option daemon", str | None, 'a folder, a socket, None, or "" for no daemon')
        for option in ("transports", "require", "daemon_may"):
            if isinstance(named := getattr(self, option), str):
                raise invalid(f"option {option} is {named!r}: write ({named!r},)")
        registry.check(self.transports, self.transport_options)
        for kind in self.require:
            if kind not in self.transports:
                raise invalid(f"option require has {kind!r}, which is none of transports {self.transports}")
        check_kind(self.daemon_may, "option daemon_may", tuple | list, f"some of {DAEMON_VERBS}")
        for family in self.daemon_may:
            if family not in DAEMON_VERBS:
                raise invalid(f"option daemon_may has {family!r}, which is none of {DAEMON_VERBS}")
        if self.shm_peers not in SHM_PEERS:
            raise invalid(
                f"option shm_peers is {self.shm_peers!r}: write {' or '.join(map(repr, SHM_PEERS))}"
            )
        from kvxfer.session.user_secret import (
            user_secret,
        )  # files and random numbers, which few programs lack by then

        secrets = find_secrets(self.secret)
        secret = secrets.first
        warn_of_value(secrets)
        tls = Tls.of_environment() if self.tls is None and self.secret is None else self.tls
        check_kind(tls, "option tls", Tls | None, "a kvxfer.Tls, or None")
        if tls is not None and secret:
            raise invalid(
                "certificates (option tls, or KVXFER_TLS_CERTIFICATE) and a secret are both given: an agent "
                'has one of them. Unset the other; secret=b"" leaves out what the environment says'
            )
        is_open = not secret and tls is None
        if self.listen and is_open and not Address.parse(self.listen, "option listen").is_loopback:
            raise invalid(
                f"listening on {self.listen} without a secret would let anybody who reaches it read and "
                "write the cache: set secret= or KVXFER_SECRET_FILE, or tls= for certificates, or listen on "
                "tcp://127.0.0.1:0"
            )
        return {
            "listen": self.listen,
            "secret": secret,
            "second_secret": secrets.second,
            "secret_file": secrets.file,
            "user_secret": b"" if secret or tls else user_secret(),
            **({} if tls is None else {"tls": tls.to_native()}),
            "shm_peers": self.shm_peers,
            "transports": list(self.transports),
            "require": list(self.require),
            "transport_options": dict(self.transport_options),
            "gpus": [],
            "silent_timeout_s": seconds(self.silent_timeout_s, "option silent_timeout_s"),
            "heartbeat_interval_s": seconds(self.heartbeat_interval_s, "option heartbeat_interval_s"),
            "handshake_timeout_s": seconds(self.handshake_timeout_s, "option handshake_timeout_s"),
            "lease_margin_s": seconds(self.lease_margin_s, "option lease_margin_s"),
            "spin_us": int(self.spin_us),
            "copy_threads": int(self.copy_threads),
            "integrity": self.integrity,
            "max_transfers_per_peer": int(self.max_transfers_per_peer),
            "eager_nbytes": int(self.eager_nbytes),
            "meter_gate": self.meter_gate,
            "faults": self.faults,
        }


def _check_advertise(advertise: str | None, listen: str) -> None:
    if advertise is None:
        return
    if not listen:
        raise invalid(f"option advertise is {advertise!r}, but this agent listens nowhere: leave one out")
    told = Address.parse(advertise, "option advertise", port_needed=False)
    if told.is_wildcard or told.port == 0:
        raise invalid(
            f"option advertise is {advertise!r}, which nobody can dial: write the host that others reach, "
            "and a port only where it is another than the one that is listened on"
        )
