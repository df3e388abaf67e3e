"""Studies: what the experiments share, from trunks and a cache of runs to the pages with their results."""
