"""The equations of K-FAC as functions from tensors to tensors."""
