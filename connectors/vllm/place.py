"""Which worker of which engine this is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A worker, as far as it matters where its bytes lie.

    Attributes
    ----------
    engine_id
        Of its engine.
    tp_rank, tp_size
        Among the workers that divide heads.
    pp_rank, pp_size
        Among those that divide layers.
    num_layers
        Of the model; 0 where every worker has all.
    gpu
        The index of the GPU on which its cache lies; None for memory of the host.
    model
        Declared name of the model.
    cache_dtype
        As the engine was told, e.g. ``"auto"`` or ``"fp8"``.
    total_heads
        KV heads of the model.
    num_blocks
        Of the engine's cache.
    packed_for
        The instructions like which kernels lay out what a head has in a page; empty where they lay it
        out as the tensor's axes say, token by token.
    """

    engine_id: str
    tp_rank: int
    tp_size: int
    model: str
    cache_dtype: str
    total_heads: int
    num_blocks: int
    packed_for: str = ""
    pp_rank: int = 0
    pp_size: int = 1
    num_layers: int = 0
    gpu: int | None = None

    @property
    def rank(self) -> int:
        """Its number among the engine's workers."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """How many workers the engine has."""
        return self.pp_size * self.tp_size
