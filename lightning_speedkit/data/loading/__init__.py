"""Loading: batches made by threads or processes in memory that is used again and again."""
