"""An agent's options: where the agent listens, which peers it trusts, and its limits."""

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
#: Groups of requests that a node's daemon can make of an agent.
DAEMON_VERBS: Final = ("show", "drain", "move", "grant", "settings")


def _default_spin_us() -> int:
    return 50 if len(os.sched_getaffinity(0)) >= 4 else 0


def default_copy_threads() -> int:
    """Returns the default of `AgentOptions.copy_threads`."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of an agent. The defaults suit agents on one machine.

    Attributes
    ----------
    listen
        ``"tcp://host:port"`` (port 0: any free one), or ``""`` to accept no peers. A host other than loopback
        needs a secret.
    advertise
        The address at which peers reach this agent: ``"tcp://host:port"``, or ``"tcp://host"`` for the port
        that it listens on. Set it when a port is forwarded, or to name one network of several. None: the
        address that it listens on. ``0.0.0.0`` and ``[::]`` cannot be dialled; for those None means the
        address of this host from which the default route leaves (see `Agent.address`).
    directory_ttl_s
        How long the directory keeps this agent's entry without a renewal. The agent renews it three times in
        that time, from a thread that sleeps in between, so the directory forgets an agent that dies. None:
        the directory decides how long it keeps the entry.
    secret
        A secret of at least 16 bytes that all agents share. An agent that knows it may connect as any user
        and from any host. While you replace a secret, pass a tuple of two: both are accepted, and the first
        is preferred (`Agent.set_secret`). A path names a file of one or two lines, one secret a line; the
        agent reads it again when it changes. None takes the file that ``KVXFER_SECRET_FILE`` names, or the
        value of ``KVXFER_SECRET``. Every program that this process starts inherits that value, and a line in
        the log says so. Without any of these, only this user's own processes on this host may connect: they
        share a secret that is made for the user on first use (`kvxfer.session.user_secret`). ``b""`` selects
        this mode, whatever the environment says.
    tls
        Certificates instead of a secret (`Tls`). The identity in a peer's certificate decides whether it may
        connect, and traffic over TCP is encrypted. None takes what ``KVXFER_TLS_CERTIFICATE`` and the related
        variables name. Making an agent with both certificates and a secret fails, whether the secret is given
        or in the environment; ``secret=b""`` ignores the environment's.
    shm_peers
        Which peers get access to this agent's shared memory. Such a peer can read every page in it without a
        lease. ``"user"``: processes of this user. ``"secret"``: all processes on this host that know the
        secret. Other peers get their pages over a stream.
    transports
        Kinds of rails that the agent may use (`kvxfer.session.transport_registry`; ``kvxfer doctor`` lists
        them). A session uses those with the shortest reach. Among these, pages that this agent reads or
        expects come over the first named kind that is up and carries them. A kind that reaches only part of a
        host's memory also enables the kind that reaches the rest. With ``"verbs"`` the agent gives its peers
        a NIC's keys of every region. Every agent that may connect can then read all of a region without a
        lease, and can write it where ``verbs.ways`` is not ``"read"``, its default. With ``"ucx"`` and
        ``"libfabric"`` these libraries listen for connections, and they do not authenticate their callers
        (docs/fabrics.md).
    require
        Kinds among `transports` that sessions must have. `Agent.connect` fails (``unreachable``) if no rail
        of such a kind comes up, even if other rails could carry the pages. An agent that is called accepts
        the rails that its caller dials. At both ends a session ends when it loses its last rail of such a
        kind.
    transport_options
        Options of transports by their names, e.g. ``{"tcp.rails": 4}``; those that are not named keep their
        defaults.
    gpu
        Index of the GPU whose memory the agent can register in addition to host memory, counted as
        CUDA_VISIBLE_DEVICES leaves them. An agent has at most one GPU for now. The agent loads the kernels
        that copy there, which takes seconds the first time, when they are compiled. None: GPU 0 if
        `transports` names one that moves only GPU pages, and otherwise no GPU.
    gpu_ctas
        Most CTAs of a copying kernel on that GPU: it takes these from the model's kernels. None: as many as
        the rail's speed needs. For staged pages that is the fewest of 1 to 8 that copy to and from host
        memory nearly as fast as more would (4 where nothing could be measured). The measurement takes a
        second the first time that a machine has such an agent, and the result is kept (``kvxfer doctor``
        shows it). For reading another GPU's memory it is 16, by arithmetic, because a link to a peer cannot
        be measured before there is a peer. A number sets both. Within one GPU more are faster, up to one for
        each of its multiprocessors.
    staging_nbytes
        Pinned host memory through which that GPU's pages go over streams: to and from other hosts, host
        memory, and GPUs that this one does not reach. Half is for sending, half for receiving. The agent
        allocates it when the first region on the GPU is registered, and takes less if the host has less. 0,
        or at least 4 MiB; with 0 such transfers are refused.
    copy_engines
        Whether staging may use the GPU's copy engines for copies at which they were measured to be as fast as
        kernels; the measurement is the same one as for ``gpu_ctas``. False leaves the copy engines to the
        inference engine and copies only by kernels. With False and a ``gpu_ctas`` nothing is measured.
    transfer_timeout_s
        Deadline of transfers and expectations that are posted without one.
    connect_timeout_s
        Deadline of connecting, including the handshake and the rails.
    heartbeat_interval_s, silent_timeout_s
        The agent sends heartbeats every ``heartbeat_interval_s``; to a peer with which it exchanges nothing
        else, up to three eighths of ``silent_timeout_s`` apart. A peer is lost when the agent has received
        nothing from it for ``silent_timeout_s``. Time in which this process itself was stopped does not
        count.
    handshake_timeout_s
        How long an agent that connects may take to prove its identity.
    lease_margin_s
        How much earlier than the owner a lease's holder treats the lease as ended.
    spin_us
        How long a busy agent spins before it sleeps. An idle agent never spins. The default is 50, or 0 where
        this process may use fewer than four CPUs: there the agent would take a CPU from the engine.
    copy_threads
        Threads that work in parallel, including the one that drives the agent; 1 to 64. They copy pages
        between processes of one host (shm: copies and conversions), send and receive over several stream
        rails (``tcp.rails``: one rail a thread), and compute checksums (`integrity`: one piece a thread). The
        additional threads start with the first transfer that is large enough (half a MiB; for checksums 256
        KiB), sleep while there is no work, and end with the agent. With 1 there are none. The default is a
        quarter of the CPUs that this process may use, 1 to 4: the engine and other ranks of the host need the
        rest, and a few threads use the full memory bandwidth (``kvxfer bench pages --copy-threads 1,2,4``).
    integrity
        Whether transfers carry a crc32c for each piece. A transfer can override it.
    max_transfers_per_peer
        Transfers that a peer may have open at this agent, and that this agent opens at a peer. Further
        transfers of this agent wait their turn. Up to 65,536. An agent serves at most 65,536 at a time for
        all of its peers together, and at most two thirds of them for one peer.
    eager_nbytes
        Largest write, in bytes on the stream, that is sent together with the frame that announces it. It
        applies where the peer would otherwise have to request the bytes over a stream (tcp, unix): one trip
        instead of three. The bytes land at once if the peer expects the tag or a lease allows the write. If
        that comes later, the peer requests the bytes as usual. `Transfer.rails` shows ``"eager"`` for bytes
        that were sent this way. The smaller number of both ends counts; 0 to 65,536. Not used with
        ``integrity``, nor for GPU pages.
    meter_gate
        Whether the agent measures exactly how much processor time threads spend holding its progress gate
        (``gate_longest_hold_ns`` and ``gate_holds`` of `Agent.stats`). This costs two system calls for every
        call and every round. Without it, the agent reads the processor's clock twice, and makes a system call
        only when a hold was long by that clock.
    daemon
        The node's daemon that the agent attaches to (``kvxfer serve``), given as the daemon's runtime folder
        or its socket. The agent calls that socket until the daemon answers. None: the daemon whose socket
        exists when the agent is made, in ``KVXFER_DAEMON_DIR``, or else in this user's runtime folder
        (``kvxfer`` in ``XDG_RUNTIME_DIR``, ``/tmp/kvxfer-<uid>``) or root's (``/run/kvxfer``). With an empty
        ``KVXFER_DAEMON_DIR``, and with ``""`` here, the agent attaches to none. It obeys only a daemon that
        runs as this user or as root. An attached agent has one more thread for the daemon, which sleeps while
        nothing happens.
    daemon_may
        Requests of the daemon that the agent accepts: ``"show"`` its state and transfers; ``"drain"``, which
        sets `Agent.draining`; ``"move"`` pages between its regions and peers'; ``"grant"`` leases on its
        regions, and end any lease; change ``"settings"``, such as the log's level. It refuses all others with
        a message. With ``"move"`` and ``"grant"``, everybody who may send requests to the daemon can read and
        overwrite this agent's caches.
    faults
        Injected faults (`kvxfer.testing.FaultPlan`); ``""`` for none. Only for tests.
    refuse_unlike
        Whether `Agent.connect` refuses a peer that has a region of the same name as one of this agent's, if
        no page can be copied between the two (``layout-mismatch``). With False the session opens, and
        transfers between such regions are refused instead; the ends can still exchange messages.
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
    # 32 MiB in each direction. One peer gets 8 MiB of it: two windows of a stream, or a piece between GPUs.
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
    # A sixteenth of the fence table's slots (transport.h: FenceTable). No peer can take more than two thirds
    # of them.
    max_transfers_per_peer: int = 4096
    eager_nbytes: int = 8192
    meter_gate: bool = False
    daemon: str | None = None
    daemon_may: tuple[str, ...] = ("show", "drain")
    faults: str = ""
    refuse_unlike: bool = True

    @property
    def gpu_in_use(self) -> int | None:
        """Index of the agent's GPU: `gpu`, or 0 for a transport that needs one; None without one."""
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
        # Loads native code, which reading options must not need.
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
        check_kind(self.listen, "option listen", str, '"tcp://host:port", or "" to accept no peers')
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
        for name in ("copy_engines", "refuse_unlike", "meter_gate"):
            if not isinstance(value := getattr(self, name), bool):
                raise invalid(f"option {name} is {value!r}, but must be True or False")
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
                raise invalid(
                    f"option require has {kind!r}, which is not one of transports {self.transports}"
                )
        check_kind(self.daemon_may, "option daemon_may", tuple | list, f"some of {DAEMON_VERBS}")
        for family in self.daemon_may:
            if family not in DAEMON_VERBS:
                raise invalid(f"option daemon_may has {family!r}, which is not one of {DAEMON_VERBS}")
        if self.shm_peers not in SHM_PEERS:
            raise invalid(
                f"option shm_peers is {self.shm_peers!r}: write {' or '.join(map(repr, SHM_PEERS))}"
            )
        from kvxfer.session.user_secret import (
            user_secret,
        )  # imports files and random numbers, which most programs have imported by then

        secrets = find_secrets(self.secret)
        secret = secrets.first
        warn_of_value(secrets)
        tls = Tls.of_environment() if self.tls is None and self.secret is None else self.tls
        check_kind(tls, "option tls", Tls | None, "a kvxfer.Tls, or None")
        if tls is not None and secret:
            raise invalid(
                "certificates (option tls, or KVXFER_TLS_CERTIFICATE) and a secret are both given, and an "
                'agent takes only one of them. Unset the other; secret=b"" ignores the secret in the '
                "environment"
            )
        is_open = not secret and tls is None
        if self.listen and is_open and not Address.parse(self.listen, "option listen").is_loopback:
            raise invalid(
                f"listening on {self.listen} without a secret would let everyone who reaches it read and "
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
        raise invalid(
            f"option advertise is {advertise!r}, but this agent does not listen: leave advertise out, or "
            "set listen"
        )
    told = Address.parse(advertise, "option advertise", port_needed=False)
    if told.is_wildcard or told.port == 0:
        raise invalid(
            f"option advertise is {advertise!r}, which peers cannot dial: write the host that they reach, "
            "and a port only if it differs from the one that the agent listens on"
        )
