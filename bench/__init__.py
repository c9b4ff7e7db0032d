"""Workloads that show what a handover costs, beside the limits of the machine: ``kvxfer bench``.

All check the bytes, and measure in the same run a plain copy or stream of the same pages by code that
shares nothing with the engine (``_limits``).
"""
