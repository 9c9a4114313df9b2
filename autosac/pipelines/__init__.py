"""Plans for pipelines: stages on ranks that hand micro-batches on to one another."""
