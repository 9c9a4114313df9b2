"""Memory plans for joint graphs: capture, plan, rewrite, compile."""
