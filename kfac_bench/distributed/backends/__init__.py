"""The code of the backends; the file of a backend's options imports it when the run starts."""
