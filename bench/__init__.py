"""Workloads that show what a handover costs, beside the limits of the machine.

``kvxfer bench pages`` moves pages of one size between two processes; ``kvxfer bench handover``
moves the pages of real requests from a prefill process to a decode process. Both check every byte
and measure, in the same run, a plain copy or stream of the same pages by code that shares nothing
with the engine (``_limits``). ``python -m kvxfer.bench`` is the same program.
"""
