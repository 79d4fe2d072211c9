"""What a hostile user tries, as rows of one table: each is a function that says what it saw."""
