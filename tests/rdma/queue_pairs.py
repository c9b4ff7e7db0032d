"""Two connected queue pairs, one on rxe0 and one on rxe1, and work for them: ``queue_pairs.py WORK SEED``.

Prints the library's word for the status of the first piece that failed, or SUCCESS. Runs under the
distribution's interpreter, which is the only one that has pyverbs.
"""

from __future__ import annotations

import random
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

NBYTES = 1 << 20
#: Four packets. Soft-RoCE has one budget of retries for all packets of a piece.
PIECE_NBYTES = 1 << 12
GID_INDEX = 1
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
#: For each work: the operation, and what is added to the remote key and to the remote address.
WORKS = {
    "read": (e.IBV_WR_RDMA_READ, 0, 0),
    "write": (e.IBV_WR_RDMA_WRITE, 0, 0),
    "read-other-key": (e.IBV_WR_RDMA_READ, 1, 0),
    "write-other-key": (e.IBV_WR_RDMA_WRITE, 1, 0),
    "read-beyond": (e.IBV_WR_RDMA_READ, 0, NBYTES),
    "write-beyond": (e.IBV_WR_RDMA_WRITE, 0, NBYTES),
}


class End:
    """A device with a region and a queue pair."""

    def __init__(self, device: str, data: bytes) -> None:
        self.context = Context(name=device)
        self.domain = PD(self.context)
        self.completions = CQ(self.context, NBYTES // PIECE_NBYTES, None, None)
        self.region = MR(self.domain, NBYTES, ACCESS)
        self.region.write(data, NBYTES)
        queue = QPCap(max_send_wr=NBYTES // PIECE_NBYTES)
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=queue)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS  # if set later, the peer's requests would be invalid
        self.pair = QP(self.domain, wanted, attributes)

    def connect(self, other: End) -> None:
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        attributes.dest_qp_num = other.pair.qp_num
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 16
        attributes.timeout = 14  # 4.096 us << 14: 67 ms
        attributes.retry_cnt = 6  # 7 is without end in Soft-RoCE
        attributes.rnr_retry = 6
        attributes.min_rnr_timer = 12
        route = GlobalRoute(dgid=other.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.pair.to_rts(attributes)

    def completed(self) -> int:
        """Waits for the completions of all pieces and returns the first status that is not a success."""
        statuses: list[int] = []
        give_up = time.monotonic() + 60
        while len(statuses) < NBYTES // PIECE_NBYTES:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{len(statuses)} pieces completed")
            _, works = self.completions.poll(16)
            statuses += [work.status for work in works]
        return next((status for status in statuses if status != e.IBV_WC_SUCCESS), e.IBV_WC_SUCCESS)


def main(name: str, seed: int) -> None:
    operation, other_key, beyond = WORKS[name]
    draw = random.Random(seed)
    contents = [draw.randbytes(NBYTES) for _ in range(2)]
    local, remote = (End(device, data) for device, data in zip(("rxe0", "rxe1"), contents, strict=True))
    local.connect(remote)
    remote.connect(local)

    for offset in range(0, NBYTES, PIECE_NBYTES):
        here = SGE(local.region.buf + offset, PIECE_NBYTES, local.region.lkey)
        work = SendWR(opcode=operation, num_sge=1, sg=[here])
        work.set_wr_rdma(remote.region.rkey + other_key, remote.region.buf + beyond + offset)
        local.pair.post_send(work)
    status = local.completed()

    succeeded = status == e.IBV_WC_SUCCESS
    moved = contents[1 if operation == e.IBV_WR_RDMA_READ else 0]
    expected = [moved, moved] if succeeded else contents
    found = [end.region.read(NBYTES, 0) for end in (local, remote)]
    words = {
        value: text for text, value in vars(e).items() if text.startswith("IBV_WC_") and text.endswith("ERR")
    }
    print("SUCCESS" if succeeded else words[status].removeprefix("IBV_WC_"))
    print("bytes as expected" if found == expected else "other bytes than expected")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
