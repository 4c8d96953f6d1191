"""Checks of a cluster, its nodes and devices, and of the samples that a run used."""
