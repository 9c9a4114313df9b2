"""The same questions about joint graphs: capture, plan, rewrite, compile."""
