"""What a lock costs, beside the raw commands it stands for and what one would pick instead."""
