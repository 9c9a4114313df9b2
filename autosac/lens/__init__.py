"""What a GPU would run where a trace on the CPU chooses otherwise."""
