"""Plans and profiles in, tables and pictures out."""
