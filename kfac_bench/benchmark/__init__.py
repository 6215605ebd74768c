"""Tables and figures of papers: what a file says, the runs it makes, what is computed and shown."""
