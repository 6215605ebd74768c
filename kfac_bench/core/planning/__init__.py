"""Who computes and sends what, and what that costs. Nothing here imports torch."""
