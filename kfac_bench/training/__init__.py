"""What the trainer is made of: when it stops, what it reads, what it records, what it saves."""
