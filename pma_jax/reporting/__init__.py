"""Reporting: figures and one self-contained HTML page."""
