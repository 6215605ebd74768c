"""What notices misuse while training runs: an error where it is certain, else one warning."""
