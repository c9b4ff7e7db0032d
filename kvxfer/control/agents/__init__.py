"""Agents that are attached: their end of the link here, their reports, and calls to them."""
