"""Between the public nouns and the native core: connecting, posting, completions, told programs."""
