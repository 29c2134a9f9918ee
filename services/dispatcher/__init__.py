"""Accepts requests, keeps the backlog, routes requests to workers and relays tokens."""
