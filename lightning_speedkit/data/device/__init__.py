"""The device side: batches copied ahead, and transformed as a whole."""
