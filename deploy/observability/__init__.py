"""Boards for Grafana, rules for Prometheus, and what finds the services."""
