"""HTTP: routes, who may use them, and errors as problem+json. It decides nothing that state knows."""
