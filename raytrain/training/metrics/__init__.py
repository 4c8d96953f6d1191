"""What a run measures: its metrics and rows, early stopping, margins of samples, pictures, and the use of machines."""
