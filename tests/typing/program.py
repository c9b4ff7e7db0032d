"""A user's program, whole and typed: prefill pushes and is pulled from, two ranks at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import kvxfer

OPTIONS = kvxfer.AgentOptions(transports=("shm", "tcp"), transport_options={"tcp.rails": 1}, integrity=True)
HEADS_OF_RANK = (range(4), range(4, 8))


def cache(heads: range, value: int) -> tuple[NDArray[np.uint16], kvxfer.KVLayout]:
    """Returns a rank's memory [layers, 2, blocks, tokens, heads, dim], and where its elements lie."""
    kv = np.full((2, 2, 16, 4, len(heads), 8), value, np.uint16)
    layout = kvxfer.KVLayout.from_tensor(kv, axes="l2bthd", first_head=heads.start, total_heads=8)
    assert layout.layers == range(2), layout.num_blocks
    return kv, layout


class Prefill:
    """One rank of two."""

    def __init__(self, rank: int) -> None:
        self.agent = kvxfer.Agent(f"prefill-{rank}", OPTIONS)
        self.kv, layout = cache(HEADS_OF_RANK[rank], rank + 1)
        self.region: kvxfer.Region = self.agent.register("kv", self.kv, layout)

    async def push(self, peer: kvxfer.Peer, tag: bytes) -> kvxfer.Transfer:
        """Posts a layer-wise write."""
        remote: kvxfer.RegionDescriptor = await peer.region("kv", timeout_s=10)
        transfer = self.agent.write(self.region, remote, [7, 9], [3, 4], notify=tag, hold=True, timeout_s=10)
        for count in range(1, len(transfer.layers) + 1):
            transfer.mark_ready(count)
        return transfer


async def main() -> None:
    """Moves blocks both ways and says what became of them."""
    known: kvxfer.directory.Directory = kvxfer.directory.InProcessDirectory()
    options = replace(OPTIONS, directory_ttl_s=10)
    async with kvxfer.Agent("decode", options, directory=known, metadata={"role": "decode"}) as decode:
        kv, layout = cache(range(8), 0)
        region = decode.register("kv", kv, layout)
        ranks = [Prefill(rank) for rank in (0, 1)]
        try:
            # Push: both ranks' heads are one request's.
            incoming: kvxfer.Incoming = decode.expect(b"req-42", [3, 4], region, timeout_s=10)
            peers = [await rank.agent.connect(decode.address, timeout_s=10) for rank in ranks]
            assert await ranks[0].agent.connect(decode.entry) is peers[0]
            assert await ranks[0].agent.connect(peers[0].regions["kv"]) is peers[0]
            pushed = kvxfer.Group(
                [await rank.push(peer, b"req-42") for rank, peer in zip(ranks, peers, strict=True)]
            )
            for layer in incoming.layers:
                await incoming.layer(layer)
            await asyncio.gather(pushed, incoming)
            print("pushed over", pushed.rails, "in", pushed.stages.ended_ns - pushed.stages.posted_ns, "ns")

            # Pull by tokens that messages bring, and a notification to each rank.
            leases: list[kvxfer.Lease] = []
            reads: list[kvxfer.Transfer] = []
            for rank, peer in zip(ranks, peers, strict=True):
                lease: kvxfer.Lease = await rank.region.grant(peer, [1, 2], mode="read", ttl_s=30)
                leases.append(lease)
                peer.send(str(lease.token).encode())
                told: kvxfer.Message = await decode.message(timeout_s=10)
                token = kvxfer.LeaseToken.parse(told.payload.decode())
                remote = await told.peer.region("kv", timeout_s=10)
                read = decode.read(
                    region, remote, [1, 2], [5, 6], notify=b"pulled", lease=token, context="req-42"
                )
                reads.append(read)
            group = kvxfer.Group([*reads, kvxfer.Group([incoming])], cancel_on_failure=False)
            try:
                await group
            except kvxfer.PeerError as error:
                print("lost", error.peer, "recompute", error.failed_blocks.tolist())
            except kvxfer.TransferError as error:
                print("retry", error.code, group.failed_blocks_of(region), dict(group.errors))
            for rank, lease in zip(ranks, leases, strict=True):
                note: kvxfer.Notification = await rank.agent.notification(timeout_s=10)
                assert note.payload == b"pulled", note.peer.name
                await lease.revoke()
                assert lease.state is kvxfer.LeaseState.REVOKED

            # What is known of it all.
            stats: kvxfer.AgentStats = decode.stats()
            print(stats["peers"][0]["budget"], kvxfer.plan.footprint(layout), kvxfer.gpu.include_path())
            print(kvxfer.plan.compile_program(ranks[0].region.layout, layout).explain())
            words: str = ranks[0].agent.explain(ranks[0].region, peers[0].regions["kv"])
            print(words)
            states = {peer.state for peer in decode.peers}
            assert states == {kvxfer.PeerState.OPEN}
            assert group.state is kvxfer.TransferState.DONE
            assert (kv[:, :, 3:7] == np.repeat([1, 2], 4)[:, None]).all()
        finally:
            for rank in ranks:
                await rank.agent.aclose()


def blocking() -> None:
    """The same verbs in a loop of one's own, with memory from a pool."""
    options = kvxfer.AgentOptions(transports=("loopback",))
    with kvxfer.Agent("prefill", options) as prefill, kvxfer.Agent("decode", options) as decode:
        pool = kvxfer.Pool(16, 4096, huge_pages=False)
        table: kvxfer.BlockTable = pool.allocate(2, "req-43")
        region = prefill.register("kv", pool.array((16, 4096), np.uint8))
        target = decode.register("kv", np.zeros((16, 4096), np.uint8))
        remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv", 10)
        incoming = decode.expect(b"req-43", [0, 1], target)
        group = kvxfer.Group([prefill.write(region, remote, table, [0, 1], notify=b"req-43")])
        while group.state is kvxfer.TransferState.PENDING:
            prefill.poll()
        group.wait(timeout_s=10)
        kvxfer.Group([incoming]).wait(10)
        error: kvxfer.KvxferError | None = group.first_failure_blocking(10)
        assert error is None
        pool.free(table)


if __name__ == "__main__":
    asyncio.run(main())
    blocking()
