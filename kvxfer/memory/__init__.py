"""Memory that caches lie in: pools, free blocks, block tables, huge pages, what is near. No GPU, no agent."""
