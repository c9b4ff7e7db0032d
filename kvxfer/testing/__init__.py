"""Helpers for testing kvxfer, its transports, or engines that use it.

They are shipped; kvxfer's own tests use them.

The rest of the package does not import this.
"""

from kvxfer.testing.faults import FaultPlan
from kvxfer.testing.pair import Cache, Pair, connected_pair

__all__ = ["Cache", "FaultPlan", "Pair", "connected_pair"]
