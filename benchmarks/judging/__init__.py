"""Judging plans by real steps: one model in a process of its own."""
