"""Images: pictures that stay encoded in a store and are decoded into a batch."""
