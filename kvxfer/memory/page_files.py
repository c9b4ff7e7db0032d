"""Files of a directory that hold pages, for `kvxfer.control.host_pool.file_tier`: how they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvxfer._native import PAGE_FILE_BLOCK_NBYTES, NativeError, PageFiles
from kvxfer.errors import translate

if TYPE_CHECKING:
    from kvxfer._native import PageAnswer, PageEnd

#: Pages in files begin and end at multiples of it, in memory too.
BLOCK_NBYTES: Final = PAGE_FILE_BLOCK_NBYTES

__all__ = ["BLOCK_NBYTES", "PageAnswer", "PageEnd", "PageFiles", "open_page_files"]


def open_page_files(directory: Path, nbytes: int, tenant_of_salt: Sequence[int]) -> PageFiles:
    """Opens the files of a directory, and finds their pages; makes the directory if there is none.

    Parameters
    ----------
    nbytes
        The most that the pages take.
    tenant_of_salt
        The tenant's number of each salt, by the salt's number. Pages with other salts are not found.

    Raises
    ------
    TransferError
        ``refused``: another process has the directory; it has another format; it is not the user's alone.
    AgentError
        ``system``: the system refuses it.
    """
    try:
        return PageFiles(str(directory), nbytes, list(tenant_of_salt))
    except NativeError as error:
        raise translate(error) from None
