"""Accepts requests, keeps the backlog, routes, relays tokens."""
