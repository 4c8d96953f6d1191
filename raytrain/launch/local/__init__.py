"""On this machine, without Ray."""
