"""Predicts what a step of a config needs on any mesh, without its devices: `tune plan`."""
