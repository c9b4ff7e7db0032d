"""The node's daemon: what it knows of the agents that attach, and what it answers by REST."""
