import numpy as np
import pytest

from kvxfer.bench.work.page_data import PageFiller, block_order, page_keys
from tests.seeds import seed_of


def filled(
    page_nbytes: int = 4096, num_pages: int = 200
) -> tuple[PageFiller, np.ndarray, np.ndarray, np.ndarray]:
    filler = PageFiller(page_nbytes)
    pages = np.zeros((num_pages, page_nbytes // 8), dtype=np.uint64)
    rows = block_order(num_pages, seed_of("rows"))
    keys = page_keys(7, 3, num_pages=num_pages)
    filler.fill(pages, rows, keys)
    return filler, pages, rows, keys


@pytest.mark.parametrize(("page", "byte"), [(0, 0), (63, 1), (64, 2047), (199, 4095)])
def test_one_flipped_bit_is_found_where_it_is(page: int, byte: int) -> None:
    filler, pages, rows, keys = filled()
    pages[rows[page]].view(np.uint8)[byte] ^= 1
    wrong = filler.check(pages, rows, keys)
    assert wrong is not None
    assert (wrong.page, wrong.byte) == (page, byte)
    assert wrong.expected ^ wrong.found == 1


@pytest.mark.parametrize("change", ["swapped", "shifted", "cleared"])
def test_pages_that_are_not_what_belongs_there_are_found(change: str) -> None:
    filler, pages, rows, keys = filled()
    if change == "swapped":
        pages[[rows[4], rows[9]]] = pages[[rows[9], rows[4]]]
    else:
        pages[rows[4]] = np.roll(pages[rows[4]], 1) if change == "shifted" else 0
    wrong = filler.check(pages, rows, keys)
    assert wrong is not None
    assert wrong.page == 4
