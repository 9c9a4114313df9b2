"""A model and a plan in, a model that recomputes out."""
