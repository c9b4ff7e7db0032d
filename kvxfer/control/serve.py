"""The daemon as a program: its parts, its sockets, and its shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import platform
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from uvicorn import Config

from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control.app.build import DaemonApp
from kvxfer.control.daemon.node import NodeDaemon, NodeOptions
from kvxfer.control.http.http_protocol import ACCEPTED_AT_ONCE, BoundedProtocol, QuietServer
from kvxfer.control.http.listening import (
    API_SOCKET,
    DEFAULT_LISTEN,
    Tls,
    check_files,
    is_loopback,
    listen_tcp,
    listen_unix,
    parse_listen,
    require_safe,
)
from kvxfer.control.http.rest_certificate import RestCertificate
from kvxfer.control.http.tls_handshakes import behind_tls
from kvxfer.control.state.descriptors import raise_limit
from kvxfer.control.state.transfer_table import CAPACITY
from kvxfer.control.traces.spans import Spans
from kvxfer.errors import UsageError, invalid
from kvxfer.log import logger
from kvxfer.log_lines import FORMATS, write_to_stderr
from kvxfer.shared_secret import SecretOption, find_secrets
from kvxfer.tls import Tls as AgentTls

if TYPE_CHECKING:
    import socket

    from kvxfer.directory.mirrored import MirroredDirectory

# For requests that are in progress when the daemon ends.
_LAST_ANSWERS_S: Final = 3
_MAX_HEADERS_NBYTES: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of ``kvxfer serve``.

    Attributes
    ----------
    state, runtime
        Folders (`NodeOptions`); None for this user's defaults.
    node
        The node's name; None for the host's name.
    listen
        ``"host:port"`` for REST in addition to the unix socket; ``""`` for the socket alone. A host other
        than loopback needs `tls`.
    tls
        Certificates.
    host_names
        Names by which clients address REST, in addition to the host that it listens on.
    agent_listen, agent_advertise, secret
        Of the daemon's own agent, as in `kvxfer.AgentOptions`.
    directory
        Where its own agent publishes itself and looks up names: ``etcd://...``, or the URL of a daemon that
        keeps a directory (``KVXFER_TOKEN_FILE``); ``""`` for none. If it does not answer, the daemon does
        not start.
    pool_gib
        Size of the host pool; 0 for none.
    pages_dir, pages_gib
        A directory on a local disk in which the pool's pages are also kept, so that they outlive the daemon,
        and the most that they take there; None for none.
    allow
        Hosts that requests may make it dial; None for this host and private networks.
    require
        Transports that must work for the daemon to be ready.
    own_agent
        Whether the daemon has its own agent. Without one it moves nothing itself, and keeps no pages.
    gpu
        Index of the GPU whose memory ``memory.sock`` accepts, in addition to the host's; None for none.
    most_transfers
        How many records of transfers are kept.
    tokens
        Tokens that were drawn elsewhere, e.g. one for all nodes of a cluster: the role and the file of each.
    otlp
        ``http(s)://host:port`` of the OpenTelemetry collector that gets spans; ``""`` for none.
    log
        Format of the log: ``plain`` or ``json`` (`kvxfer.log_lines`).
    stop_after_s
        How long transfers that the daemon began may go on after it was told to end.
    rate, burst
        Limit of each caller: requests a second, and requests at once.
    """

    state: Path | None = None
    runtime: Path | None = None
    node: str | None = None
    listen: str = DEFAULT_LISTEN
    tls: Tls | None = None
    host_names: tuple[str, ...] = ()
    agent_listen: str = "tcp://127.0.0.1:0"
    agent_advertise: str | None = None
    secret: SecretOption | None = field(default=None, repr=False)
    directory: str = ""
    pool_gib: float = 0.0
    pages_dir: Path | None = None
    pages_gib: float = 0.0
    allow: tuple[str, ...] | None = None
    require: tuple[str, ...] = ()
    own_agent: bool = True
    gpu: int | None = None
    most_transfers: int = CAPACITY
    tokens: tuple[tuple[str, Path], ...] = ()
    otlp: str = ""
    log: str = "plain"
    stop_after_s: float = 10.0
    rate: float = 500.0
    burst: float = 1000.0


def role_files(told: Iterable[str]) -> tuple[tuple[str, Path], ...]:
    """Reads a list of ``ROLE=FILE``.

    Raises
    ------
    UsageError
        ``invalid-argument``: one of them has another form.
    """
    found = []
    for each in told:
        role, _, path = each.partition("=")
        if not role or not path:
            raise invalid(f"--token {each}: write ROLE=FILE")
        found.append((role, Path(path)))
    return tuple(found)


def state_folder() -> Path:
    """Returns the folder of this user's durable state, e.g. ``kvxfer`` in ``XDG_STATE_HOME``."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvxfer")
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local/state") / "kvxfer"


def _absolute(runtime: Path) -> Path:
    """Returns the absolute path of ``--runtime``; refuses one that is too long for a socket's path."""
    from kvxfer.daemon_link.runtime_folder import SOCKET_NAME, checked

    folder = runtime.absolute()
    try:
        checked(folder / SOCKET_NAME)
    except UsageError:
        raise invalid(
            f"--runtime {runtime}: the path of its socket {folder / SOCKET_NAME} has more than 107 bytes: "
            "name a folder with a shorter path"
        ) from None
    return folder


def _check_secret(secret: SecretOption) -> None:
    """Reads the agents' secret, which the daemon's own agent reads again later."""
    try:
        find_secrets(secret)
    except UsageError as error:
        if not isinstance(secret, os.PathLike):
            raise
        path = os.fspath(secret)
        raise invalid(error.args[0].replace(f"the secret's file ({path})", f"--secret-file {path}")) from None


def _require_room(pool_gib: float) -> None:
    has_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if not 0 <= pool_gib <= has_gib:
        raise invalid(
            f"--pool-gib {pool_gib:g} is not possible: this machine has {has_gib:.1f} GiB of memory"
        )


def _runtime_folder() -> Path:
    from kvxfer.daemon_link.runtime_folder import runtime_folder

    return runtime_folder()


async def serve(
    options: ServeOptions,
    stop: asyncio.Event,
    announce: Callable[[str], None] = lambda words: None,
    on_ready: Callable[[NodeDaemon], None] = lambda daemon: None,
) -> None:
    """Runs a daemon until `stop` is set; its transfers then have some seconds to end.

    Parameters
    ----------
    announce
        Called with sentences for people: where the daemon listens, and where the first token is.
    on_ready
        Called once with the daemon when it is ready.

    Raises
    ------
    UsageError
        ``invalid-argument``, ``system``: an option is not possible, a file that one names cannot be used, or
        the daemon cannot listen, or must not without TLS.
    OSError, RuntimeError
        The folders cannot be used, or another daemon uses them; or a listener has failed.
    """
    if options.gpu is not None and not options.own_agent:
        raise invalid("--gpu needs the daemon's own agent: leave --no-agent out")
    if options.secret is not None:
        if "KVXFER_TLS_CERTIFICATE" in os.environ:
            raise invalid(
                "KVXFER_TLS_CERTIFICATE and --secret-file are both given, but an agent uses "
                "certificates or a secret: leave one out"
            )
        _check_secret(options.secret)
    address = parse_listen(options.listen) if options.listen else None
    if address is not None:
        require_safe(address[0], options.tls)
    if options.tls is not None:
        await asyncio.to_thread(check_files, options.tls)
    _require_room(options.pool_gib)
    if (options.pages_dir is None) != (options.pages_gib == 0) or options.pages_gib < 0:
        raise invalid("--pages-dir and --pages-gib belong together: a directory, and how much it may take")
    if options.pages_dir is not None and not options.pool_gib:
        raise invalid("--pages-dir needs --pool-gib: pages pass through memory")
    runtime = _runtime_folder() if options.runtime is None else _absolute(options.runtime)
    node = options.node or platform.node() or "node"
    spans = Spans(node, options.otlp) if options.otlp else None
    daemon = NodeDaemon(
        NodeOptions(
            node=node,
            state=options.state or state_folder(),
            runtime=runtime,
            allow=AllowedHosts(options.allow),
            require=options.require,
            most_transfers=options.most_transfers,
            tokens=options.tokens,
        )
    )
    daemon.makes_own = options.own_agent
    daemon.spans = spans
    app: DaemonApp | None = None
    directory: MirroredDirectory | None = None
    servers: list[tuple[QuietServer, asyncio.Task[None]]] = []
    try:
        try:
            await daemon.start()
        except BlockingIOError:
            raise RuntimeError(f"another daemon uses {runtime}: name another folder (--runtime)") from None
        listener = None if address is None else listen_tcp(*address)
        app = DaemonApp(
            daemon,
            hosts=_host_names(options, address),
            uids={0, os.geteuid()},
            rate=options.rate,
            burst=options.burst,
        )
        servers.append(_begin(app, listen_unix(runtime / API_SOCKET), None))
        announce(f"listening on {runtime / API_SOCKET}, for this user")
        if listener is not None:
            host, port = listener.getsockname()[:2]
            certificate = None if options.tls is None else RestCertificate(options.tls)
            servers.append(_begin(app, listener, certificate))
            if certificate is not None:
                await daemon.certificates.add_rest(certificate)
            scheme = "http" if options.tls is None else "https"
            host = f"[{host}]" if ":" in host else host
            announce(f"listening on {scheme}://{host}:{port}, for clients with a token")
        if daemon.tokens.admin_file is not None:
            announce(f"an admin's token is in {daemon.tokens.admin_file}")
        if options.own_agent:
            directory = _opened(options.directory)
            await _add_own(daemon, options, runtime, directory)
            assert daemon.own is not None
            announce(f"agent {daemon.own.name} is at {daemon.own.address}")
        announce(daemon.standing.begin())
        on_ready(daemon)
        ends = [task for _, task in servers]
        waiting = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done:
            task.result()  # raises what ended a listener
        await daemon.drains.stop_taking(options.stop_after_s)
    finally:
        await daemon.end_own()
        if app is not None:
            app.close()
        for server, _ in servers:
            server.end()
        for _, task in servers:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # the first listener's error was raised
        if app is not None:  # otherwise the socket may belong to another daemon, which has the folder
            (runtime / API_SOCKET).unlink(missing_ok=True)
        await daemon.aclose()
        if directory is not None:
            await asyncio.to_thread(directory.close)


def _opened(directory: str) -> MirroredDirectory | None:
    if not directory:
        return None
    if directory.startswith("etcd:"):
        from kvxfer.directory.etcd import EtcdDirectory

        return EtcdDirectory(directory)
    from kvxfer.control.client.daemon_directory import DaemonDirectory

    return DaemonDirectory(directory)


def _host_names(options: ServeOptions, address: tuple[str, int] | None) -> set[str]:
    names = set(options.host_names)
    if address is not None and address[0] not in ("0.0.0.0", "::"):
        names.add(address[0])
    elif address is not None and not is_loopback(address[0]):
        names |= {platform.node()}
    return names


def _begin(
    app: DaemonApp, listener: socket.socket, certificate: RestCertificate | None
) -> tuple[QuietServer, asyncio.Task[None]]:
    config = Config(
        app.asgi,
        http=BoundedProtocol if certificate is None else behind_tls(certificate),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        h11_max_incomplete_event_size=_MAX_HEADERS_NBYTES,
    )
    server = QuietServer(config)
    return server, asyncio.create_task(server.run_on(listener), name="http")


async def _add_own(
    daemon: NodeDaemon, options: ServeOptions, runtime: Path, directory: MirroredDirectory | None
) -> None:
    """Makes the daemon's own agent, which attaches to it like other agents, and its pool."""
    # Loading takes as long as all the rest, so a thread does it, and requests are answered meanwhile.
    await asyncio.to_thread(_load_own, options.pool_gib > 0)
    from kvxfer.control.own.own_agent import OwnAgent
    from kvxfer.options import AgentOptions

    agent_options = AgentOptions(
        listen=options.agent_listen,
        advertise=options.agent_advertise,
        secret=options.secret,
        daemon=str(runtime),
        daemon_may=("show", "drain", "move", "grant", "settings"),
    )
    # In a thread, because it waits for its directory, which may be this daemon's own.
    own = await asyncio.to_thread(
        OwnAgent, daemon.options.node, agent_options, allow=daemon.allowed, directory=directory
    )
    pool = None
    if options.pool_gib > 0:
        from kvxfer.control.host_pool.page_pool import PagePool

        files = None
        if options.pages_dir is not None:
            from kvxfer.control.host_pool.file_tier import FileTier

            nbytes = int(options.pages_gib * 2**30)
            files = await FileTier.open(
                options.pages_dir, nbytes, daemon.on_files_evicted, daemon.on_files_state
            )
        pool = PagePool(
            own,
            int(options.pool_gib * 2**30),
            files=files,
            granter=daemon.links,
            on_parked=daemon.on_parked,
            on_dropped=daemon.on_dropped,
        )
    daemon.add_own(own, pool)
    certificates = AgentTls.of_environment() if options.secret is None else None
    if certificates is not None:
        await daemon.certificates.add_agent(Path(certificates.certificate))
    await daemon.add_memory(options.gpu)


def _load_own(with_pool: bool) -> None:
    import kvxfer.agent
    import kvxfer.control.handed.handed_memory
    import kvxfer.control.own.own_agent

    if with_pool:
        import kvxfer.control.host_pool.page_pool  # noqa: F401


def run(options: ServeOptions, announce: Callable[[str], None] | None = None) -> None:
    """Runs a daemon until SIGTERM or SIGINT; a second signal ends it at once."""

    def say(words: str) -> None:
        # Whatever the log level is: programs wait for "ready", or for "not ready: " and the reasons.
        log = logger()
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, "%s", (words,), None))

    def started(_: NodeDaemon) -> None:
        # These objects stay. Collecting them again would delay requests by a tenth of a second.
        gc.collect()
        gc.freeze()
        gc.enable()
        # The start used a MiB more than serving does; this returns it to the system.
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told() -> None:
            if stop.is_set():
                os._exit(130)
            logger().info("told to stop")
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told)
        await serve(options, stop, announce or say, started)

    raise_limit()
    if options.log not in FORMATS:
        raise invalid(f"--log is {options.log!r}: write {' or '.join(FORMATS)}")
    write_to_stderr(options.log)
    # uvicorn would warn of each invalid request, so strangers could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    asyncio.run(main())
