"""Ops on fake tensors: what they return, worked out once for calls that are alike."""
