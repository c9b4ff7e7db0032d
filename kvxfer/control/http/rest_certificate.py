"""The daemon's certificate for REST, which is read again when its files change."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from kvxfer.control.http.listening import Tls, check_files
from kvxfer.errors import UsageError
from kvxfer.log import logger

# A look costs a system call for each file, and a turn of a thread because file systems may hang.
_LOOK_AFTER_S: Final = 1.0

_Stamp = tuple[tuple[int, ...], ...]


class RestCertificate:
    """Makes the context of new connections; open ones keep the certificate with which they began.

    Files that cannot be used, e.g. because only one of a pair was replaced so far, are logged once and change
    nothing.

    Attributes
    ----------
    tls
        The files.
    num_read
        How often they were read so far.

    Raises
    ------
    UsageError
        ``invalid-argument``, as `check_files` says it.
    """

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self.num_read = 0
        self._stamp = self._look()
        self._context = _context_of(tls)
        self._look_at_s = 0.0
        self._complaint = ""

    async def context(self) -> ssl.SSLContext:
        """Returns the context of the newest certificate, as of at most a second ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_AFTER_S
            await asyncio.to_thread(self._refresh)
        return self._context

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # from before the files are read: a later change is another stamp
        try:
            self._context = _context_of(self.tls)
            self.num_read += 1
            self._complaint = ""
            logger().info("the certificate of REST was read again: %s", self.tls.certificate)
        except (OSError, UsageError) as error:
            words = str(error.args[0] if isinstance(error, UsageError) else error)
            if words != self._complaint:
                logger().error(
                    "REST keeps its certificate, because its changed files are of no use: %s", words
                )
            self._complaint = words

    def _look(self) -> _Stamp:
        found: list[tuple[int, ...]] = []
        for path in (self.tls.certificate, self.tls.key, self.tls.client_ca):
            try:
                at = path.stat() if path is not None else None
            except OSError:
                at = None
            found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) if at is not None else ())
        return tuple(found)


def _context_of(tls: Tls) -> ssl.SSLContext:
    check_files(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key, password=str)
    if tls.client_ca is not None:
        context.load_verify_locations(cafile=tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
