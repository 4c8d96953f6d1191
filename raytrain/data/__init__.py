"""Images and their labels: which ones, in which order, decoded how."""
