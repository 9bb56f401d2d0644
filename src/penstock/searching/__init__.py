"""Comparing plans, and finding better ones than that at hand; the code that runs them proves or simulates each."""
