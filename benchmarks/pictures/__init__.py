"""The pictures of lessons that are no plots of a results file, and what every picture is made with."""
