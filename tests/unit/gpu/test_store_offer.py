"""Offers of GPU memory for stores: the messages that are sent, received and refused."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.control.handed.hand_over import hand_over  # noqa: E402
from kvxfer.control.handed.handed_line import GpuHandle, HandedLine  # noqa: E402
from kvxfer.errors import UsageError  # noqa: E402
from kvxfer.gpu import StoreOffer, offer_stores, peer_pages, store_offer  # noqa: E402
from kvxfer.layout.kv_layout import KVLayout  # noqa: E402
from kvxfer.layout.tensor import UNTOLD_GPU, view  # noqa: E402

BASE, ALLOCATED = 0x7F00_0000_0000, 4 << 20
HANDLE = bytes(range(64))


class Tensor:
    """A GPU array of a library other than torch."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f2",
            "data": (address, False),
            "strides": strides,
            "version": 3,
        }


class Mapping:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.address = 0x1000_0000

    def close(self) -> None:
        self.address = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver that exports allocations as the kind that the test chooses."""
    told = SimpleNamespace(kind=2, exported=[], mapped=[])

    def export(address: int) -> tuple[int, int, int, bytes, int]:
        fd = os.open(os.devnull, os.O_RDONLY) if told.kind == 2 else -1
        told.exported.append(fd)
        return told.kind, BASE, ALLOCATED, HANDLE, fd

    def map_it(*arguments: Any) -> Mapping:
        told.mapped.append(Mapping(*arguments))
        mapped: Mapping = told.mapped[-1]
        return mapped

    fake = SimpleNamespace(gpu_export=export, GpuPeerMapping=map_it)
    for module in (store_offer, peer_pages):
        monkeypatch.setattr(module, "_native", fake)
    return told


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", [1, 2])
def test_what_is_sent_is_mapped_at_the_other_end(
    gpu: SimpleNamespace, pair: tuple[socket.socket, socket.socket], kind: int
) -> None:
    gpu.kind = kind
    with offer_stores(Tensor(BASE + 4096, (3, 8))) as offer:
        assert offer.nbytes == 48
        assert repr(offer) == f"<StoreOffer of 48 bytes by {'fabric handle' if kind == 1 else 'descriptor'}>"
        offer.send(pair[0])
        offer.send(pair[0])
    for _ in range(2):
        with StoreOffer.receive(pair[1]) as came, came.map(3) as pages:
            assert (pages.address, pages.nbytes) == (0x1000_0000 + 4096, 48)
            seen = view(pages)
            assert (seen.address, seen.shape, seen.itemsize, seen.gpu) == (
                pages.address,
                (48,),
                1,
                UNTOLD_GPU,
            )
            device, how, nbytes, handle, fd = gpu.mapped[-1].arguments
            assert (device, how, nbytes, handle) == (3, kind, ALLOCATED, HANDLE)
            assert is_open(fd) if kind == 2 else fd == -1
        with pytest.raises(ValueError, match="no longer mapped"):
            pages.address  # noqa: B018
        assert kind == 1 or not is_open(fd)
    if kind == 2:
        assert not is_open(gpu.exported[0])
        for verb in (lambda: offer.send(pair[0]), offer.map):
            with pytest.raises(ValueError, match="the offer is closed"):
                verb()


@pytest.mark.parametrize("kind", [1, 2])
def test_what_is_handed_to_a_daemon_is_what_maps_it(gpu: SimpleNamespace, tmp_path: Path, kind: int) -> None:
    gpu.kind = kind
    lines: list[tuple[bytes, int]] = []

    def daemon() -> None:
        connection, _ = listener.accept()
        with connection:
            line, fds, *_ = socket.recv_fds(connection, 65536, 4)
            lines.append((line, len(fds)))
            for fd in fds:
                os.close(fd)
            told = {"region": "memory/x@n", "agent": "a", "incarnation": "i", "address": "tcp://x:1"}
            connection.sendall(json.dumps(told).encode() + b"\n")

    layout = KVLayout.from_tensor(np.zeros((3, 8), np.float16), "bd")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "memory.sock"))
        listener.listen()
        thread = threading.Thread(target=daemon)
        thread.start()
        with hand_over(Tensor(BASE + 4096, (3, 8)), layout, "x", daemon=tmp_path) as handed:
            assert handed.region == "memory/x@n"
        thread.join()
    ((line, num_fds),) = lines
    read = HandedLine.read(line.rstrip())
    assert (read.name, read.layout, read.offset, read.nbytes) == ("x", layout, 4096, 48)
    assert read.gpu == GpuHandle(kind, ALLOCATED, HANDLE if kind == 1 else bytes(64))
    assert num_fds == read.gpu.num_descriptors == (kind == 2)
    assert kind == 1 or not is_open(gpu.exported[0])


def test_memory_by_cudamalloc_is_refused(gpu: SimpleNamespace) -> None:
    gpu.kind = 3
    with pytest.raises(UsageError, match=r"allocate it in kvxfer\.gpu\.shareable_memory") as raised:
        offer_stores(Tensor(BASE, (4,)))
    assert raised.value.code == "unsupported"


def test_what_is_not_in_one_piece_on_a_gpu_is_refused(gpu: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match=r"this is host memory: share it with kvxfer\.Pool"):
        offer_stores(np.zeros(4))
    with pytest.raises(UsageError, match="contiguous"):
        offer_stores(Tensor(BASE, (4, 4), (16, 2)))
    assert gpu.exported == []
    with pytest.raises(UsageError, match="more than one allocation"):
        offer_stores(Tensor(BASE + ALLOCATED - 6, (4,)))
    assert not is_open(gpu.exported[-1])


def message(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "magic": b"kvs1",
        "kind": 1,
        "allocated": 4096,
        "offset": 0,
        "nbytes": 4096,
        "handle": HANDLE,
    }
    return store_offer._MESSAGE.pack(*(fields | changed).values())


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    "changed",
    [
        {"magic": b"kvs2"},
        {"kind": 3},
        {"kind": 2},  # and no descriptor
        {"nbytes": 0},
        {"nbytes": 4097},
        {"offset": 2**64 - 1},
        {"allocated": 2**63, "nbytes": 2**63},
    ],
)
def test_what_is_no_offer_is_refused_and_its_descriptors_are_closed(
    pair: tuple[socket.socket, socket.socket], changed: dict[str, Any]
) -> None:
    before = num_open()
    stray = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(pair[0], [message(**changed)], [stray] if changed.get("kind") != 2 else [])
    os.close(stray)
    with pytest.raises(UsageError, match=r"not an? (valid )?offer"):
        StoreOffer.receive(pair[1])
    assert num_open() == before


def test_an_owner_that_dies_while_it_sends_is_noticed(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(message()[:50])
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed the socket"):
        StoreOffer.receive(pair[1])


def test_without_a_driver_mapping_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    if native.gpu_driver_missing() is None:
        pytest.skip("this machine has a driver")
    pair[0].sendall(message())
    with StoreOffer.receive(pair[1]) as offer, pytest.raises(UsageError) as raised:
        offer.map()
    assert raised.value.code == "unsupported"
    with pytest.raises(UsageError) as raised:
        offer_stores(Tensor(BASE, (4,)))
    assert raised.value.code == "unsupported"
