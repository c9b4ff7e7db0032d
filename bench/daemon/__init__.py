"""``kvxfer bench daemon``: what the node's daemon costs, and how it answers under load."""
