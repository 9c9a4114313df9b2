"""What a device is and does: sizes, speeds, workspaces, its allocator's events."""
