"""Who computes and sends what, and what it costs. Nothing in this folder imports torch."""
