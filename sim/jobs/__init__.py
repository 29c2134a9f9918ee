"""From scenarios, traces and names of models and clusters to simulations, and from these to result files."""
