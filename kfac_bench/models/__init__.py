"""Models that torchvision lacks, and the door to those that it has."""
