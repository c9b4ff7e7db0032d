"""The slices of a model's heads and layers that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import invalid


def heads_of(total_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Returns ``(first_head, num_heads)`` of a tensor-parallel rank.

    If there are more ranks than KV heads, each head is held by ``tp_size // total_heads`` consecutive ranks.
    A latent cache (MLA) has one head, which every rank holds.

    Raises
    ------
    UsageError
        ``invalid-argument`` unless `total_heads` divides `tp_size` or the reverse.
    """
    if total_heads < 1 or not 0 <= tp_rank < tp_size:
        raise invalid(f"tp_rank {tp_rank} of tp_size {tp_size} does not hold a slice of {total_heads} heads")
    if tp_size >= total_heads and tp_size % total_heads == 0:
        return tp_rank * total_heads // tp_size, 1
    if total_heads % tp_size:
        raise invalid(
            f"{total_heads} heads cannot be divided evenly among tp_size {tp_size} ranks: "
            "one of the two numbers must divide the other"
        )
    num_heads = total_heads // tp_size
    return tp_rank * num_heads, num_heads


def layers_of(
    total_layers: int, pp_size: int, pp_rank: int, partition: Sequence[int] | None = None
) -> tuple[int, int]:
    """Returns ``(first_layer, num_layers)`` of a pipeline-parallel stage.

    Parameters
    ----------
    total_layers, pp_size, pp_rank
        Layers of the model; stages of the pipeline, and the index of this stage.
    partition
        Layers of each stage. It is needed if `pp_size` does not divide `total_layers`, because engines give
        the remainder to different stages.

    Raises
    ------
    UsageError
        ``invalid-argument``: no such stage, no even division, or a partition of another size.
    """
    if total_layers < 1 or not 0 <= pp_rank < pp_size:
        raise invalid(
            f"pp_rank {pp_rank} of pp_size {pp_size} does not hold a slice of {total_layers} layers"
        )
    if partition is None:
        if total_layers % pp_size:
            raise invalid(
                f"{total_layers} layers cannot be divided evenly among pp_size {pp_size} stages: pass "
                "partition=, the number of layers that the engine gives each stage"
            )
        partition = [total_layers // pp_size] * pp_size
    if len(partition) != pp_size or sum(partition) != total_layers or min(partition) < 1:
        raise invalid(
            f"partition {list(partition)} is not {total_layers} layers in {pp_size} stages of one or more"
        )
    return sum(partition[:pp_rank]), partition[pp_rank]
