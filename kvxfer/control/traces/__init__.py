"""A request's way through the cluster: spans, received and sent."""
