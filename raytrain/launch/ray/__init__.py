"""Runs on a Ray cluster: the only package that imports Ray."""
