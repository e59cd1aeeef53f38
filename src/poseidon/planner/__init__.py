"""Choosing a plan from a model's profile and what the hosts and links can do."""
