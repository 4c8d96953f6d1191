"""Several runs: compared, swept over options, or scaled over workers."""
