"""Tables and figures of papers: their files, the runs that they need, and their results."""
