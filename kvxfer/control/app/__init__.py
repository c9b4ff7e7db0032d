"""HTTP: routes, their roles, and errors as problem+json. Decisions are made by the parts that it calls."""
