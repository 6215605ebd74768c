"""Demo datasets: small data, drawn or derived from installed packages, in the real layouts."""
