"""Memory for caches: pools, free blocks, block tables, huge pages, NUMA nodes. No GPU, no agent."""
