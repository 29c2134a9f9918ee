"""Runs a whole cluster on one machine, with the state server and services as child processes."""
