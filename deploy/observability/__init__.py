"""Grafana dashboards, Prometheus rules and service discovery."""
