"""Settings of torch's DataLoader, measured on the user's own data."""
