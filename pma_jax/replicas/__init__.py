"""Averaging between workers that train apart from each other: one algorithm per file, as functions of pytrees."""
