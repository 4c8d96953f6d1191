"""Labels: which images there are, and the class of each."""
