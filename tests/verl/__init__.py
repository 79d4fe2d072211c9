"""verl itself, with the engine of the vendor hdp."""
