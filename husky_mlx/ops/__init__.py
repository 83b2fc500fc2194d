"""The decode step's operations, one a file: plain ``mx`` code that any fused kernel is held to."""
