"""From scenarios, traces, and names of models and clusters to simulations and result files."""
