"""What data holds and what a run will draw of it: describe, plan, prepare and top."""
