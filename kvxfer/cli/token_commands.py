"""``kvxfer tokens``: lists tokens, makes one, revokes one."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.asking import (
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    ago,
    asking,
    in_time,
    print_json,
    print_one,
    print_rows,
)
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client


def tokens(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="A token's id.")] = "",
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke that token.")] = False,
    create: Annotated[str, typer.Option(metavar="NAME", help="Make a token with this name.")] = "",
    role: Annotated[str, typer.Option(metavar="read|transfer|admin", help="What it may do.")] = "read",
    tenant: Annotated[
        list[str] | None, typer.Option(help="Limit it to this tenant; may be repeated.")
    ] = None,
    certificate: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Make it for clients with this certificate, without a secret: DNS:..., URI:..., CN:... or "
            "SHA256:...",
        ),
    ] = "",
    ttl_s: Annotated[float, typer.Option(min=0.0, help="How long it is valid; 0: until revoked.")] = 0.0,
    out: Annotated[str, typer.Option(metavar="FILE", help="Write the new token to this file (0600).")] = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List tokens; make one, which is written to a file or stdout once; revoke one.

    kvxfer tokens --create grafana --role read --out grafana.token

    kvxfer tokens TOKEN --revoke
    """
    if revoke and not token:
        raise invalid("--revoke needs a token's id: kvxfer tokens lists them")
    if certificate and (not create or out):
        raise invalid("--certificate needs --create, and makes no secret for --out")
    if create and role not in ("read", "transfer", "admin"):
        raise invalid(f"--role must be read, transfer or admin, not {role!r}")
    from kvxfer.control import schema

    with asking(daemon, token_file, ca_file) as client:
        if revoke:
            print_one(client.revoke_token(token), json)
        elif create:
            asked = schema.TokenRequest(
                name=create,
                role=role,  # type: ignore[arg-type]
                tenants=tenant or None,
                certificate=certificate or None,
                ttl_s=ttl_s or None,
            )
            _create_token(client, asked, out, as_json=json)
        else:
            print_rows(
                client.tokens(),
                [
                    ("TOKEN", lambda row: row.id),
                    ("NAME", lambda row: row.name),
                    ("ROLE", lambda row: row.role),
                    ("TENANTS", lambda row: "all" if row.tenants is None else row.tenants),
                    ("CERTIFICATE", lambda row: row.certificate),
                    ("MADE", lambda row: ago(row.made_at_s) + " ago"),
                    ("EXPIRES", lambda row: _until(row.expires_at_s)),
                ],
                as_json=json,
                nothing="there is no token",
            )


def _create_token(client: Client, asked: schema.TokenRequest, out: str, *, as_json: bool) -> None:
    made = None
    if out:
        # Before the token is made: without a file for its secret it would be useless.
        try:
            file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise invalid(f"--out {out} cannot be made: {error.strerror}") from None
    try:
        made = client.create_token(asked)
        if out:
            os.write(file, str(made.secret).encode() + b"\n")
    finally:
        if out:
            os.close(file)
            if made is None:
                os.unlink(out)  # noqa: PTH108  # of the same kind as its making
    if out:
        print(f"token {made.id} is in {out}", file=sys.stderr)
    elif as_json:
        print_json(made)
    elif made.secret is None:
        print(f"token {made.id} is for certificate {made.certificate}")
    else:
        print(made.secret)


def _until(at_s: float | None) -> str:
    if at_s is None:
        return "never"
    left_s = at_s - time.time()
    return f"in {in_time(left_s * 1e6)}" if left_s > 0 else "expired"
