"""Tables and figures of papers: what is computed beside runs, what is measured, how it is shown."""
