"""Training on one worker: the loop, and the arithmetic that makes N workers compute what one would. Knows no Ray."""
