"""What stands behind `python -m jax_fa3`; benchmarks/ builds on the same parts.

main       parser and exit codes        selfcheck, check, bench, explain   one command each
accuracy   inputs, float64 reference, errors, limits
grid       sizes of a timing grid       contenders   our variants and cuDNN, ready to time
timing     A B A B on the device        gpu_state    card, clocks and power while it runs
results    result files                 plots, text, progress   what the user sees
"""
