"""The parts that the daemon has once, put together in node.py."""
