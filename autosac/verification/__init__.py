"""What real steps take, with and without a plan."""
