"""``kvxfer serve``: the node's daemon."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import KvxferError, UsageError, invalid


def serve(
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of what outlives it. Default: this user's.")
    ] = None,
    runtime: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of its sockets, where agents look for it.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="The node's name. Default: the host's.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help='For REST beside the unix socket; "": that alone.')
    ] = "127.0.0.1:7380",
    host_name: Annotated[
        list[str] | None, typer.Option(help="A name under which REST is asked for; may be repeated.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its certificate in PEM, with the chain.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Clients need a certificate of it; a token may be for one (kvxfer tokens)."
        ),
    ] = None,
    agent_listen: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Where its own agent listens.")
    ] = "tcp://127.0.0.1:0",
    agent_advertise: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="At which address other agents reach it.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The agents' secret. Default: KVXFER_SECRET, or KVXFER_SECRET_FILE."
        ),
    ] = None,
    directory: Annotated[
        str, typer.Option(metavar="URL", help="Where its own agent is found: etcd://..., or a daemon's URL.")
    ] = "",
    pool_gib: Annotated[float, typer.Option(min=0.0, help="Size of the host pool of pages.")] = 0.0,
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS", help="What requests may have it dial: names and networks, with commas."
        ),
    ] = None,
    require: Annotated[
        str, typer.Option(metavar="TRANSPORTS", help="Transports without which it is not ready.")
    ] = "",
    own_agent: Annotated[
        bool, typer.Option("--agent/--no-agent", help="Whether it has an agent itself.")
    ] = True,
    gpu: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Take memory of this GPU as well, on memory.sock.")
    ] = None,
    most_transfers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Records of transfers that are kept.")
    ] = 100_000,
    token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=FILE",
            help="A token that was drawn elsewhere, as one for all nodes of a cluster is; may be repeated.",
        ),
    ] = None,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL", help="An OpenTelemetry collector that is sent spans of transfers (OTLP by HTTP)."
        ),
    ] = "",
    log: Annotated[
        str, typer.Option(metavar="plain|json", help="How lines of its log are written to standard error.")
    ] = "plain",
    stop_after_s: Annotated[
        float, typer.Option(min=0.0, help="How long transfers that run may go on when it is told to end.")
    ] = 10.0,
) -> None:
    """Run the node's daemon until SIGTERM or SIGINT: REST, a page for people, and a host pool of pages.

    kvxfer serve --pool-gib 8

    kvxfer serve --listen 0.0.0.0:7380 --tls-certificate node.pem --tls-key node.key
    """
    if (tls_certificate is None) != (tls_key is None):
        raise invalid("--tls-certificate and --tls-key go together")
    if tls_client_ca is not None and tls_certificate is None:
        raise invalid("--tls-client-ca is for TLS: name --tls-certificate and --tls-key as well")
    gc.disable()  # as in kvxfer/control/__main__.py
    from kvxfer.control.listening import Tls
    from kvxfer.control.serve import ServeOptions, role_files, run

    tls = None
    if tls_certificate is not None and tls_key is not None:
        tls = Tls(tls_certificate, tls_key, tls_client_ca)
    try:
        run(
            ServeOptions(
                state=state,
                runtime=runtime,
                node=node,
                listen=listen,
                tls=tls,
                host_names=tuple(host_name or ()),
                agent_listen=agent_listen,
                agent_advertise=agent_advertise,
                secret=secret_file,
                directory=directory,
                pool_gib=pool_gib,
                allow=None if allow is None else _names(allow),
                require=_names(require),
                own_agent=own_agent,
                gpu=gpu,
                most_transfers=most_transfers,
                tokens=role_files(token or ()),
                otlp=otlp,
                log=log,
                stop_after_s=stop_after_s,
            )
        )
    except KvxferError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the daemon cannot run: {error}", code="system") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
