"""The equations of K-FAC as functions of tensors."""
