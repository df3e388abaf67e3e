"""Why merging works and how far it goes: landscapes, curvature, frequency responses, scaling laws, comparisons.

Functions of parameter trees and of numbers; none reads a run. Every one that needs a loss takes it as a function of the
parameters alone: `workbench.open_workbench` makes such a loss from the held-out text of a run.
"""
