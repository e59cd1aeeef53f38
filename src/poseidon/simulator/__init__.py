"""Predicts steps: what is computed and sent when, under a plan, on a cluster that was measured."""

from poseidon.simulator.rates import rates_for
from poseidon.simulator.simulate import Simulation, simulate

__all__ = ["Simulation", "rates_for", "simulate"]
