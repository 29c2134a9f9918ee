"""Turns scenarios, traces, and names of models and clusters into simulations and result files."""
