"""The data of users, read through the interface of every dataset."""
