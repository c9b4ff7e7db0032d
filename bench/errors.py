"""Why a benchmark could not run, or why its result cannot be trusted."""


class BenchError(Exception):
    """A benchmark cannot run as asked; the message says what, where and what to do."""


class CheckFailedError(BenchError):
    """It ran, and bytes or states were not what they had to be."""
