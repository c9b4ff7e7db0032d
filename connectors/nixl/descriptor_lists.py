"""NIXL's lists of descriptors: arrays of address, length and device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.connectors.nixl.statuses import nixl_mem_t, nixlInvalidParamError, nixlNotFoundError
from kvxfer.raw_agent import rows_of

Rows = NDArray[np.uint64]


def as_bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


class DescriptorList:
    """Address, length and device, one row after another."""

    def __init__(self, type: nixl_mem_t, descs: Any = 0, *, init_size: int | None = None) -> None:
        self._type = nixl_mem_t(type)
        self._rows: Rows = np.empty((0, 3), np.uint64)
        self._fill(init_size if init_size is not None else descs)

    def _fill(self, descs: Any) -> None:
        raise NotImplementedError

    def _take_rows(self, descs: Any, width: int) -> None:
        if isinstance(descs, np.ndarray):
            self._rows = rows_of_array(descs).copy()
        elif isinstance(descs, list):
            self._rows = rows_of(descs, width)
        elif descs:
            self._rows = np.zeros((int(descs), 3), np.uint64)

    @property
    def rows(self) -> Rows:
        """Address, length and device: uint64 [N, 3]. Not a copy: the list owns the array."""
        return self._rows

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return len(self._rows) == 0

    def clear(self) -> None:
        self._rows = np.empty((0, 3), np.uint64)

    def print(self) -> None:
        print(f"DescList of mem type {int(self._type)}")
        for index in range(self.descCount()):
            print(f"    {index}: {self[index]}")

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self._rows):
            raise IndexError("Index is out of range")
        return index

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        address, nbytes, device = self._rows[self._place(index)]
        return int(address), int(nbytes), int(device)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._rows = self._rows.copy()
        self._rows[self._place(index)] = desc[:3]

    def append(self, desc: tuple[Any, ...]) -> None:
        self._rows = np.concatenate([self._rows, rows_of([desc[:3]], 3)])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self.append(desc)

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self._rows, self._place(index), axis=0)

    def index(self, desc: tuple[Any, ...]) -> int:
        for place in np.flatnonzero((self._rows == np.array(desc[:3], np.uint64)).all(axis=1)):
            if self[int(place)] == tuple(desc):
                return int(place)
        raise nixlNotFoundError(f"the list does not contain {desc}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._type == other._type and np.array_equal(self._rows, other._rows)

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> tuple[Any, ...]:
        return int(self._type), self._rows.tobytes()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._type = nixl_mem_t(state[0])
        self._rows = np.frombuffer(state[1], np.uint64).reshape(-1, 3)


class nixlXferDList(DescriptorList):
    """The memory that a transfer names."""

    def _fill(self, descs: Any) -> None:
        self._take_rows(descs, 3)


class DescriptorListWithWords(DescriptorList):
    """A list of descriptors with a text for each row."""

    _words: list[Any]

    @staticmethod
    def _word(given: Any) -> Any:
        """Returns a row's text in the form that is kept; rows without a text get that of ``""``."""
        raise NotImplementedError

    def _fill(self, descs: Any) -> None:
        has_words = isinstance(descs, list)
        self._take_rows(descs, 4 if has_words else 3)
        given = (desc[3] for desc in descs) if has_words else [""] * len(self._rows)
        self._words = [self._word(each) for each in given]

    def clear(self) -> None:
        super().clear()
        self._words = []

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self._words[index])

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        super().__setitem__(index, desc)
        self._words[index] = self._word(desc[3])

    def append(self, desc: tuple[Any, ...]) -> None:
        super().append(desc)
        self._words.append(self._word(desc[3]))

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._words[index]

    def index(self, desc: tuple[Any, ...]) -> int:
        return super().index((*desc[:3], self._word(desc[3])))

    def __eq__(self, other: object) -> bool:
        return (
            super().__eq__(other)
            and isinstance(other, DescriptorListWithWords)
            and self._words == other._words
        )

    __hash__ = None

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self._words)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state)
        self._words = list(state[2])


class nixlRegDList(DescriptorListWithWords):
    """Registered memory, with a text for each row, which kvxfer stores and does not read."""

    @staticmethod
    def _word(given: bytes | str) -> bytes:
        return as_bytes(given)

    def trim(self) -> nixlXferDList:
        out = nixlXferDList(self._type)
        out._rows = self._rows
        return out


class nixlRemoteDList(DescriptorListWithWords):
    """Memory of remote agents, for views from GPU kernels, which kvxfer does not support."""

    @staticmethod
    def _word(given: object) -> str:
        return str(given)


def rows_of_array(descs: NDArray[Any]) -> Rows:
    if descs.ndim != 2 or descs.shape[1] != 3 or descs.dtype not in (np.uint64, np.int64):
        raise ValueError("descs must be a Nx3 numpy array of uint64 or int64")
    return np.ascontiguousarray(descs).view(np.uint64)


def rows_of_strided(descs: NDArray[Any]) -> Rows:
    """Returns rows of (address, length, device, stride, count): uint64 [N, 5]."""
    if descs.ndim != 2 or descs.shape[1] != 5 or descs.dtype not in (np.uint64, np.int64):
        raise ValueError("strided descriptors must be an Nx5 numpy array of uint64 or int64")
    if not len(descs) or descs[:, 4].min() < 1:
        raise nixlInvalidParamError("a strided descriptor must have at least one block")
    return np.ascontiguousarray(descs).view(np.uint64)
