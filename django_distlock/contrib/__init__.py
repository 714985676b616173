"""What works only together with another library, one module for each."""
