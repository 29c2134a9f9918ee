"""Shared by all services: settings, logging, metrics, state server, lifecycle."""
