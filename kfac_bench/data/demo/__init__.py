"""Demo datasets: small data in published layouts, drawn or derived from installed packages."""
