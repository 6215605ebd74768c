"""Small semantic changes of the package, and the command that checks that tests notice them."""
