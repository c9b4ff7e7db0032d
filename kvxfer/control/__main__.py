"""``python -m kvxfer.control``: the daemon, where ``kvxfer serve`` is not installed (`kvxfer[cli]`)."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Runs the daemon; returns 2 if it cannot run as asked."""
    # Imported objects stay; collecting them now would take a tenth of the start. `run` collects once later.
    gc.disable()
    from kvxfer.control.http.listening import DEFAULT_LISTEN, Tls
    from kvxfer.control.serve import ServeOptions, role_files, run
    from kvxfer.errors import KvxferError

    parser = argparse.ArgumentParser(prog="python -m kvxfer.control", description="The node's daemon.")
    parser.add_argument("--state", type=Path, help="folder of its persistent state")
    parser.add_argument("--runtime", type=Path, help="folder of its sockets")
    parser.add_argument("--node", help="the node's name; default: the host's")
    parser.add_argument("--listen", default=DEFAULT_LISTEN, help='"host:port"; "": only the unix socket')
    parser.add_argument("--host-name", action="append", default=[], help="a host name that clients may use")
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-client-ca", type=Path)
    parser.add_argument(
        "--agent-listen", default="tcp://127.0.0.1:0", help="address on which its own agent listens"
    )
    parser.add_argument("--agent-advertise", help="address at which other agents reach it")
    parser.add_argument(
        "--secret-file",
        "--secret",
        dest="secret",
        help="file of the agents' secret; default: KVXFER_SECRET or _FILE",
    )
    parser.add_argument(
        "--directory", default="", help="directory of its own agent: etcd://..., or a daemon's URL"
    )
    parser.add_argument("--pool-gib", type=float, default=0.0, help="size of the host pool")
    parser.add_argument(
        "--allow", help="hosts and networks that it may dial for a request, separated by commas"
    )
    parser.add_argument("--require", default="", help="transports that must work for it to be ready")
    parser.add_argument("--no-agent", action="store_true", help="do not run an own agent")
    parser.add_argument("--gpu", type=int, help="index of a GPU whose memory it accepts too")
    parser.add_argument("--most-transfers", type=int, default=ServeOptions().most_transfers)
    parser.add_argument("--token", action="append", default=[], help="ROLE=FILE: a token made elsewhere")
    parser.add_argument("--otlp", default="", help="http://HOST:PORT of a collector of spans")
    parser.add_argument("--log", default=ServeOptions().log, help="plain, or json for programs")
    parser.add_argument("--stop-after-s", type=float, default=ServeOptions().stop_after_s)
    told = parser.parse_args(arguments)
    if (told.tls_certificate is None) != (told.tls_key is None):
        parser.error("--tls-certificate and --tls-key must be given together")
    if told.tls_client_ca is not None and told.tls_certificate is None:
        parser.error("--tls-client-ca needs TLS: name --tls-certificate and --tls-key as well")
    try:
        options = ServeOptions(
            state=told.state,
            runtime=told.runtime,
            node=told.node,
            listen=told.listen,
            tls=Tls(told.tls_certificate, told.tls_key, told.tls_client_ca) if told.tls_key else None,
            host_names=tuple(told.host_name),
            agent_listen=told.agent_listen,
            agent_advertise=told.agent_advertise,
            secret=Path(told.secret) if told.secret else None,
            directory=told.directory,
            pool_gib=told.pool_gib,
            allow=None if told.allow is None else _names(told.allow),
            require=_names(told.require),
            own_agent=not told.no_agent,
            gpu=told.gpu,
            most_transfers=told.most_transfers,
            tokens=role_files(told.token),
            otlp=told.otlp,
            log=told.log,
            stop_after_s=told.stop_after_s,
        )
        run(options)
    except (KvxferError, OSError, RuntimeError, ValueError) as error:
        print(f"kvxfer: {error}", file=sys.stderr)
        return 2
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
