"""Why merging works and how far it goes: learned weights, landscapes, curvature, spectra, scaling laws, comparisons.

Functions of parameter trees and of numbers; none reads a run. Every one that needs a loss takes it as a function of the
parameters alone: `text_loss.text_loss` makes one of held-out batches.
"""
