"""``kvxfer serve``: the node's daemon."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import AgentError, KvxferError, invalid


def serve(
    state: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of its persistent state. Default: this user's."),
    ] = None,
    runtime: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of its sockets, by which agents find it.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="The node's name. Default: the host's.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help='TCP address of REST; "": only the unix socket.')
    ] = "127.0.0.1:7380",
    host_name: Annotated[
        list[str] | None, typer.Option(help="A host name that clients of REST may use; may be repeated.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's certificate in PEM, with the chain.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Authority whose certificates clients need; a token may be for one (kvxfer tokens).",
        ),
    ] = None,
    agent_listen: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Address on which its own agent listens.")
    ] = "tcp://127.0.0.1:0",
    agent_advertise: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Address at which other agents reach it.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The agents' secret. Default: KVXFER_SECRET, or KVXFER_SECRET_FILE."
        ),
    ] = None,
    directory: Annotated[
        str, typer.Option(metavar="URL", help="Directory of its own agent: etcd://..., or a daemon's URL.")
    ] = "",
    pool_gib: Annotated[float, typer.Option(min=0.0, help="Size of the host pool of pages.")] = 0.0,
    pages_dir: Annotated[
        Path | None, typer.Option(help="Directory on a local disk: its pages outlive the daemon.")
    ] = None,
    pages_gib: Annotated[float, typer.Option(min=0.0, help="What pages may take in --pages-dir.")] = 0.0,
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS",
            help="Hosts that it may dial for a request: names and networks, separated by commas.",
        ),
    ] = None,
    require: Annotated[
        str, typer.Option(metavar="TRANSPORTS", help="Transports that must work for it to be ready.")
    ] = "",
    own_agent: Annotated[
        bool, typer.Option("--agent/--no-agent", help="Whether it runs its own agent.")
    ] = True,
    gpu: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Accept memory of this GPU too, on memory.sock.")
    ] = None,
    most_transfers: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many records of transfers it keeps.")
    ] = 100_000,
    token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=FILE",
            help="A token made elsewhere, e.g. one for all nodes of a cluster; may be repeated.",
        ),
    ] = None,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="An OpenTelemetry collector to which it sends spans of transfers (OTLP over HTTP).",
        ),
    ] = "",
    log: Annotated[
        str, typer.Option(metavar="plain|json", help="Format of its log lines on standard error.")
    ] = "plain",
    stop_after_s: Annotated[
        float, typer.Option(min=0.0, help="How long running transfers may continue when it has to stop.")
    ] = 10.0,
) -> None:
    """Run the node's daemon until SIGTERM or SIGINT: REST, a web page, and a host pool of pages.

    kvxfer serve --pool-gib 8

    kvxfer serve --listen 0.0.0.0:7380 --tls-certificate node.pem --tls-key node.key
    """
    if (tls_certificate is None) != (tls_key is None):
        raise invalid("--tls-certificate and --tls-key must be given together")
    if tls_client_ca is not None and tls_certificate is None:
        raise invalid("--tls-client-ca needs TLS: name --tls-certificate and --tls-key as well")
    # Imported objects stay; collecting them now would take a tenth of the start. `run` collects once later.
    gc.disable()
    from kvxfer.control.http.listening import Tls
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
                pages_dir=pages_dir,
                pages_gib=pages_gib,
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
        raise AgentError(f"the daemon cannot run: {error}", code="system") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
