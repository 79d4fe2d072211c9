"""The stand-alone training command: arguments, loop and metrics."""
