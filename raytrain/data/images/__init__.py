"""Pixels: decoding, crop boxes, reading."""
