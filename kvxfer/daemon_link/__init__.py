"""The agent's side of its link to the node's daemon, and the frames that both sides use."""
