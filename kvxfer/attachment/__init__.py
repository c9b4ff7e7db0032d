"""The agent's side of its attachment to the node's daemon, and the frames that both sides use."""
