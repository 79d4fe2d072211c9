"""What a plan looks like: pictures, pages to explore, traces."""
