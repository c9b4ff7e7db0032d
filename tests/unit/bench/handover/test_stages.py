from dataclasses import replace

from kvxfer.bench.handover.stages import Handover

MS = 1_000_000


def pushed() -> Handover:
    return Handover.of(
        prefill={"prefill_end_ns": 100 * MS, "post_ns": 10 * MS, "released_ns": [50 * MS, 100 * MS]},
        decode={
            "nbytes": 2000,
            "arrived_ns": [60 * MS, 104 * MS],
            "notification_ns": 105 * MS,
            "decode_may_start_ns": 106 * MS,
            "rails": ["shm"],
        },
    )


def test_stages_count_from_the_end_of_prefill_in_whatever_order_layers_arrive() -> None:
    stages = {"post": -90, "first_layer": -40, "last_layer": 4, "notification": 5, "decode_may_start": 6}
    assert pushed().stages_ms() == stages
    assert replace(pushed(), arrived_ns=[104 * MS, 60 * MS]).stages_ms() == stages


def test_push_is_timed_from_its_first_release() -> None:
    assert (pushed().transfer_ns(), pushed().hidden_share()) == (54 * MS, 0.5)


def test_ideal_mover_gets_the_same_layers_at_the_same_times() -> None:
    # 1000 bytes a layer at 1 GB/s are 1 µs.
    assert pushed().ideal_ns(1.0) == 100 * MS + 1000
