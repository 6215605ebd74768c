"""The models: their options, and the networks that torchvision and transformers lack."""
