"""Staging: stores brought to a local disk once per node."""
