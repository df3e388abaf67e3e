"""Studies: what the experiments share."""
