"""Pages that the daemon keeps; modules in the order in which a page is parked, read and gone.

`page` is what it is, `page_layout` how it lies in the pool. `slabs`, `idle_pages` and `tenants` say where
room is, what gives way and whose share it is; `page_index` brings these together, and knows no I/O.
`page_sources` finds the agent that has the page, `pool_regions` makes the pool's memory known to peers,
`filling` reads the page into it, and `page_leases` lets others read it there. `pool_jobs` and `page_news` are
what these share. `page_pool` is all of it, and `page_desk` is the pool as /v1 has it.
"""
