"""A whole cluster on one machine: state server and services as child processes."""
