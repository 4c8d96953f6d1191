"""What makes N workers compute what one would: gradients, batch norm, dropout, gathered rows. Needs no run."""
