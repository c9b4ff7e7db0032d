"""Pages that the daemon keeps; the modules in the order in which a page is parked, read and dropped.

`page` is one page, and `page_layout` is its place in the pool. `slabs`, `idle_pages` and `tenants` know which
room is free, which pages may be evicted, and how much each tenant uses. `page_index` joins these three and
does no I/O. `page_sources` finds the agent that has the page, `pool_regions` registers the pool's memory for
peers, `filling` reads the page into it, and `page_leases` lets other agents read the page there. These share
`pool_jobs`, `page_news` and the caller's `time_left`. `page_pool` combines everything, and `page_desk` offers
the pool to /v1.
"""
