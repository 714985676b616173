"""Processes that lock while servers and processes fail, and a checker that reads what they wrote down."""
