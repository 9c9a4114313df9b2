"""A profile and a cluster in, FSDP units and AC units for every rank out."""
