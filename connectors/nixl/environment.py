"""Reads an agent's settings from the environment: NIXL's interface has no parameters for them (README.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvxfer.address import Address
from kvxfer.arguments import seconds
from kvxfer.connectors.nixl.statuses import nixlInvalidParamError, nixlNotSupportedError
from kvxfer.errors import UsageError
from kvxfer.options import AgentOptions

if TYPE_CHECKING:
    from kvxfer.connectors.nixl.metadata_store import MetadataStore
    from kvxfer.raw_agent import RawAgent

_TRUE: Final = ("y", "yes", "on", "1", "true", "enable")
_FALSE: Final = ("n", "no", "off", "0", "false", "disable")


def _address(text: str) -> str:
    Address.parse(text, "an agent's address")
    return text


#: For each variable of the agent: the option that it sets, and how its text is read.
_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "KVXFER_NIXL_LISTEN": ("listen", _address),
    "KVXFER_NIXL_ADVERTISE": ("advertise", str),
    "KVXFER_NIXL_TRANSPORTS": ("transports", lambda text: tuple(each.strip() for each in text.split(","))),
    "KVXFER_NIXL_DEVICE": ("gpu", int),
    "KVXFER_NIXL_TIMEOUT_S": ("transfer_timeout_s", float),
}
_TIMEOUT_S: Final = 120.0
# Of no agent: with it an option is checked alone, whatever the environment says of secrets.
_ANY_SECRET: Final = b"any secret of sixteen bytes or more"


def agent_options(listen_port: int | None) -> tuple[AgentOptions, float]:
    """Returns an agent's options, and the seconds after which its transfers fail.

    Parameters
    ----------
    listen_port
        None for any free port.

    Raises
    ------
    nixlInvalidParamError
        A variable's value is wrong; the message names the variable.
    """
    options: dict[str, Any] = {}
    for variable, (option, read) in _OPTIONS.items():
        if not (text := os.environ.get(variable)):
            continue
        try:
            options[option] = read(text)
            AgentOptions(secret=_ANY_SECRET, **{option: options[option]}).to_native()
        except (UsageError, ValueError) as error:
            raise nixlInvalidParamError(f"{variable} is {text!r}: {error}", "invalid-argument") from error
    if listen_port is not None:
        listen = options.get("listen", AgentOptions().listen)
        options["listen"] = f"{listen.rpartition(':')[0]}:{listen_port}"
    timeout_s = seconds(options.pop("transfer_timeout_s", _TIMEOUT_S), "transfer_timeout_s")
    return AgentOptions(**options), timeout_s


def captures_telemetry(asked: bool) -> bool:
    """Returns whether to record transfers' times: as NIXL_TELEMETRY_ENABLE says if it is set, else `asked`.

    Raises
    ------
    RuntimeError
        The variable is neither yes nor no.
    """
    word = os.environ.get("NIXL_TELEMETRY_ENABLE")
    if word is None:
        return asked
    if word.lower() not in (*_TRUE, *_FALSE):
        raise RuntimeError(
            f"NIXL_TELEMETRY_ENABLE is {word!r}, not one of {', '.join(_TRUE)} or {', '.join(_FALSE)}"
        )
    return word.lower() in _TRUE


def metadata_store(raw_agent: RawAgent, name: str, wait_s: float) -> MetadataStore:
    """Returns the store of metadata for agents that are named without an address.

    Parameters
    ----------
    wait_s
        How long a fetch waits for metadata.

    Raises
    ------
    nixlInvalidParamError
        The environment names no store, or two.
    nixlNotSupportedError
        The store needs a package that is not installed.
    """
    etcd, tcp = os.environ.get("NIXL_ETCD_ENDPOINTS"), os.environ.get("NIXL_TCPSTORE_ENDPOINT")
    if bool(etcd) == bool(tcp):
        raise nixlInvalidParamError(
            "metadata need a store: of NIXL_ETCD_ENDPOINTS and NIXL_TCPSTORE_ENDPOINT "
            f"{'both are' if etcd else 'neither is'} set. Set one, or pass the other agent's address and port"
        )
    try:
        if etcd:
            from kvxfer.connectors.nixl.etcd_metadata import EtcdMetadata

            namespace = os.environ.get("NIXL_ETCD_NAMESPACE", "/nixl/agents")
            return EtcdMetadata(raw_agent, name, wait_s, etcd, namespace)
        from kvxfer.connectors.nixl.tcp_store_metadata import TcpStoreMetadata

        assert tcp is not None
        return TcpStoreMetadata(raw_agent, name, wait_s, tcp)
    except ImportError as error:
        package = "kvxfer[etcd]" if etcd else "torch"
        raise nixlNotSupportedError(
            f"the client of the metadata store cannot be imported ({error}): pip install {package}"
        ) from error
