"""Pictures as plain data, and the two libraries that draw them."""
