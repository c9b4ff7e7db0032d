"""A request's handover from a prefill to a decode engine, in the words of no engine: README.md.

An engine's connector makes a `SchedulerHalf` beside its scheduler and a `WorkerHalf` beside each worker.
"""
