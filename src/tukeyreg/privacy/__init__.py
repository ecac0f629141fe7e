"""What a release may cost, what it will cost, and the check of what it did cost."""
