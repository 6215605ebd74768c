"""The code of the networks; the file of a model's options imports it when the model is built."""
