"""Readers of images: ImageNet folders, tar shards, CIFAR-10, digits, pictures, MRI slices."""
