"""The metadata that prefill sends beside a request's cache (first token, log probabilities).

SGLang keeps them in a dozen small buffers, with an item for each slot. Here each slot has one row, so that
one write suffices. Prefill packs a slot's items into the row. Decode unpacks them when the row and the rest
of the request have arrived. So the row of a request that was given up never reaches the engine's buffers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.connectors.sglang.pointers import memory_at

#: The name of the region.
AUX: Final = "aux"


class AuxRows:
    """The rows of one worker.

    Parameters
    ----------
    args
        SGLang's ``KVArgs``; the buffers are in host memory.
    model
        Declared name of the model.
    """

    def __init__(self, args: Any, model: str) -> None:
        self._columns: list[tuple[slice, NDArray[np.uint8]]] = []
        num_slots, nbytes = 0, 0
        for address, length, item in zip(
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True
        ):
            num_slots = length // item
            column = memory_at(address, (num_slots, item), (item, 1), None)
            self._columns.append((slice(nbytes, nbytes + item), column))
            nbytes += item
        self.rows: NDArray[np.uint8] = np.zeros((num_slots, nbytes), np.uint8)
        # The buffers are in the group's name, so that the error for engines with other buffers shows them.
        group = f"metadata buffers of {'+'.join(map(str, args.aux_item_lens))} bytes"
        self.layout = kvxfer.KVLayout.from_tensor(self.rows, "bd", model=model, group=group)

    def pack(self, slot: int) -> None:
        """Fills a slot's row from the engine's buffers."""
        row = self.rows[slot]
        for where, column in self._columns:
            row[where] = column[slot]

    def unpack(self, slot: int) -> None:
        """Fills a slot of the engine's buffers from its row."""
        row = self.rows[slot]
        for where, column in self._columns:
            column[slot] = row[where]
