"""NIXL's name for kvxfer.connectors.nixl."""

from kvxfer.connectors.nixl import install_as_nixl

install_as_nixl(replace=True)
