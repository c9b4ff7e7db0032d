"""Says in plain words what this machine, and a peer, offer to kvxfer, and what to change.

Pure reading and short trials: nothing is configured, installed or left behind.
"""
