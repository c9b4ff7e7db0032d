"""Real engines and a router as processes, for the demonstration, for ``bench serving`` and for tests."""
