"""What the user calls: one file per op."""
