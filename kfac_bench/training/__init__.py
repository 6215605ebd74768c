"""What the trainer is made of: an update and its rate; what it reads, records, saves; its end."""
