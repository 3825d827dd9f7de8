"""What ``python -m benchmarks.spikes`` is made of: training with bad batches, and showing what became of it."""
