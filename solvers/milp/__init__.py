"""Linear and mixed-integer programs: how they are run, and how a solve ended."""
