"""What else lowers a peak: changes of a step, each traced and planned."""
