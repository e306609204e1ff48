"""Variants of the stages' programs: each opens a lab, with one function that the learner writes."""
