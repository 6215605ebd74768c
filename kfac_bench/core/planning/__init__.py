"""The work and the messages of each rank, and their cost. Nothing in this folder imports torch."""
