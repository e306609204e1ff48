"""What production engines add on top of the six stages; each folder is a lesson."""
