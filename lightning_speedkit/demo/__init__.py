"""The embedded default: what the kit does to a small real training, measured on the machine at hand."""
