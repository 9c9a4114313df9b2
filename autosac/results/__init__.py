"""What was planned for, a row for each: tables, files and pictures."""
