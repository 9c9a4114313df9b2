"""A tape and op policies in, live memory at every instant out."""
