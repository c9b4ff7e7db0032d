"""Checks of a transport's contracts, as an agent's user sees them. Every new transport must pass them.

Every check takes a factory of connected pairs and raises AssertionError. ``CHECKS`` lists all of them::

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(lambda shape: connected_pair(options, shape=shape))

Contracts are numbered as in the design notes:

1. every accepted piece of work ends exactly once; 2. back-pressure is no failure; 3. no order is promised; 4.
nothing outside the named blocks is touched, nothing without a lease; 5. ending a lease is a fence; 6. one
terminal state at each end, in bounded time; 7. a lost peer ends its transfers and leaves the agent usable; 8.
cancelling an ``await`` abandons only the waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Final

import numpy as np

from kvxfer.errors import KvxferError, PeerError, TransferError, UsageError
from kvxfer.handle import Handle
from kvxfer.lease_token import LeaseToken
from kvxfer.notification import Notification
from kvxfer.testing.pair import LARGE, SMALL, Cache, Pair

#: Makes a connected pair with caches of a shape (`kvxfer.testing.SMALL`, ...), both ends open.
MakePair = Callable[[tuple[int, ...]], AbstractContextManager[Pair]]
Check = Callable[[MakePair], None]

# Everything ends long before this on any machine; reaching it means a hang, which contract 6 forbids.
BOUND_S: Final = 30.0
# Deadline of work that is meant to reach its deadline.
SHORT_S: Final = 0.3


# ---- helpers ------------------------------------------------------------------------------------


def settle(pair: Pair, *works: Handle) -> bool:
    """Waits until all works have ended; returns whether all are done (only a lossy pair may fail)."""
    for work in works:
        failure = end_of(work)
        if failure is not None:
            assert pair.lossy, f"{work!r} failed: {failure} (seed {pair.seed})"
            assert work.state in ("failed", "cancelled")
    return all(work.succeeded for work in works)


def end_of(work: Handle) -> KvxferError | None:
    """Waits for the end and returns its error, or None when done."""
    try:
        work.wait(BOUND_S)
    except KvxferError as error:
        return error
    return None


def raises(code: str, call: Callable[[], object]) -> None:
    """Asserts that a call raises `UsageError` with this code."""
    raised = None
    try:
        call()
    except UsageError as error:
        raised = error
    assert raised is not None, f"no error was raised, but {code} was expected"
    assert raised.code == code, f"{raised} is not {code}"
    assert len(str(raised)) > 20, "an error says what, where and what to do"


def same(cache: Cache, ids: Iterable[int], wanted: np.ndarray, layers: slice = slice(None)) -> None:
    """Asserts that blocks hold the wanted values."""
    np.testing.assert_array_equal(cache.blocks(ids, layers), wanted)


def shuffled(pair: Pair, num_blocks: int, count: int) -> list[int]:
    """Returns distinct block ids in random order."""
    ids = np.random.default_rng(pair.seed).permutation(num_blocks)[:count]
    return [int(i) for i in ids]


# ---- moving ------------------------------------------------------------------------------------


def check_write_lands_in_the_named_blocks_alone(make_pair: MakePair) -> None:
    """Contracts 1, 3, 4: every byte of scattered blocks lands, and no other byte changes."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(1)
        dst.fill(2)
        before, source = dst.array.copy(), src.array.copy()
        from_ids, to_ids = shuffled(pair, 16, 7), shuffled(pair, 16, 9)[2:]
        with dst.region.grant(dst.peer, to_ids, "write"):
            transfer = src.agent.write(src.region, src.remote, from_ids, to_ids)
            done = settle(pair, transfer)
        if done:
            same(dst, to_ids, src.blocks(from_ids))
        others = [i for i in range(16) if i not in to_ids]
        same(dst, others, before[:, :, others])
        np.testing.assert_array_equal(src.array, source)


def check_read_lands_in_the_named_blocks_alone(make_pair: MakePair) -> None:
    """The same for a read, with a source block that is repeated."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(3)
        dst.fill(4)
        before = dst.array.copy()
        from_ids, to_ids = [5, 5, 0, 15, 9], shuffled(pair, 16, 5)
        src.region.grant(src.peer, [0, 5, 9, 15], "read")
        transfer = _read(pair, dst, from_ids, to_ids)
        if settle(pair, transfer):
            same(dst, to_ids, src.blocks(from_ids))
        others = [i for i in range(16) if i not in to_ids]
        same(dst, others, before[:, :, others])


def check_layers_name_what_moves(make_pair: MakePair) -> None:
    """A transfer of some layers leaves the others alone."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(5)
        before = dst.array.copy()
        dst.region.grant(dst.peer, None, "write")
        transfer = src.agent.write(src.region, src.remote, [1, 2], [3, 4], layers=range(1, 2))
        if settle(pair, transfer):
            same(dst, [3, 4], src.blocks([1, 2], slice(1, 2)), slice(1, 2))
        np.testing.assert_array_equal(dst.array[0::2], before[0::2])


def check_a_transfer_of_no_blocks_is_refused_or_done(make_pair: MakePair) -> None:
    """Contract 6, edge case: a transfer of no blocks does not hang."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        dst.region.grant(dst.peer, None, "write")
        try:
            transfer = src.agent.write(src.region, src.remote, [], [])
        except UsageError:
            return
        settle(pair, transfer)


def check_many_transfers_each_end_once(make_pair: MakePair) -> None:
    """Contracts 1, 2: more transfers than any queue holds, posted at once."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(6)
        dst.region.grant(dst.peer, None, "write")
        transfers = [
            src.agent.write(
                src.region,
                src.remote,
                [i % 16],
                [(i * 7) % 16],
                notify=i.to_bytes(2, "little"),
                priority=i % 3,
            )
            for i in range(300)
        ]
        settle(pair, *transfers)
        states = [transfer.state for transfer in transfers]
        payloads = set()
        while (note := dst.agent.take_notification()) is not None:
            assert note.payload not in payloads, "a notification came twice"
            payloads.add(note.payload)
        done = {i.to_bytes(2, "little") for i, state in enumerate(states) if state == "done"}
        assert done <= payloads, "done at the source implies done at the destination"
        assert states == [transfer.state for transfer in transfers]


def check_integrity_is_quiet_when_bytes_are_right(make_pair: MakePair) -> None:
    """Checksums of both ends agree."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(7)
        dst.region.grant(dst.peer, None, "write")
        transfer = src.agent.write(src.region, src.remote, range(16), range(16), integrity=True)
        if settle(pair, transfer):
            np.testing.assert_array_equal(dst.array, src.array)


# ---- the receiver -------------------------------------------------------------------------------


def check_notification_follows_the_bytes(make_pair: MakePair) -> None:
    """When a notification has arrived, every byte has."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        dst.region.grant(dst.peer, None, "write")
        for i in range(20):
            src.fill(100 + i)
            transfer = src.agent.write(src.region, src.remote, range(16), range(16), notify=bytes([i]))
            note = _note(pair, dst, transfer)
            if note is None:
                assert not settle(pair, transfer)
                return
            assert note.payload == bytes([i])
            assert note.peer is dst.peer
            np.testing.assert_array_equal(dst.array, src.array)
            settle(pair, transfer)


def check_expectation_comes_before_or_after_the_write(make_pair: MakePair) -> None:
    """The two registrations may come in either order."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(8)
        incoming = dst.agent.expect(b"early", [3, 4])
        transfer = src.agent.write(src.region, src.remote, [7, 9], [3, 4], notify=b"early")
        if settle(pair, transfer, incoming):
            same(dst, [3, 4], src.blocks([7, 9]))
        transfer = src.agent.write(src.region, src.remote, [1, 2], [8, 6], notify=b"late", timeout_s=BOUND_S)
        incoming = dst.agent.expect(b"late", [6, 8], timeout_s=BOUND_S)
        if settle(pair, transfer, incoming):
            same(dst, [8, 6], src.blocks([1, 2]))


def check_layers_arrive_as_they_are_released(make_pair: MakePair) -> None:
    """Held layers do not arrive, and each released layer arrives whole."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        incoming = dst.agent.expect(b"layers", range(16))
        transfer = src.agent.write(
            src.region, src.remote, range(16), range(16), notify=b"layers", hold=True, timeout_s=BOUND_S
        )
        for layer in range(src.num_layers):
            assert not incoming.layer_arrived(layer)
            src.array[layer] = 1000 + layer
            transfer.mark_ready(layer + 1)
            try:
                incoming.layer_blocking(layer, BOUND_S)
            except KvxferError:
                assert pair.lossy
                return
            np.testing.assert_array_equal(dst.array[layer], src.array[layer])
        settle(pair, transfer, incoming)


def check_transfers_wait_for_a_trigger_and_for_nothing_else(make_pair: MakePair) -> None:
    """A write and a read find their rights at once; no byte of a layer lands before its value is stored."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        dst.region.grant(dst.peer, None, "write")
        src.region.grant(src.peer, None, "read")
        for write in (True, False):
            src.fill(7 + write)
            before = dst.array.copy()
            poster = src if write else dst
            verb = poster.agent.write if write else poster.agent.read
            word = np.zeros(1, np.uint32)
            trigger = poster.agent.trigger(word)
            transfer = verb(
                poster.region,
                poster.remote,
                [3, 9],
                [5, 2],
                after=trigger.by_layer(10),
                timeout_s=BOUND_S,
            )
            other = verb(
                poster.region,
                poster.remote,
                [0],
                [0],
                after=trigger.at(9),
                layers=range(1),
                timeout_s=BOUND_S,
            )
            word[0] = 9
            settle(pair, other)
            np.testing.assert_array_equal(dst.array[:, :, [5, 2]], before[:, :, [5, 2]])
            assert transfer.state == "pending" or pair.lossy
            word[0] = 10
            deadline = time.monotonic() + BOUND_S
            while transfer.state == "pending" and (
                not np.array_equal(dst.array[0][:, [5, 2]], src.array[0][:, [3, 9]])
            ):
                dst.agent.poll()
                assert time.monotonic() < deadline, f"the first layer never came (seed {pair.seed})"
            np.testing.assert_array_equal(dst.array[1:, :, [5, 2]], before[1:, :, [5, 2]])
            trigger.fire(10 + src.num_layers - 1)
            if settle(pair, transfer):
                np.testing.assert_array_equal(dst.array[:, :, [5, 2]], src.array[:, :, [3, 9]])


def check_an_expectation_nobody_meets_ends(make_pair: MakePair) -> None:
    """Contract 6: it fails at its deadline and names its blocks."""
    with make_pair(SMALL) as pair:
        incoming = pair.decode.agent.expect(b"nobody", [2, 5], timeout_s=SHORT_S)
        error = end_of(incoming)
        assert error is not None
        assert error.code == "deadline"
        assert sorted(error.failed_blocks.tolist()) == [2, 5]


# ---- refusals ------------------------------------------------------------------------------------


def check_bad_tables_post_nothing(make_pair: MakePair) -> None:
    """The caller's mistakes are found and named before anything moves."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        before = dst.array.copy()
        dst.region.grant(dst.peer, None, "write")

        def write(from_ids: list[int], to_ids: list[int]) -> object:
            return src.agent.write(src.region, src.remote, from_ids, to_ids)

        raises("out-of-range", lambda: write([16], [0]))
        raises("out-of-range", lambda: write([0], [16]))
        raises("out-of-range", lambda: write([-1], [0]))
        raises("duplicate-block", lambda: write([0, 1], [5, 5]))
        raises("length-mismatch", lambda: write([0, 1], [5]))
        raises(
            "out-of-range",
            lambda: src.agent.write(src.region, src.remote, [0], [1], layers=range(2, 4)),
        )
        raises("out-of-range", lambda: dst.agent.expect(b"x", [99]))
        raises("duplicate-block", lambda: dst.agent.expect(b"x", [1, 1]))
        np.testing.assert_array_equal(dst.array, before)


def check_nothing_moves_without_a_lease(make_pair: MakePair) -> None:
    """Contract 4: no lease, a lease on other blocks, a lease for the other direction."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(9)
        dst.region.grant(dst.peer, [0, 1, 2], "write")
        dst.region.grant(dst.peer, [7], "read")
        src.region.grant(src.peer, [0], "write")
        before = dst.array.copy()
        for to_ids in ([5, 6], [2, 3], [7]):
            transfer = src.agent.write(src.region, src.remote, range(len(to_ids)), to_ids, timeout_s=SHORT_S)
            error = end_of(transfer)
            assert isinstance(error, TransferError), error
        error = end_of(_read(pair, dst, [0], [0], timeout_s=SHORT_S))
        assert isinstance(error, TransferError), error
        np.testing.assert_array_equal(dst.array, before)


def check_a_lease_expires(make_pair: MakePair) -> None:
    """A lease that is not renewable ends by itself, with a fence."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        lease = dst.region.grant(dst.peer, [1], "write", ttl_s=SHORT_S, renewable=False)
        assert lease.ended_blocking(BOUND_S) == "expired"
        before = dst.array.copy()
        src.fill(10)
        assert end_of(src.agent.write(src.region, src.remote, [0], [1], timeout_s=SHORT_S)) is not None
        np.testing.assert_array_equal(dst.array, before)


def check_a_lease_that_is_named_allows_alone(make_pair: MakePair) -> None:
    """Contract 5: a transfer for an earlier lease does not reach blocks that were leased again."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(15)
        ended = src.region.grant(src.peer, [0, 1], "read")
        ended.revoke_blocking()
        lease = src.region.grant(src.peer, [0, 1], "read")
        before = dst.array.copy()
        error = end_of(_read(pair, dst, [0, 1], [2, 3], lease=ended.token))
        assert error is not None
        assert error.code == "lease-ended" or pair.lossy, error
        np.testing.assert_array_equal(dst.array, before)
        # The token may arrive before the message about the lease.
        error = end_of(_read(pair, dst, [0, 1], [2, 3], lease=lease.token))
        assert error is None or pair.lossy, error
        if error is None:
            np.testing.assert_array_equal(dst.blocks([2, 3]), src.blocks([0, 1]))


def check_blocks_are_read_again_and_again_under_new_tokens(make_pair: MakePair) -> None:
    """A token works even before its reader has learned of the lease, regardless of earlier leases."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        holders = src.peer, dst.agent.name, None
        for turn in range(60):
            src.fill(turn)
            drawn = LeaseToken.draw() if turn % 4 == 3 and turn % 3 else None
            lease = src.region.grant(holders[turn % 3], [0, 1], ttl_s=BOUND_S, token=drawn)
            told = LeaseToken.parse(str(drawn or lease.token))
            error = end_of(_read(pair, dst, [0, 1], [2, 3], lease=told))
            assert error is None or pair.lossy, f"turn {turn}: {error}"
            if error is None:
                same(dst, [2, 3], src.blocks([0, 1]))
            lease.revoke_blocking()
            error = end_of(_read(pair, dst, [0, 1], [2, 3], lease=told))
            assert error is not None
            assert error.code == "lease-ended" or pair.lossy, f"turn {turn}: {error}"


# ---- fences --------------------------------------------------------------------------------------


def check_revoke_at_the_destination_is_a_fence(make_pair: MakePair) -> None:
    """Contract 5: once revoke returns, no byte lands."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(11)
        # A held transfer is surely open when its right ends; a free one may have ended on a slow machine.
        for held in (False, True):
            dst.array[...] = 0
            lease = dst.region.grant(dst.peer, None, "write")
            transfer = src.agent.write(
                src.region, src.remote, range(48), range(48), hold=held, lease=lease.token, timeout_s=BOUND_S
            )
            if held:
                transfer.mark_ready(src.num_layers - 1)
            _until_first_bytes(dst, transfer)
            lease.revoke_blocking()
            assert lease.state == "revoked"
            dst.array[...] = 7  # the blocks are reused
            if held:
                transfer.mark_ready(src.num_layers)
            error = end_of(transfer)
            assert np.all(dst.array == 7), f"bytes landed after the fence (seed {pair.seed})"
            assert error is not None or not held, "done under a right that had ended"
            if error is not None:
                assert error.code == "lease-ended" or pair.lossy, error
                assert len(error.failed_blocks)


def check_revoke_at_the_source_is_a_fence(make_pair: MakePair) -> None:
    """Contract 5: a read under a lease that ended is never reported done."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        for held in (False, True):
            src.fill(12)
            dst.array[...] = 0
            wanted = src.array.copy()
            lease = src.region.grant(src.peer, None, "read")
            last = dst.agent.trigger()
            transfer = dst.agent.read(
                dst.region,
                dst.remote,
                range(48),
                range(48),
                after=last.by_layer(1) if held else None,
                lease=lease.token,
                timeout_s=BOUND_S,
            )
            last.fire(dst.num_layers - 1)  # releases all but the last layer (by_layer)
            _until_first_bytes(dst, transfer)
            lease.revoke_blocking()
            src.array[...] = 7  # the blocks are reused
            last.fire(dst.num_layers)
            error = end_of(transfer)
            if error is None and not held:
                np.testing.assert_array_equal(dst.array, wanted)
            else:
                assert error is not None, "done under a right that had ended"
                assert error.code == "lease-ended" or pair.lossy, error


def check_deregister_is_a_fence(make_pair: MakePair) -> None:
    """Deregistering at the destination is a fence too; the agent stays usable."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(13)
        dst.region.grant(dst.peer, None, "write")
        transfers = [
            src.agent.write(src.region, src.remote, ids, ids, hold=held, timeout_s=BOUND_S)
            for ids, held in ((range(24), False), (range(24, 48), True))
        ]
        transfers[1].mark_ready(src.num_layers - 1)
        _until_first_bytes(dst, transfers[0])
        dst.region.deregister_blocking()
        dst.array[...] = 7
        transfers[1].mark_ready(src.num_layers)
        errors = [end_of(transfer) for transfer in transfers]
        assert errors[1] is not None, "done in a region that had gone"
        assert np.all(dst.array == 7), f"bytes landed after the fence (seed {pair.seed})"
        if not pair.lossy:
            assert dst.peer.state == "open"


# ---- ends ----------------------------------------------------------------------------------------


def check_cancel_ends_at_both_ends(make_pair: MakePair) -> None:
    """Contracts 1, 6: a cancelled transfer ends once, and the pair stays usable."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(14)
        incoming = dst.agent.expect(b"cancelled", range(48), timeout_s=BOUND_S)
        transfer = src.agent.write(
            src.region, src.remote, range(48), range(48), notify=b"cancelled", hold=True, timeout_s=BOUND_S
        )
        transfer.mark_ready(src.num_layers - 1)  # so that it is open when it is cancelled
        transfer.cancel()
        error = end_of(transfer)
        assert error is not None
        assert error.code == "cancelled" or pair.lossy, error
        incoming.cancel()
        end_of(incoming)
        assert transfer.state != "pending"
        assert incoming.state != "pending"
        dst.array[...] = 7  # both ends are final: the blocks are reused
        src.agent.poll()
        assert np.all(dst.array == 7)
        if not pair.lossy:
            # Pass the token, because a right to these blocks ended and the writer may not know of this lease
            # yet.
            lease = dst.region.grant(dst.peer, None, "write")
            settle(pair, src.agent.write(src.region, src.remote, [1], [2], lease=lease.token))
            same(dst, [2], src.blocks([1]))


def check_a_transfer_that_nobody_takes_ends(make_pair: MakePair) -> None:
    """Contract 6: an offer without an expectation fails at its deadline."""
    with make_pair(SMALL) as pair:
        src = pair.prefill
        transfer = src.agent.write(src.region, src.remote, [1], [2], notify=b"unknown", timeout_s=SHORT_S)
        error = end_of(transfer)
        assert error is not None
        assert error.code in ("deadline", "not-permitted") or pair.lossy, error


def check_a_closed_peer_ends_its_transfers(make_pair: MakePair) -> None:
    """Contract 7: the other end closes with work in flight; this end notices it and stays usable."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(15)
        dst.region.grant(dst.peer, None, "write")
        lease = src.region.grant(src.peer, None, "read")
        transfers = [
            src.agent.write(src.region, src.remote, range(48), range(48)),
            src.agent.write(src.region, src.remote, [0], [1], hold=True),
        ]
        dst.agent.close()
        errors = [end_of(transfer) for transfer in transfers]
        assert isinstance(errors[1], PeerError | TransferError), errors[1]
        assert lease.ended_blocking(BOUND_S) == "peer-lost"
        raises_peer = False
        try:
            src.agent.write(src.region, src.peer.regions["kv"], [0], [1])
        except (PeerError, KeyError):
            raises_peer = True
        assert raises_peer
        assert src.agent.poll() in (True, False)
        assert src.agent.stats() is not None


def check_close_with_work_in_flight(make_pair: MakePair) -> None:
    """Closing fences: nothing lands in this end's memory afterwards, and handles are final."""
    with make_pair(LARGE) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(16)
        src.region.grant(src.peer, None, "read")
        transfer = _read(pair, dst, range(48), range(48))
        dst.agent.close()
        dst.array[...] = 7
        assert transfer.state != "pending"
        assert np.all(dst.array == 7)


# ---- asyncio -------------------------------------------------------------------------------------


def check_cancelled_await_abandons_the_waiting_alone(make_pair: MakePair) -> None:
    """Contract 8: the bytes go on moving, and another task can wait for them."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(17)

        async def main() -> None:
            incoming = dst.agent.expect(b"abandoned", range(16), timeout_s=BOUND_S)
            transfer = src.agent.write(
                src.region,
                src.remote,
                range(16),
                range(16),
                notify=b"abandoned",
                hold=True,
                timeout_s=BOUND_S,
            )
            waiting = asyncio.ensure_future(transfer)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert waiting.cancelled()
            assert transfer.state == "pending" or pair.lossy
            transfer.mark_ready(src.num_layers)
            for work in (transfer, incoming):
                try:
                    await work
                except KvxferError:
                    assert pair.lossy

        asyncio.run(asyncio.wait_for(main(), BOUND_S))
        if not pair.lossy:
            np.testing.assert_array_equal(dst.array, src.array)


def check_awaiting_follows_layers_and_notifications(make_pair: MakePair) -> None:
    """The coroutines give the same results as their blocking twins, on one loop for both ends."""
    with make_pair(SMALL) as pair:
        src, dst = pair.prefill, pair.decode
        src.fill(18)

        async def receive() -> None:
            incoming = dst.agent.expect(b"async", range(16), timeout_s=BOUND_S)
            for layer in incoming.layers:
                await incoming.layer(layer)
                np.testing.assert_array_equal(dst.array[layer], src.array[layer])
            await incoming

        async def main() -> None:
            receiver = asyncio.create_task(receive())
            await asyncio.sleep(0)
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            transfer = src.agent.write(
                src.region,
                src.remote,
                range(16),
                range(16),
                notify=b"async",
                after=started,
                timeout_s=BOUND_S,
            )
            started.set_result(None)
            await transfer
            await receiver

        try:
            asyncio.run(asyncio.wait_for(main(), BOUND_S))
        except KvxferError:
            assert pair.lossy


# ---- inside --------------------------------------------------------------------------------------


def _read(
    pair: Pair,
    dst: Cache,
    from_ids: Iterable[int],
    to_ids: Iterable[int],
    timeout_s: float = BOUND_S,
    lease: LeaseToken | None = None,
) -> Handle:
    return dst.agent.read(dst.region, dst.remote, from_ids, to_ids, timeout_s=timeout_s, lease=lease)


def _note(pair: Pair, dst: Cache, transfer: Handle) -> Notification | None:
    """Waits for the notification of a write; None if the write failed, which only a lossy pair allows."""
    if not pair.lossy:
        return dst.agent.notification_blocking(BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while (note := dst.agent.take_notification()) is None and transfer.state in ("pending", "done"):
        dst.agent.poll()
        assert time.monotonic() < deadline, f"{transfer!r}: neither told nor failed (seed {pair.seed})"
    return note


def _until_first_bytes(dst: Cache, transfer: Handle) -> None:
    """Waits until bytes of a transfer have begun to land, or it has ended."""
    deadline = time.monotonic() + BOUND_S
    while transfer.state == "pending" and not dst.array[0, 0, 0].any():
        dst.agent.poll()
        assert time.monotonic() < deadline, f"{transfer!r}: no byte came"


CHECKS: Final[tuple[Check, ...]] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)
