"""Transfers that are made by REST, and how all transfers are shown."""
