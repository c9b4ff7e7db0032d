"""For those who test kvxfer, a transport of it, or an engine on it: shipped, and used by its own tests.

Nothing here is imported by the rest of the package.
"""

from kvxfer.testing.faults import FaultPlan
from kvxfer.testing.pair import Cache, Pair, connected_pair

__all__ = ["Cache", "FaultPlan", "Pair", "connected_pair"]
