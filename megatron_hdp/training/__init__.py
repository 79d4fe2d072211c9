"""The stand-alone training command: loop, metrics and traces."""
