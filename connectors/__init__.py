"""Engine connectors: engine verbs in, kvxfer verbs out. README.md says which are to come."""
