"""Poseidon trains PyTorch models over the hosts and the network that people actually have."""

__version__ = "0.1.0"
