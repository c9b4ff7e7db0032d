"""One seed for all that is random in a run of the tests; docs/testing.md says how to replay it.

A test takes its share by the fixture ``seed`` (conftest.py), a helper or a process by `seed_of`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

#: Where processes that a test starts find the run's seed; ctest's tests read the same name.
ENVIRONMENT: Final = "KVXFER_SEED"
#: 32 bits are taken by every generator, C's and numpy's too.
LIMIT: Final = 1 << 32

_turns: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(itertools.count)


def choose(given: int | None = None) -> int:
    """Settles the seed of this process and of those that it starts: as given, as told, or a fresh one."""
    told = os.environ.get(ENVIRONMENT) or int.from_bytes(os.urandom(4))
    seed = int(told if given is None else given)
    if not 0 <= seed < LIMIT:
        raise ValueError(f"a seed is 0 to {LIMIT - 1}, not {seed}")
    os.environ[ENVIRONMENT] = str(seed)
    return seed


def seed_of(*names: object) -> int:
    """Returns what follows from the run's seed and these names, on every machine alike."""
    if ENVIRONMENT not in os.environ:  # a helper that is run by hand
        print(f"{ENVIRONMENT}={choose()}", file=sys.stderr)
    text = "\0".join(map(str, (os.environ[ENVIRONMENT], *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def next_seed(*names: object) -> int:
    """Returns another one at each call, in the order of the calls that the running test makes."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without "(call)" and the like
    return seed_of(test, *names, next(_turns[test, *names]))
