"""Sockets, connections and certificates of REST."""
