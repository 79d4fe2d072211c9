"""What several commands have in common: numbers, the ranks and their costs, units to print."""
