"""The nodes of deploy/compose as processes on one machine, each in a network of its own."""
