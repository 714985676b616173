"""What makes locks work, and nobody outside imports."""
