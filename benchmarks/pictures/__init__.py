"""Pictures of lessons that are not plots of a results file, and the tools for all pictures."""
