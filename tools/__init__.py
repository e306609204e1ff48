"""Programs for maintainers: what a machine has, one stage alone, and tests of the tests."""
