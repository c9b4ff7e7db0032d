"""Between the public classes and the native core: connecting, posting, completions, program cache."""
