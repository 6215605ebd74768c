"""What a model is trained for and how its quality is measured."""
