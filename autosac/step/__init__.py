"""What one training step is: what a user passes, and the tape of what it did."""
