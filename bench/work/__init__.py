"""What benchmarks are given to move: models' caches, layouts, requests, page data."""
