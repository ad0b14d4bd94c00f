"""Serving: a running batch that requests join and leave, and the servers around it."""
